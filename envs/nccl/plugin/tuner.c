// The tuner part: NCCL asks how to run a collective, the active table answers, or stays silent.
//
// Rules. Every call succeeds: NCCL fails the collective otherwise. Only cells that NCCL offers are touched
// and nothing negative is written: some releases take the smallest number, whatever its sign. What the table
// leaves unset stays as NCCL, or the tuner that the job has without us, has it. The answer depends only on
// values that are equal on all ranks.
#include <float.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "plugin.h"

enum { MEMO_BITS = 7, MEMO_WAYS = 2, MOST_CELLS = 64 };

// A job asks about a few messages over and over: what was answered last, while the table is the same.
struct memo {
  _Atomic uint64_t key;    // the message, 0: free
  _Atomic uint64_t value;  // epoch of the table << 27 | threads / 256 << 25 | has a row << 24 | decision
  _Atomic bool noted;      // the message's offer is in the ring, or of no use to a tuner
};

struct context {
  struct dccl_comm comm;
  struct dccl_seat* seat;
  uint64_t class;
  int last_tuned;                   // see dccl_last_tuned
  bool keeps_algo;                  // of all-reduces: the user allows no other algorithm
  bool closed[N_PROTOS][N_PROTOS];  // by NCCL's own protocol of a message, and the table's: see hazards
  bool tries_pat;                   // see on_request
  _Atomic bool registers;           // a question was about registered buffers, and the ring says so
  struct dccl_next_tuner next;
  struct memo memo[1 << MEMO_BITS][MEMO_WAYS];
};

// Releases write -1 into a cell that they do not have, and 2.32 also numbers like 1.7e38.
static bool offered(float cost) { return cost >= 0.0f && cost < DCCL_NO_OFFER; }

// Offers of other functions would take the places of these: tuners make no row for them.
static bool is_tuned(const struct context* c, int func) {
  return func >= FUNC_ALL_GATHER && func <= c->last_tuned;
}

static uint64_t key_of(const struct dccl_question* q) {
  return UINT64_C(1) << 63 | (uint64_t)q->n_bytes << 3 | (unsigned)q->func;
}

// The place of a message, which may have been another's until now. NCCL asks on one communicator at a time.
static struct memo* memo_of(struct context* c, const struct dccl_question* q) {
  const uint64_t key = key_of(q);
  const uint64_t hash = key * UINT64_C(0x9e3779b97f4a7c15);
  struct memo* set = c->memo[hash >> (64 - MEMO_BITS)];
  for (int way = 0; way < MEMO_WAYS; way++) {
    if (atomic_load_explicit(&set[way].key, memory_order_acquire) == key) return &set[way];
  }
  struct memo* m = &set[atomic_load_explicit(&set[0].key, memory_order_relaxed) ? hash >> 32 & 1 : 0];
  atomic_store_explicit(&m->key, 0, memory_order_release);
  atomic_store_explicit(&m->value, 0, memory_order_release);
  atomic_store_explicit(&m->noted, !is_tuned(c, q->func), memory_order_release);
  atomic_store_explicit(&m->key, key, memory_order_release);
  return m;
}

