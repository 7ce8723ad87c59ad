// The calls of the stress test's jobs: drawn alike on all ranks, made as some release makes them, and
// checked.
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "stress.h"

uint64_t mix(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

uint64_t draw(uint64_t* state) { return mix((*state)++); }

// ---- the script: the same on all ranks ----

int group_of(int c, int rank) { return c == 1 ? rank / 4 : c == 2 ? rank / 2 : 0; }
int size_of(int c) { return c == 1 ? 4 : c == 2 ? 2 : N_RANKS; }
static int nodes_of(int c) { return c == 0 ? 2 : 1; }
uint64_t comm_id(const struct job* job, int c, int rank, int made) {
  return mix(job->seed ^ (uint64_t)(c * 1000 + group_of(c, rank) * 10 + made)) | 1;
}

static size_t message_size(uint64_t* state) {
  const uint64_t r = draw(state);
  return r % 4 ? (size_t)1 << (r >> 8) % 31 : (size_t)(r >> 8) % (1u << 26) + 1;
}

// NCCL's table for a message: the same cells on all ranks, some of them not offered, at times none.
static void fill_offer(float cost[N_ALGOS][N_PROTOS], uint64_t key) {
  const bool nothing = key % 23 == 0;
  for (int a = 0; a < N_ALGOS; a++) {
    for (int p = 0; p < N_PROTOS; p++) {
      const uint64_t r = mix(key + (uint64_t)(a * N_PROTOS + p));
      cost[a][p] = nothing || r % 3 == 0 ? -1.0f : (float)(r >> 40) / 1000.0f + 1.0f;
    }
  }
}

static uint32_t zlib_crc32(uint32_t crc, const uint8_t* p, size_t n) {
  crc = ~crc;
  while (n--) {
    crc ^= *p++;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

size_t make_table(const struct job* job, int round, uint8_t* message) {
  uint64_t state = mix(job->seed + 77 * (uint64_t)round);
  static const uint32_t classes[][2] = {{0, 0}, {2, 1}, {4, 1}, {N_RANKS, 1}, {N_RANKS, 2}};
  struct dccl_rule* rows = (struct dccl_rule*)(message + sizeof(struct dccl_table_head));
  uint32_t n = 0;
  for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
    for (int func = FUNC_ALL_GATHER; func <= FUNC_REDUCE_SCATTER; func++) {
      for (uint64_t low = 0; n < MAX_ROWS && low < UINT64_C(1) << 31;) {
        const uint64_t high = low + draw(&state) % (UINT64_C(1) << 30), r = draw(&state);
        if (r % 3) {
          const bool pair = r >> 8 & 1;
          rows[n++] = (struct dccl_rule){.n_ranks = classes[i][0],
                                         .n_nodes = classes[i][1],
                                         .min_bytes = low,
                                         .max_bytes = high,
                                         .func = (uint8_t)func,
                                         .algo = pair ? (uint8_t)((r >> 16) % N_ALGOS) : DCCL_UNSET,
                                         .proto = pair ? (uint8_t)((r >> 24) % N_PROTOS) : DCCL_UNSET,
                                         .n_channels = (uint8_t)((r >> 32) % 65)};
        }
        low = high + 1;
      }
    }
  }
  struct dccl_table_head head = {.magic = DCCL_TABLE_MAGIC,
                                 .version = DCCL_TABLE_VERSION,
                                 .n_rows = n,
                                 .generation = (uint32_t)round + 1};
  const size_t size = sizeof head + n * sizeof *rows;
  memcpy(message, &head, sizeof head);
  head.crc = zlib_crc32(0, message, size);
  memcpy(message, &head, sizeof head);
  return size;
}

// ---- one call, as a release makes it ----

static int ask(const struct job* job, void* context, int func, size_t n_bytes, int n_pipe_ops,
               float cost[N_ALGOS][N_PROTOS], int reg_buff, int* n_channels) {
  float** table = (float**)(void*)cost;
  switch (job->tuner_version) {
    case 3:
      return ncclTunerPlugin_v3.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              n_channels);
    case 4:
      return ncclTunerPlugin_v4.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              reg_buff, n_channels);
    case 5:
      return ncclTunerPlugin_v5.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              reg_buff, n_channels);
    default:
      return ncclTunerPlugin_v6.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              reg_buff, n_channels);
  }
}

static int choose(const float cost[N_ALGOS][N_PROTOS], bool takes_negative) {
  int best = 255;
  float least = 3600000000.0f;
  for (int i = 0; i < N_ALGOS * N_PROTOS; i++) {
    const float c = cost[i / N_PROTOS][i % N_PROTOS];
    if (c != -1.0f && (takes_negative || c >= 0) && c < least) {
      least = c;
      best = i;
    }
  }
  return best;
}

