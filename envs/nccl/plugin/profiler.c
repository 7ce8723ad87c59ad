// The profiler part: what really ran, and where sampled how long its kernel took.
//
// A collective's own start and stop are host time (it was enqueued), so its record is written at the start.
// Kernel times come later, channel by channel, from NCCL's proxy thread; the last channel to stop writes the
// record.
//
// A handle is no pointer: it packs the index of a pool entry, the entry's lap and the channel. NCCL only
// hands it back, so a handle that is stale, foreign or garbage is recognised and ignored.
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

enum { POOL = 4096, POOL_BITS = 12, CHANNEL_BITS = 8 };

// A sampled collective. Atomic throughout: with more than POOL collectives in flight an entry is reused while
// the proxy thread may still be reporting its former owner.
struct flight {
  _Atomic uint64_t lap;    // 0 while it is being filled
  _Atomic uint64_t kinds;  // func, algo, proto, n_channels, dtype, one byte each
  _Atomic uint64_t comm_id, n_bytes, seq;
  _Atomic uint32_t rank, step, generation, n_stopped;
  _Atomic int64_t start_ns, end_ns;
};

static struct flight flights[POOL];
static _Atomic uint64_t next_flight;

static _Atomic int sampling;
static int* _Atomic nccl_mask;  // one int in NCCL for the whole process, read before every event
static _Atomic int n_contexts;
static _Atomic int interface;  // its version, as NCCL speaks it

struct profiler {
  struct dccl_comm comm;
  struct dccl_seat* seat;
  _Atomic bool has_times;  // a collective with kernel times has run: NCCL has its memory for them
};

// ---- NCCL's names -> numbers ----