// The word of the table that holds now; whether it has one.
static bool look_up(const struct context* c, struct memo* m, const struct dccl_question* q,
                    struct dccl_decision* d) {
  for (;;) {
    const dccl_table table = dccl_table_now(c->seat);
    const uint64_t epoch = dccl_epoch(table), key = key_of(q);
    uint64_t value = atomic_load_explicit(&m->value, memory_order_acquire);
    if (value >> 27 != epoch || atomic_load_explicit(&m->key, memory_order_acquire) != key) {
      *d = (struct dccl_decision){0};
      const int speaks = dccl_lookup(table, c->class, q->func, q->n_bytes, d);
      if (speaks < 0) continue;  // another table by now
      value = epoch << 27 | (uint64_t)(d->threads / 256) << 25 | (uint64_t)speaks << 24 |
              (uint64_t)d->n_channels << 16 | (uint64_t)d->proto << 8 | d->algo;
      // Not if the table was filled anew meanwhile, nor for another message.
      if (dccl_epoch(table) == epoch && atomic_load_explicit(&m->key, memory_order_acquire) == key)
        atomic_store_explicit(&m->value, value, memory_order_release);
    }
    dccl_note_table(c->seat, table);
    *d = (struct dccl_decision){(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                                (uint16_t)((value >> 25 & 3) * 256)};
    return value >> 24 & 1;
  }
}

static bool is_closed(const struct context* c, int own, int table) {
  const bool is_known = own >= 0 && own < N_PROTOS && table < N_PROTOS;
  return is_known && c->closed[own][table];
}

static uint32_t bits_of(float cost) {
  uint32_t bits;
  memcpy(&bits, &cost, sizeof bits);
  return bits;
}

// The first of the smallest, as NCCL chooses; -1 where nothing is offered. As whole numbers the bits of costs
// are in the costs' order, and those of what is not offered are above: so the compiler takes several at once.
static int choice(const struct dccl_question* q, const float* cost) {
  const int n_cells = q->n_algos * q->n_protos;
  uint32_t least = UINT32_MAX;
  for (int i = 0; i < n_cells; i++) {
    const uint32_t bits = bits_of(cost[i]);
    least = bits < least ? bits : least;
  }
  if (least >= bits_of(DCCL_NO_OFFER)) return -1;
  int first = 0;
  while (bits_of(cost[first]) != least) first++;
  return first;
}

// What the job does without us: `cost` as NCCL offered it, but with the choice, and the prices where they are
// prices, of the tuner that was asked before us (it forces a cell by a price of 0). A table with nothing in
// it is no offer. Once a question was about registered buffers, all offers of the communicator say so.
static bool emit_offer(struct context* c, const struct dccl_question* q, const float* cost) {
  const bool told = atomic_load_explicit(&c->registers, memory_order_relaxed);
  const bool is_first = q->reg_buff && !told;
  struct dccl_record r = {.kind = DCCL_OFFER,
                          .func = (uint8_t)q->func,
                          .dtype = DCCL_UNSET,
                          .flags = told || is_first ? DCCL_FLAG_REGISTERED : 0,
                          .comm_id = c->comm.comm_id,
                          .n_bytes = q->n_bytes,
                          .step = dccl_step_now(),
                          .generation = dccl_generation(c->seat)};
  const int chosen = choice(q, q->cost);
  if (chosen < 0) return false;
  r.algo = (uint8_t)(chosen / q->n_protos);
  r.proto = (uint8_t)(chosen % q->n_protos);
  for (int algo = 0; algo < N_ALGOS; algo++) {
    for (int proto = 0; proto < N_PROTOS; proto++) {
      const int cell = algo * q->n_protos + proto;
      const bool closed = cell != chosen && is_closed(c, chosen % q->n_protos, proto);
      const bool inside = algo < q->n_algos && proto < q->n_protos && !closed;
      const float before = inside ? cost[cell] : -1.0f, after = inside ? q->cost[cell] : -1.0f;
      r.offer.cost_us[algo][proto] = !offered(before) ? -1.0f : offered(after) && after > 0 ? after : before;
    }
  }
  r.offer.n_pipe_ops = q->n_pipe_ops;
  dccl_note(&r, is_first);
  if (is_first) atomic_store_explicit(&c->registers, true, memory_order_relaxed);
  return true;
}

// NCCL gives Ring, Tree and PAT no more channels than the communicator has, and NVLS on one node no more than
// NVLS has. For CollNet, and NVLS over nodes, it takes our word, and channels that are not connected hang:
// there the count stays NCCL's.
static bool clips_channels(int algo, uint64_t class) {
  if (algo == ALGO_NVLS) return class >> 32 == 1;
  return algo == ALGO_TREE || algo == ALGO_RING || algo == ALGO_PAT;
}

// From 2.31.2 on NCCL has PAT for several GPUs a node, at a price (half of the largest number) at which
// nothing takes it by itself. It is no offer, so no search tries it. A user who knows that the job's nodes
// have it (read in NCCL: NVLS on, as many ranks a node as NVLS has heads) may ask for it by DYNAMICCL_TRY_PAT
// and a row.
static bool on_request(const struct context* c, int algo, float cost) {
  return c->tries_pat && algo == ALGO_PAT && cost >= DCCL_NO_OFFER && cost < FLT_MAX;
}

// The channels that NCCL itself gives a message on a communicator of `most`: one for each block's worth of
// bytes (2.28.9 to 2.30.7 src/enqueue.cc, topoGetAlgoInfo). 0: left to NCCL. NVLS has channels of its own,
// and CollNet counts by what only NCCL knows. `threads`: of a ring's block under Simple.
static int own_channels(const struct context* c, const struct dccl_question* q, int cell, int most,
                        int threads) {
  const int algo = cell / q->n_protos, proto = cell % q->n_protos;
  if (algo == ALGO_PAT) return most;  // NCCL sets no threads for PAT: every message fills its blocks
  if (algo != ALGO_TREE && algo != ALGO_RING) return 0;
  const uint64_t of_simple = algo == ALGO_RING ? (uint64_t)threads : 512;
  const uint64_t ranks = algo == ALGO_RING ? c->comm.n_ranks : 1;
  const uint64_t block = proto == PROTO_LL      ? 512 * 8 * ranks
                         : proto == PROTO_LL128 ? 640 * 8
                                                : of_simple * 64;
  const uint64_t filled = q->n_bytes / block;
  return filled < 1 ? 1 : filled < (uint64_t)most ? (int)filled : most;
}

// An all-reduce that NCCL runs on NVLS, NVLS Tree or CollNet keeps that. A row is of a class of sizes, in
// which NCCL may go from tree to ring: without the user's word it keeps its algorithm.
static bool is_left_alone(const struct context* c, int own_algo, int algo) {
  const bool is_reached = own_algo == ALGO_RING || own_algo == ALGO_TREE;
  return !is_reached || (c->keeps_algo && algo != own_algo);
}

// The table's word, after the next tuner's; whether it has one. `cost` is NCCL's own offer, `n_channels` its
// own count.
static bool apply(const struct context* c, struct memo* m, const struct dccl_question* q, const float* cost,
                  int n_channels) {
  struct dccl_decision d;
  if (!look_up(c, m, q, &d)) return false;
  const int own = choice(q, q->cost);
  int cell = own;
  bool is_requested = false;
  if (d.algo != DCCL_UNSET) {
    if (d.algo >= q->n_algos || d.proto >= q->n_protos) return false;
    if (q->func == FUNC_ALL_REDUCE && is_tuned(c, q->func) && is_left_alone(c, own / q->n_protos, d.algo))
      return false;
    cell = d.algo * q->n_protos + d.proto;
    // Where it is not offered its channel count was not meant for what NCCL picks either.
    is_requested = on_request(c, d.algo, cost[cell]);
    if (!offered(cost[cell]) && !is_requested) return false;
    if (cell != own && is_closed(c, own % q->n_protos, d.proto)) return false;
    if (cost != q->cost) {  // another tuner had its word: what it said was meant for its own choice
      if (own != cell && q->n_channels != NULL) *q->n_channels = n_channels;
      memcpy(q->cost, cost, (size_t)(q->n_algos * q->n_protos) * sizeof *cost);
    }
    q->cost[cell] = 0.0f;
    for (int i = 0; i < cell; i++)  // of two zeros NCCL takes the first; without a branch, several at once
      q->cost[i] = q->cost[i] == 0.0f ? FLT_MIN : q->cost[i];
  }
  if (d.threads != 0) {  // a ceiling: NCCL untouched, whatever channels the communicator was given beyond
    const int own_count = own < 0 ? 0 : own_channels(c, q, own, d.n_channels, d.threads);
    const bool is_free = q->n_channels != NULL && *q->n_channels == 0;  // another tuner may have set a count
    if (own_count > 0 && is_free) *q->n_channels = own_count;
    return false;
  }
  // How many channels a call has that is not offered is not known.
  const bool fits = d.n_channels >= 1 && d.n_channels <= DCCL_MAX_CHANNELS && !is_requested;
  const bool sets = fits && q->n_channels != NULL;
  if (sets && cell >= 0 && clips_channels(cell / q->n_protos, c->class)) *q->n_channels = d.n_channels;
  return cell >= 0;
}

static void decide(void* context, const struct dccl_question* q) {
  struct context* c = context;
  if (c == NULL || q->cost == NULL || q->func < 0 || q->func >= N_FUNCS) return;
  if (q->n_algos <= 0 || q->n_protos <= 0 || q->n_algos > 64 || q->n_protos > 64) return;
  const bool counts = q->n_pipe_ops != 0;  // 2.32 also asks, with 0, about another way to make the call
  if (counts) dccl_note_question(c->seat, q->func, q->n_bytes);
  const int n_channels = q->n_channels != NULL ? *q->n_channels : 0;
  const size_t size = (size_t)(q->n_algos * q->n_protos) * sizeof(float);
  float own[MOST_CELLS];
  const bool asks = c->next.version && size <= sizeof own;
  if (asks) {
    memcpy(own, q->cost, size);
    if (!dccl_next_tuner_ask(&c->next, q)) {
      memcpy(q->cost, own, size);
      if (q->n_channels != NULL) *q->n_channels = n_channels;
    }
  }
  const float* cost = asks ? own : q->cost;
  struct memo* m = memo_of(c, q);
  // A message may be asked about before its buffers are registered, as in steps before a graph is captured.
  const bool is_known = atomic_load_explicit(&m->noted, memory_order_relaxed) &&
                        (!q->reg_buff || atomic_load_explicit(&c->registers, memory_order_relaxed));
  if (counts && !is_known && dccl_ring_is_open())
    atomic_store_explicit(&m->noted, emit_offer(c, q, cost), memory_order_relaxed);
  // A graph replays for ever what it was captured with, and ranks may capture at different times: no table
  // that may change has a word in it.
  if (dccl_has_run() && dccl_is_captured(c->seat)) return;
  if (apply(c, m, q, cost, n_channels) && counts) dccl_note_answer();
}

// Changes of the protocol that can hang or corrupt a job over nodes: closed to every table. Under a trial
// both settings of a message run in one job, the table's and NCCL's own, in turns at every step. So a pair is
// a hazard whichever of the two is the table's. `agent/checks/faults.py` has the releases and their sources;
// here NCCL's interface stands for the release, as all ranks have the same one.
//
// With buffers that the network has registered (which ranks may see otherwise) LL before Simple can hang for
// good: NVIDIA/nccl#2389, since 2.24, whose tuner is v4. NVIDIA closed it in September 2026 with commit
// eb6d302 of its development branch, "part of the 2.32u1 release"; 2.32.6 is the first number after that, and
// its notes do not name the fix. So no table forces LL, which NCCL's own Simple would follow, nor Simple
// where NCCL runs LL.
//
// On Grace the network writes into the GPU's memory through the C2C link, which may tear the 128 bytes of
// LL128 apart: NVIDIA/nccl#2001 and #2053, since 2.27, whose tuner is v4 too; no number has the fix yet.
static const struct {
  int tuner;  // its interface, from which on
  bool only_arm;
  uint8_t own, table;  // protocols: NCCL's own of the message, UNSET: any; the table's
} hazards[] = {
    {4, false, DCCL_UNSET, PROTO_LL},
    {4, false, PROTO_LL, PROTO_SIMPLE},
    {4, true, DCCL_UNSET, PROTO_LL128},
};

static void close_protocols(struct context* c, int version) {
  struct utsname machine;
  const bool is_arm = uname(&machine) == 0 && strcmp(machine.machine, "aarch64") == 0;
  for (size_t i = 0; i < sizeof hazards / sizeof *hazards; i++) {
    if (version < hazards[i].tuner || (hazards[i].only_arm && !is_arm)) continue;
    for (int own = 0; own < N_PROTOS; own++) {
      if (hazards[i].own == DCCL_UNSET || hazards[i].own == own) c->closed[own][hazards[i].table] = true;
    }
  }
}

// v3, v4: no id. The profiler part has just seen it, if it is loaded; otherwise records name communicator 0.
static int start(void** context, const struct dccl_tuner_init* init) {
  if (context == NULL) return NCCL_SUCCESS;
  *context = NULL;  // with no memory for a context NCCL decides alone
  struct dccl_comm comm = {.comm_id = init->comm_id,
                           .rank = DCCL_NO_RANK,
                           .n_ranks = (uint32_t)init->n_ranks,
                           .n_nodes = (uint32_t)init->n_nodes};
  const bool named = init->version >= 5;
  const bool announced = dccl_last_comm.fresh && (named ? dccl_last_comm.comm_id == comm.comm_id
                                                        : dccl_last_comm.n_ranks == comm.n_ranks);
  if (announced) {
    comm.comm_id = dccl_last_comm.comm_id;
    comm.rank = dccl_last_comm.rank;
  }
  dccl_last_comm.fresh = false;
  dynamiccl_open();
  struct context* c = calloc(1, sizeof *c);
  if (c == NULL) return NCCL_SUCCESS;
  c->comm = comm;
  c->class = dccl_class(comm.n_ranks, comm.n_nodes);
  c->last_tuned = dccl_last_tuned();
  const char* way = getenv("DYNAMICCL_ALL_REDUCE");
  c->keeps_algo = way != NULL && strcmp(way, "algo") != 0;
  if (comm.n_nodes > 1) close_protocols(c, init->version);
  const char* pat = getenv("DYNAMICCL_TRY_PAT");
  c->tries_pat = pat != NULL && strcmp(pat, "1") == 0 && comm.n_nodes > 1 && comm.n_ranks > comm.n_nodes;
  dccl_next_tuner_init(&c->next, init);
  c->seat = dccl_sit(comm.comm_id, comm.n_ranks, comm.n_nodes, DCCL_TOLD_NOTHING);
  *context = c;
  dccl_note_tuner(init->version);
  if (!announced) dccl_emit_comm(&comm, NULL);
  if (init->log != NULL) {
    init->log(LOG_INFO, LOG_FLAG_TUNING, __FILE__, __LINE__,
              "dynamiccl: tuning comm %llx, %u ranks, table generation %u", (unsigned long long)comm.comm_id,
              comm.n_ranks, dccl_generation(c->seat));
  }
  return NCCL_SUCCESS;
}

static int finish(void* context) {
  struct context* c = context;
  if (c != NULL) {
    dccl_next_tuner_finalize(&c->next);
    dccl_leave(c->seat);
  }
  free(c);
  return NCCL_SUCCESS;
}

// ---- one adapter a version ----

static int init_v3(size_t n_ranks, size_t n_nodes, nccl_logger log, void** context) {
  return start(context, &(struct dccl_tuner_init){3, 0, n_ranks, n_nodes, log, NULL, NULL});
}

static int init_v4(size_t n_ranks, size_t n_nodes, nccl_logger log, void** context) {
  return start(context, &(struct dccl_tuner_init){4, 0, n_ranks, n_nodes, log, NULL, NULL});
}

static int init_v5(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                   struct nccl_nvl_domains* domains, void* constants) {
  return start(context, &(struct dccl_tuner_init){5, comm_id, n_ranks, n_nodes, log, domains, constants});
}

static int init_v6(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                   struct nccl_nvl_domains* domains, void* constants) {
  return start(context, &(struct dccl_tuner_init){6, comm_id, n_ranks, n_nodes, log, domains, constants});
}

static int get_coll_info_v3(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost,
                            int n_algos, int n_protos, int* n_channels) {
  const struct dccl_question q = {func, n_bytes, n_pipe_ops, (float*)cost, n_algos, n_protos, 0, n_channels};
  decide(context, &q);
  return NCCL_SUCCESS;
}

static int get_coll_info_v4(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost,
                            int n_algos, int n_protos, int reg_buff, int* n_channels) {
  const struct dccl_question q = {func,    n_bytes,  n_pipe_ops, (float*)cost,
                                  n_algos, n_protos, reg_buff,   n_channels};
  decide(context, &q);
  return NCCL_SUCCESS;
}

DCCL_EXPORT const struct nccl_tuner_v3 ncclTunerPlugin_v3 = {"dynamiccl", init_v3, get_coll_info_v3, finish};
DCCL_EXPORT const struct nccl_tuner_v4 ncclTunerPlugin_v4 = {"dynamiccl", init_v4, get_coll_info_v4, finish};
DCCL_EXPORT const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {"dynamiccl", init_v5, get_coll_info_v4, finish};
DCCL_EXPORT const struct nccl_tuner_v6 ncclTunerPlugin_v6 = {"dynamiccl", init_v6, get_coll_info_v4, finish,
                                                             NULL};