static void check_call(const struct job* job, int group, int at, void* context, int func, size_t n_bytes,
                       uint64_t key, int reg_buff) {
  float offer[N_ALGOS][N_PROTOS], cost[N_ALGOS][N_PROTOS];
  fill_offer(offer, key);
  memcpy(cost, offer, sizeof cost);
  int n_channels = 0;
  if (ask(job, context, func, n_bytes, 1, cost, reg_buff, &n_channels))
    atomic_fetch_add(&shared->n_failures, 1);
  const int chosen = choose(cost, job->takes_negative);
  const bool forced = memcmp(cost, offer, sizeof cost) != 0;
  if (chosen != 255 && offer[chosen / N_PROTOS][chosen % N_PROTOS] < 0)
    atomic_fetch_add(&shared->n_outside, 1);
  for (int i = 0; i < N_ALGOS * N_PROTOS; i++) {
    const float before = offer[i / N_PROTOS][i % N_PROTOS], after = cost[i / N_PROTOS][i % N_PROTOS];
    if (after != before && (before < 0 || after < 0 || i != chosen)) atomic_fetch_add(&shared->n_outside, 1);
  }
  if (n_channels < 0 || n_channels > 64) atomic_fetch_add(&shared->n_outside, 1);
  atomic_fetch_add(&shared->n_calls, 1);
  if (forced || n_channels) atomic_fetch_add(&shared->n_forced, 1);
  const uint32_t mine = 1u << 31 | (uint32_t)chosen << 8 | (uint32_t)n_channels;
  uint32_t theirs = 0;
  if (!atomic_compare_exchange_strong(&shared->choice[group][at], &theirs, mine) && theirs != mine) {
    atomic_fetch_add(&shared->n_disagreements, 1);
  }
}

// Calls that NCCL makes beside the one that counts: probes of 2.32, the second look of 2.21, broken callers.
static void ask_aside(const struct job* job, void* context, int func, size_t n_bytes, uint64_t r) {
  float cost[N_ALGOS][N_PROTOS];
  int n_channels = 0;
  fill_offer(cost, r);
  if (r % 3 == 0) {
    for (int i = 0; i < N_ALGOS * N_PROTOS; i++) cost[i / N_PROTOS][i % N_PROTOS] = -1.0f;
  }
  ask(job, context, func, n_bytes, 0, cost, 0, &n_channels);
  if (r % 5 == 0) ask(job, context, (int)(r >> 20) - 1000, n_bytes, -7, cost, 3, NULL);
  if (r % 7 == 0) ask(job, NULL, func, n_bytes, 1, cost, 0, &n_channels);
}

// What NCCL tells of one collective once it is launched: at once, or later and on another thread.
struct told {
  const struct job* job;
  void *profiler, *call;  // the context, and the handle of the program's call
  int func;
  size_t n_bytes;
  uint64_t seq;
};

static void* start(const struct told* t, uint64_t type, void* parent, const struct nccl_coll_event* coll,
                   int c) {
  void* handle = NULL;
  const struct nccl_kernel_ch_event kernel = {(uint8_t)c, 100};
  struct nccl_event_v5 e = {.type = type, .parent = parent, .rank = t->job->rank};
  if (type == EVENT_COLL) e.coll = *coll;
  if (type == EVENT_COLL_API)
    e.coll_api =
        (struct nccl_coll_api_event){.func = coll->func, .count = coll->count, .datatype = "ncclInt8"};
  if (type == EVENT_KERNEL_CH) e.kernel_ch = kernel;
  ncclProfiler_v6.start_event(t->profiler, &handle, &e);
  return handle;
}

static const char* name_of(int func) {
  return func == FUNC_ALL_GATHER ? "AllGather" : func == FUNC_REDUCE_SCATTER ? "ReduceScatter" : "AllReduce";
}

static struct nccl_coll_event event_of(const struct told* t) {
  return (struct nccl_coll_event){.seq = t->seq,
                                  .func = name_of(t->func),
                                  .count = t->n_bytes,
                                  .datatype = "ncclInt8",
                                  .n_channels = 2,
                                  .algo = "RING",
                                  .proto = "LL128"};
}

static void report(const struct told* t) {
  const struct nccl_coll_event coll = event_of(t);
  void* handle = start(t, EVENT_COLL, t->call, &coll, 0);
  union nccl_event_state state = {.kernel_ch_timer = 200};
  for (int c = 0; c < 2; c++) {
    void* channel = start(t, EVENT_KERNEL_CH, handle, NULL, c);
    ncclProfiler_v5.record_event_state(channel, STATE_KERNEL_CH_STOP, &state);
    ncclProfiler_v5.stop_event(channel);
  }
  ncclProfiler_v5.stop_event(handle);
}

// ---- the thread of CUDA's that tells late ----

static int mask;  // NCCL's event mask: one a process

enum { QUEUE = 64 };
static struct told queue[QUEUE];
static _Atomic uint64_t n_queued, n_done;
static _Atomic bool is_over;
static pthread_t host_stream;
static pthread_mutex_t queueing = PTHREAD_MUTEX_INITIALIZER;