static const char* const func_names[N_FUNCS] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                                "AllReduce", "SendRecv", "Send",      "Recv"};
static const char* const algo_names[N_ALGOS] = {
    "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
static const char* const proto_names[N_PROTOS] = {"LL", "LL128", "SIMPLE"};
static const char* const dtype_names[] = {"Int8",    "Uint8",    "Int32",      "Uint32",
                                          "Int64",   "Uint64",   "Float16",    "Float32",
                                          "Float64", "Bfloat16", "Float8e4m3", "Float8e5m2"};
static const uint8_t dtype_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum { N_DTYPES = sizeof dtype_bytes };

static char folded(const char** text) {
  while (**text == '_') ++*text;
  const char c = **text;
  return c >= 'A' && c <= 'Z' ? (char)(c + ('a' - 'A')) : c;
}

// Spellings differ between releases (NVLS_TREE, NVLSTree): case and underscores do not count.
static bool same_name(const char* a, const char* b) {
  for (;; a++, b++) {
    const char c = folded(&a);
    if (c != folded(&b)) return false;
    if (c == 0) return true;
  }
}

static uint8_t number(const char* name, const char* const* names, int n) {
  if (name == NULL) return DCCL_UNSET;
  for (int i = 0; i < n; i++) {  // as most releases spell it: this is in the path of every collective
    if (*name == *names[i] && strcmp(name, names[i]) == 0) return (uint8_t)i;
  }
  for (int i = 0; i < n; i++) {
    if (same_name(name, names[i])) return (uint8_t)i;
  }
  return DCCL_UNSET;
}

// NCCL's size of a message: the whole buffer where `count` is one rank's share. 0 if the type is unknown.
static uint64_t message_bytes(uint8_t func, uint8_t dtype, size_t count, uint32_t n_ranks) {
  const uint64_t bytes = dtype == DCCL_UNSET ? 0 : (uint64_t)count * dtype_bytes[dtype];
  return func == FUNC_ALL_GATHER || func == FUNC_REDUCE_SCATTER ? bytes * n_ranks : bytes;
}

// ---- handles ----

// The first byte of ours is one that no address of a process begins with.
static bool is_ours(const void* handle) { return (uint64_t)(uintptr_t)handle >> 56 == 0xDC; }

static void* pack(uint64_t index, uint64_t channel_plus_1, uint64_t lap) {
  const uint64_t bits = lap << (POOL_BITS + CHANNEL_BITS) | channel_plus_1 << POOL_BITS | index;
  return (void*)(uintptr_t)((bits & (UINT64_MAX >> 8)) | UINT64_C(0xDC) << 56);
}

// Handles of no flight. NCCL 2.27 tells of a collective only where its group has one. A call that is captured
// into a CUDA graph has one by which its collectives are known, at each replay and on whatever thread. So has
// any other call: its number is where a lap would be.
// From 2.28.3 on a group of calls has one as well, with another first byte and its number: it comes back as
// the parent of the group's launches (read in 2.28.9, 2.29.7 and 2.30.7, disassembled in 2.32.3).
enum { OF_GROUP, OF_CAPTURED_CALL, OF_CALL };
enum { NO_CHANNEL = (1 << CHANNEL_BITS) - 1 };
static void* token(uint64_t which) { return pack(which, 0, 0); }
static void* call_token(uint64_t number) { return pack(OF_CALL, NO_CHANNEL, number); }

enum { GROUP_BYTE = 0xDD };

static void* group_token(uint64_t number) { return (void*)(uintptr_t)(number | (uint64_t)GROUP_BYTE << 56); }

// The number of the group that a handle means, 0: none.
static uint64_t group_of(const void* handle) {
  const uint64_t bits = (uint64_t)(uintptr_t)handle;
  return bits >> 56 == GROUP_BYTE ? bits & (UINT64_MAX >> 8) : 0;
}

static bool is_call(const void* handle) {
  const uint64_t low = (uint64_t)(uintptr_t)handle & ((1 << (POOL_BITS + CHANNEL_BITS)) - 1);
  return is_ours(handle) && low == (OF_CALL | (uint64_t)NO_CHANNEL << POOL_BITS);
}

static uint64_t lap_of(const void* handle) {
  return ((uint64_t)(uintptr_t)handle & (UINT64_MAX >> 8)) >> (POOL_BITS + CHANNEL_BITS);
}

// The flight that a handle means, or NULL.
static struct flight* flight_of(const void* handle) {
  if (!is_ours(handle)) return NULL;
  const uint64_t lap = lap_of(handle);
  struct flight* f = &flights[(uint64_t)(uintptr_t)handle & (POOL - 1)];
  return lap != 0 && atomic_load_explicit(&f->lap, memory_order_acquire) == lap ? f : NULL;
}

static void* take_off(const struct dccl_record* coll) {
  const uint64_t ticket = atomic_fetch_add_explicit(&next_flight, 1, memory_order_relaxed);
  const uint64_t lap = ticket / POOL + 1;
  struct flight* f = &flights[ticket % POOL];
  atomic_store_explicit(&f->lap, 0, memory_order_relaxed);
  uint64_t kinds = 0;
  memcpy(&kinds, &coll->func, 5);
  atomic_store_explicit(&f->kinds, kinds, memory_order_release);
  atomic_store_explicit(&f->comm_id, coll->comm_id, memory_order_release);
  atomic_store_explicit(&f->n_bytes, coll->n_bytes, memory_order_release);
  atomic_store_explicit(&f->seq, coll->coll.seq, memory_order_release);
  atomic_store_explicit(&f->rank, coll->coll.rank, memory_order_release);
  atomic_store_explicit(&f->step, coll->step, memory_order_release);
  atomic_store_explicit(&f->generation, coll->generation, memory_order_release);
  atomic_store_explicit(&f->n_stopped, 0, memory_order_release);
  atomic_store_explicit(&f->start_ns, INT64_MAX, memory_order_release);
  atomic_store_explicit(&f->end_ns, INT64_MIN, memory_order_release);
  atomic_store_explicit(&f->lap, lap, memory_order_release);
  return pack(ticket % POOL, 0, lap);
}

static void land(struct flight* f, const void* handle) {
  struct dccl_record r = {.kind = DCCL_KERNEL,
                          .comm_id = atomic_load_explicit(&f->comm_id, memory_order_acquire),
                          .n_bytes = atomic_load_explicit(&f->n_bytes, memory_order_acquire),
                          .step = atomic_load_explicit(&f->step, memory_order_acquire),
                          .generation = atomic_load_explicit(&f->generation, memory_order_acquire)};
  const uint64_t kinds = atomic_load_explicit(&f->kinds, memory_order_acquire);
  memcpy(&r.func, &kinds, 5);
  r.kernel.seq = atomic_load_explicit(&f->seq, memory_order_acquire);
  r.kernel.start_ns = atomic_load_explicit(&f->start_ns, memory_order_acquire);
  r.kernel.end_ns = atomic_load_explicit(&f->end_ns, memory_order_acquire);
  r.kernel.rank = atomic_load_explicit(&f->rank, memory_order_acquire);
  if (flight_of(handle) == f) dccl_emit(&r);  // not reused while we read it
}

// ---- events ----

static uint8_t type_of(const char* name) {
  const bool is_ncclnamed = name != NULL && strncmp(name, "nccl", 4) == 0;
  return number(is_ncclnamed ? name + 4 : name, dtype_names, N_DTYPES);
}

// The program's call. NCCL hands the handle back with the collective that comes of it.
static void* start_call(const struct profiler* p, const struct nccl_coll_api_event* e) {
  const struct dccl_call call = {e->func, e->datatype, e->count, e->graph_captured};
  const uint64_t number = dccl_note_call(p->seat, &call);
  if (call.captured) return token(OF_CAPTURED_CALL);
  return number != 0 ? call_token(number) : NULL;
}

static void note_times(struct profiler* p) {
  if (atomic_load_explicit(&p->has_times, memory_order_relaxed)) return;
  const int* mask = atomic_load(&nccl_mask);
  if (mask == NULL || (__atomic_load_n(mask, __ATOMIC_RELAXED) & EVENT_KERNEL_CH) == 0) return;
  if (!atomic_exchange(&p->has_times, true)) dccl_needs_no_room();
}

static void* start_coll(struct profiler* p, const struct nccl_coll_event* e, int rank, const void* call) {
  note_times(p);
  struct dccl_record r = {.kind = DCCL_COLL,
                          .func = number(e->func, func_names, N_FUNCS),
                          .algo = number(e->algo, algo_names, N_ALGOS),
                          .proto = number(e->proto, proto_names, N_PROTOS),
                          .n_channels = e->n_channels,
                          .flags = call == token(OF_CAPTURED_CALL) ? DCCL_FLAG_CAPTURED : 0,
                          .comm_id = p->comm.comm_id,
                          .dtype = type_of(e->datatype),
                          .step = dccl_step_now()};
  r.n_bytes = message_bytes(r.func, r.dtype, e->count, p->comm.n_ranks);
  r.coll.seq = e->seq;
  r.coll.enqueue_ns = dccl_now_ns();
  r.coll.rank = (uint32_t)rank;
  dccl_note_coll(p->seat, &r, is_call(call) ? lap_of(call) : 0);
  dccl_emit(&r);
  return atomic_load_explicit(&sampling, memory_order_relaxed) || dccl_is_rare(p->seat) ? take_off(&r) : NULL;
}

static void* start_kernel(void* parent, const struct nccl_kernel_ch_event* e) {
  struct flight* f = flight_of(parent);
  if (f == NULL) return NULL;
  const int64_t now = (int64_t)e->timer;
  int64_t earliest = atomic_load_explicit(&f->start_ns, memory_order_relaxed);
  while (now < earliest && !atomic_compare_exchange_weak(&f->start_ns, &earliest, now)) {
  }
  return pack((uint64_t)(uintptr_t)parent & (POOL - 1), (uint64_t)e->channel % 255 + 1, lap_of(parent));
}

static void stop_kernel(void* handle, uint64_t timer) {
  struct flight* f = flight_of(handle);
  const bool is_channel = (uint64_t)(uintptr_t)handle >> POOL_BITS & ((1 << CHANNEL_BITS) - 1);
  if (f == NULL || !is_channel) return;
  const int64_t now = (int64_t)timer;
  int64_t latest = atomic_load_explicit(&f->end_ns, memory_order_relaxed);
  while (now > latest && !atomic_compare_exchange_weak(&f->end_ns, &latest, now)) {
  }
  const uint32_t n_channels = (uint8_t)(atomic_load_explicit(&f->kinds, memory_order_acquire) >> 24);
  if (atomic_fetch_add(&f->n_stopped, 1) + 1 == n_channels) land(f, handle);
}

void dccl_set_mask(void) {
  int* mask = atomic_load(&nccl_mask);
  if (mask == NULL) return;
  int bits = 0;                            // without a run nobody listens: no event, no cost
  if (dccl_has_run()) bits |= EVENT_COLL;  // counted where there is no ring too: ranks compare the counts
  const bool told_at_calls = atomic_load(&interface) > 4;
  if (dccl_has_run() && told_at_calls) bits |= EVENT_KERNEL_LAUNCH;  // without it groups would not count
  const bool times = dccl_ring_is_open() && (atomic_load(&sampling) || dccl_tries_few);
  if (times && dccl_may_time_kernels()) bits |= EVENT_KERNEL_CH;
  __atomic_store_n(mask, bits, __ATOMIC_RELAXED);
}

void dynamiccl_sample(int on) {
  atomic_store(&sampling, on != 0);
  dccl_set_mask();
}

void dynamiccl_boundary(const struct dccl_record* ended, uint32_t next_step, int sample) {
  if (ended != NULL) {
    struct dccl_record record = *ended;
    record.kind = DCCL_STEP;
    dccl_emit(&record);
  }
  dccl_set_step(next_step);
  dynamiccl_sample(sample);
}

static int start(int version, void** context, uint64_t comm_id, int* mask, const char* name, int n_nodes,
                 int n_ranks, int rank, nccl_logger log) {
  (void)log;
  dynamiccl_open();
  dccl_note_profiler(version);
  atomic_store(&interface, version);
  const struct dccl_comm comm = {true, comm_id, (uint32_t)rank, (uint32_t)n_ranks, (uint32_t)n_nodes};
  dccl_last_comm = comm;
  dccl_emit_comm(&comm, name);
  atomic_fetch_add(&n_contexts, 1);
  if (mask != NULL) atomic_store(&nccl_mask, mask);
  dccl_announce(comm.n_ranks, comm.n_nodes, mask);
  dccl_set_mask();
  if (context == NULL) return NCCL_SUCCESS;
  struct profiler* p = calloc(1, sizeof *p);
  const uint32_t told = version > 4 ? DCCL_TOLD_AT_CALLS : DCCL_TOLD_LATE;
  if (p != NULL) *p = (struct profiler){comm, dccl_sit(comm_id, comm.n_ranks, comm.n_nodes, told), false};
  *context = p;
  return NCCL_SUCCESS;
}

static int finish(void* context) {
  if (context != NULL) {
    struct profiler* p = context;
    dccl_leave(p->seat);
    if (!atomic_load(&p->has_times)) dccl_needs_no_room();
  }
  if (atomic_fetch_sub(&n_contexts, 1) == 1) atomic_store(&nccl_mask, NULL);
  free(context);
  return NCCL_SUCCESS;
}

// There is nothing to do: a collective was enqueued, not finished; a channel's state has told its time.
static int stop_event(void* handle) {
  (void)handle;
  return NCCL_SUCCESS;
}

static int record_event_state(void* handle, int state, union nccl_event_state* args) {
  if (state == STATE_KERNEL_CH_STOP && args != NULL) stop_kernel(handle, args->kernel_ch_timer);
  return NCCL_SUCCESS;
}

// ---- one adapter a version ----

static int init_v4(void** context, int* mask, const char* comm_name, uint64_t comm_id, int n_nodes,
                   int n_ranks, int rank, nccl_logger log) {
  return start(4, context, comm_id, mask, comm_name, n_nodes, n_ranks, rank, log);
}

static int init_v5(void** context, uint64_t comm_id, int* mask, const char* comm_name, int n_nodes,
                   int n_ranks, int rank, nccl_logger log) {
  return start(5, context, comm_id, mask, comm_name, n_nodes, n_ranks, rank, log);
}

static int init_v6(void** context, uint64_t comm_id, int* mask, const char* comm_name, int n_nodes,
                   int n_ranks, int rank, nccl_logger log) {
  return start(6, context, comm_id, mask, comm_name, n_nodes, n_ranks, rank, log);
}

static int start_event_v4(void* context, void** handle, struct nccl_event_v4* e) {
  struct profiler* p = context;
  if (e == NULL || handle == NULL) return NCCL_SUCCESS;
  void* ours = NULL;
  if (e->type == EVENT_GROUP) ours = token(OF_GROUP);
  if (e->type == EVENT_COLL && p != NULL) ours = start_coll(p, &e->coll, e->rank, e->parent);
  if (e->type == EVENT_P2P && p != NULL) note_times(p);
  if (e->type == EVENT_KERNEL_CH) ours = start_kernel(e->parent, &e->kernel_ch);
  *handle = ours;
  return NCCL_SUCCESS;
}

static int start_event_v5(void* context, void** handle, struct nccl_event_v5* e) {
  struct profiler* p = context;
  if (e == NULL || handle == NULL) return NCCL_SUCCESS;
  void* ours = NULL;
  if (e->type == EVENT_GROUP_API)
    ours = group_token(dccl_note_group());
  else if (e->type == EVENT_COLL_API && p != NULL)
    ours = start_call(p, &e->coll_api);
  else if (e->type == EVENT_KERNEL_LAUNCH && p != NULL)
    dccl_note_launch(p->seat, group_of(e->parent));
  else if (e->type == EVENT_COLL && p != NULL)
    ours = start_coll(p, &e->coll, e->rank, e->parent);
  else if (e->type == EVENT_P2P && p != NULL)
    note_times(p);
  else if (e->type == EVENT_KERNEL_CH)
    ours = start_kernel(e->parent, &e->kernel_ch);
  *handle = ours;
  return NCCL_SUCCESS;
}

DCCL_EXPORT const struct nccl_profiler_v4 ncclProfiler_v4 = {
    "dynamiccl", init_v4, start_event_v4, stop_event, record_event_state, finish};
DCCL_EXPORT const struct nccl_profiler_v5 ncclProfiler_v5 = {
    "dynamiccl", init_v5, start_event_v5, stop_event, record_event_state, finish};
DCCL_EXPORT const struct nccl_profiler_v5 ncclProfiler_v6 = {
    "dynamiccl", init_v6, start_event_v5, stop_event, record_event_state, finish};