static void* tell_late(void* argument) {
  const struct job* job = argument;
  uint64_t own = mix(job->seed ^ (uint64_t)job->rank << 48);
  for (;;) {
    const uint64_t next = atomic_load(&n_done);
    if (next == atomic_load(&n_queued)) {
      if (atomic_load(&is_over)) return NULL;
      sched_yield();
      continue;
    }
    if (draw(&own) % 2) usleep((useconds_t)(draw(&own) % 2000));
    report(&queue[next % QUEUE]);
    atomic_store(&n_done, next + 1);
  }
}

void begin_host_stream(const struct job* job) {
  if (job->tells_late && pthread_create(&host_stream, NULL, tell_late, (void*)(uintptr_t)job)) abort();
}

void end_host_stream(void) {
  atomic_store(&is_over, true);
  if (host_stream != 0) pthread_join(host_stream, NULL);
}

void catch_up(void) {
  while (atomic_load(&n_done) != atomic_load(&n_queued)) sched_yield();
}

static void put_off(const struct told* t) {
  pthread_mutex_lock(&queueing);
  while (atomic_load(&n_queued) - atomic_load(&n_done) == QUEUE) sched_yield();
  queue[atomic_load(&n_queued) % QUEUE] = *t;
  atomic_fetch_add(&n_queued, 1);
  pthread_mutex_unlock(&queueing);
}

// ---- a communicator ----

struct comm make(const struct job* job, int c, int made) {
  const int size = size_of(c), nodes = nodes_of(c), rank = job->rank;
  const int group = (c * N_RANKS + group_of(c, rank)) * N_MADE + made;
  struct comm comm = {.id = comm_id(job, c, rank, made), .group = group, .size = size, .n_nodes = nodes};
  ncclProfiler_v5.init(&comm.profiler, comm.id, &mask, "stress", nodes, size, rank % size, NULL);
  if (job->tuner_version < 5)  // which is told no id
    ncclTunerPlugin_v3.init((size_t)size, (size_t)nodes, NULL, &comm.tuner);
  else
    ncclTunerPlugin_v6.init(&comm.tuner, comm.id, (size_t)size, (size_t)nodes, NULL, NULL, NULL);
  return comm;
}

void destroy(struct comm* comm) {
  ncclTunerPlugin_v5.finalize(comm->tuner);
  ncclProfiler_v5.finalize(comm->profiler);
}

// What a call is asked about, launched and told by: the program makes it alone, or as the second of a group.
static int draw_func(uint64_t* script) {
  const uint64_t r = draw(script) % 5;
  return r == 0 ? FUNC_ALL_REDUCE : FUNC_ALL_GATHER + (int)(r % 2);
}

void call(const struct job* job, const struct comm* comm, int at, uint64_t r) {
  uint64_t script = mix(job->seed ^ (uint64_t)(comm->group * N_CALLS + at));
  const int n = draw(&script) % 4 == 0 ? 2 : 1;  // of the group, each with a function and a size of its own
  struct told told[2];
  for (int i = 0; i < n; i++) {
    const int func = draw_func(&script);
    told[i] = (struct told){job, comm->profiler, NULL, func, message_size(&script), (uint64_t)at};
  }
  const struct nccl_coll_event coll = event_of(&told[0]);
  if (r % 32 == 5) {  // a group that is priced alone, on this rank
    start(told, EVENT_GROUP_API, NULL, NULL, 0);
    start(told, EVENT_COLL_API, NULL, &coll, 0);
    ask_aside(job, comm->tuner, told[0].func, told[0].n_bytes, r);
  }
  // Sends and receives of this rank: a group of their own, which is launched.
  if (r % 16 == 5) start(told, EVENT_KERNEL_LAUNCH, start(told, EVENT_GROUP_API, NULL, NULL, 0), NULL, 0);
  void* calls = start(told, EVENT_GROUP_API, NULL, NULL, 0);  // the handle of the program's group of calls
  for (int i = 0; i < n; i++) {
    const struct nccl_coll_event one = event_of(&told[i]);
    told[i].call = start(&told[i], EVENT_COLL_API, calls, &one, 0);
  }
  if (r % 4 == 0) ask_aside(job, comm->tuner, told[0].func, told[0].n_bytes, r);
  if (r % 16 == 0) sched_yield();
  if (r % 8 == 1) usleep((useconds_t)(r >> 20) % 500);
  for (int i = 0; i < n; i++)
    check_call(job, comm->group, 2 * at + i, comm->tuner, told[i].func, told[i].n_bytes, draw(&script),
               (int)(r >> 40 & 1));
  start(told, EVENT_KERNEL_LAUNCH, calls, NULL, 0);
  // Collectives go over the network between nodes, and wherever NCCL is to time their kernels.
  const bool over_network = comm->n_nodes > 1 || __atomic_load_n(&mask, __ATOMIC_RELAXED) & EVENT_KERNEL_CH;
  const bool is_late =
      job->tells_late && over_network && (r >> 50 & 1 || atomic_load(&n_done) != atomic_load(&n_queued));
  for (int i = 0; i < n; i++) {
    if (is_late)
      put_off(&told[i]);
    else
      report(&told[i]);
  }
}
