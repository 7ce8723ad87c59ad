// The tuner part: NCCL asks how to run a collective, the active table answers, or stays silent.
//
// Rules. Every call succeeds: NCCL fails the collective otherwise. Only cells that NCCL offers (cost >= 0)
// are touched and nothing negative is written: some releases take the smallest number, whatever its sign.
// What the table leaves unset stays as NCCL has it. The answer depends only on values that are equal on all
// ranks.
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

enum { SEEN_SETS = 64, SEEN_WAYS = 4 };

struct context {
  struct dccl_comm comm;
  struct dccl_seat* seat;
  uint64_t class;
  _Atomic uint64_t seen[SEEN_SETS][SEEN_WAYS];  // hashes of the messages whose offer is in the ring
};

// What NCCL asks, whatever the version.
struct question {
  int func;
  size_t n_bytes;
  int n_pipe_ops;
  float* cost;
  int n_algos;
  int n_protos;
  int reg_buff;
  int* n_channels;
};

static bool offered(float cost) { return cost >= 0.0f && cost <= FLT_MAX; }

// True when the message is new to the context; it counts as seen from then on. Two threads may both find it
// new.
static bool first_time(struct context* c, const struct question* q) {
  uint64_t hash = (uint64_t)q->n_bytes * UINT64_C(0x9e3779b97f4a7c15);
  hash ^=
      (uint64_t)(unsigned)q->func << 2 | (uint64_t)(q->reg_buff != 0) << 1 | (uint64_t)(q->n_pipe_ops > 0);
  hash ^= hash >> 29;
  hash *= UINT64_C(0xbf58476d1ce4e5b9);
  hash |= 1;  // 0 is an empty way
  _Atomic uint64_t* set = c->seen[hash >> 58];
  for (int way = 0; way < SEEN_WAYS; way++) {
    const uint64_t held = atomic_load_explicit(&set[way], memory_order_relaxed);
    if (held == hash) return false;
    if (held == 0) {
      atomic_store_explicit(&set[way], hash, memory_order_relaxed);
      return true;
    }
  }
  atomic_store_explicit(&set[(hash >> 32) % SEEN_WAYS], hash, memory_order_relaxed);
  return true;
}

// The offer as it came, before a decision touches it. A table with nothing in it is no offer.
static void emit_offer(const struct context* c, const struct question* q) {
  struct dccl_record r = {.kind = DCCL_OFFER,
                          .func = (uint8_t)q->func,
                          .algo = DCCL_UNSET,
                          .proto = DCCL_UNSET,
                          .dtype = DCCL_UNSET,
                          .flags = q->reg_buff ? DCCL_FLAG_REGISTERED : 0,
                          .comm_id = c->comm.comm_id,
                          .n_bytes = q->n_bytes,
                          .step = dccl_step_now(),
                          .generation = dccl_generation()};
  float best = FLT_MAX;
  for (int algo = 0; algo < N_ALGOS; algo++) {
    for (int proto = 0; proto < N_PROTOS; proto++) {
      const bool inside = algo < q->n_algos && proto < q->n_protos;
      const float cost = inside ? q->cost[algo * q->n_protos + proto] : -1.0f;
      r.offer.cost_us[algo][proto] = offered(cost) ? cost : -1.0f;
      if (offered(cost) && cost < best) {  // as NCCL chooses: the first of the smallest
        best = cost;
        r.algo = (uint8_t)algo;
        r.proto = (uint8_t)proto;
      }
    }
  }
  r.offer.n_pipe_ops = q->n_pipe_ops;
  if (r.algo != DCCL_UNSET) dccl_note(&r);
}

static bool any_offered(const struct question* q) {
  for (int i = 0; i < q->n_algos * q->n_protos; i++) {
    if (offered(q->cost[i])) return true;
  }
  return false;
}

static void decide(void* context, const struct question* q) {
  struct context* c = context;
  if (c == NULL || q->cost == NULL || q->func < 0 || q->func >= N_FUNCS) return;
  if (q->n_algos <= 0 || q->n_protos <= 0 || q->n_algos > 64 || q->n_protos > 64) return;
  dccl_note_question(c->seat, q->func, q->n_bytes);
  if (dccl_ring_is_open() && first_time(c, q)) emit_offer(c, q);
  struct dccl_decision d;
  if (!dccl_lookup(c->class, q->func, q->n_bytes, &d)) return;
  if (d.algo != DCCL_UNSET) {
    if (d.algo >= q->n_algos || d.proto >= q->n_protos) return;
    const int cell = d.algo * q->n_protos + d.proto;
    if (!offered(q->cost[cell])) return;  // then its channel count was not meant for what NCCL picks either
    q->cost[cell] = 0.0f;
    for (int i = 0; i < cell; i++) {  // of two zeros NCCL takes the first
      if (q->cost[i] == 0.0f) q->cost[i] = FLT_MIN;
    }
  } else if (d.n_channels && !any_offered(q)) {
    return;
  }
  if (d.n_channels >= 1 && d.n_channels <= DCCL_MAX_CHANNELS && q->n_channels != NULL) {
    *q->n_channels = d.n_channels;
  }
}

static int start(int version, void** context, const struct dccl_comm* comm, bool announced, nccl_logger log) {
  if (context == NULL) return NCCL_SUCCESS;
  *context = NULL;  // with no memory for a context NCCL decides alone
  dynamiccl_open();
  struct context* c = calloc(1, sizeof *c);
  if (c == NULL) return NCCL_SUCCESS;
  c->comm = *comm;
  c->class = dccl_class(comm->n_ranks, comm->n_nodes);
  c->seat = dccl_sit(comm->comm_id, false);
  *context = c;
  dccl_note_tuner(version);
  if (!announced) dccl_emit_comm(comm, NULL);
  if (log != NULL) {
    log(LOG_INFO, LOG_FLAG_TUNING, __FILE__, __LINE__,
        "dynamiccl: tuning comm %llx, %u ranks, table generation %u", (unsigned long long)comm->comm_id,
        comm->n_ranks, dccl_generation());
  }
  return NCCL_SUCCESS;
}

// v3, v4: no id. The profiler part has just seen it, if it is loaded; otherwise records name communicator 0.
static int start_unnamed(int version, void** context, size_t n_ranks, size_t n_nodes, nccl_logger log) {
  struct dccl_comm comm = {.rank = DCCL_NO_RANK, .n_ranks = (uint32_t)n_ranks, .n_nodes = (uint32_t)n_nodes};
  const bool known = dccl_last_comm.fresh && dccl_last_comm.n_ranks == comm.n_ranks;
  if (known) comm = dccl_last_comm;
  dccl_last_comm.fresh = false;
  return start(version, context, &comm, known, log);
}

static int start_named(int version, void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes,
                       nccl_logger log) {
  struct dccl_comm comm = {
      .comm_id = comm_id, .rank = DCCL_NO_RANK, .n_ranks = (uint32_t)n_ranks, .n_nodes = (uint32_t)n_nodes};
  const bool known = dccl_last_comm.fresh && dccl_last_comm.comm_id == comm_id;
  if (known) comm.rank = dccl_last_comm.rank;
  dccl_last_comm.fresh = false;
  return start(version, context, &comm, known, log);
}

static int finish(void* context) {
  if (context != NULL) dccl_leave(((struct context*)context)->seat);
  free(context);
  return NCCL_SUCCESS;
}

// ---- one adapter a version
// ------------------------------------------------------------------------------------

static int init_v3(size_t n_ranks, size_t n_nodes, nccl_logger log, void** context) {
  return start_unnamed(3, context, n_ranks, n_nodes, log);
}

static int init_v4(size_t n_ranks, size_t n_nodes, nccl_logger log, void** context) {
  return start_unnamed(4, context, n_ranks, n_nodes, log);
}

static int init_v5(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                   struct nccl_nvl_domains* domains, void* constants) {
  (void)domains, (void)constants;
  return start_named(5, context, comm_id, n_ranks, n_nodes, log);
}

static int init_v6(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                   struct nccl_nvl_domains* domains, void* constants) {
  (void)domains, (void)constants;
  return start_named(6, context, comm_id, n_ranks, n_nodes, log);
}

static int get_coll_info_v3(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost,
                            int n_algos, int n_protos, int* n_channels) {
  const struct question q = {func, n_bytes, n_pipe_ops, (float*)cost, n_algos, n_protos, 0, n_channels};
  decide(context, &q);
  return NCCL_SUCCESS;
}

static int get_coll_info_v4(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost,
                            int n_algos, int n_protos, int reg_buff, int* n_channels) {
  const struct question q = {func,    n_bytes,  n_pipe_ops, (float*)cost,
                             n_algos, n_protos, reg_buff,   n_channels};
  decide(context, &q);
  return NCCL_SUCCESS;
}

DCCL_EXPORT const struct nccl_tuner_v3 ncclTunerPlugin_v3 = {"dynamiccl", init_v3, get_coll_info_v3, finish};
DCCL_EXPORT const struct nccl_tuner_v4 ncclTunerPlugin_v4 = {"dynamiccl", init_v4, get_coll_info_v4, finish};
DCCL_EXPORT const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {"dynamiccl", init_v5, get_coll_info_v4, finish};
DCCL_EXPORT const struct nccl_tuner_v6 ncclTunerPlugin_v6 = {"dynamiccl", init_v6, get_coll_info_v4, finish,
                                                             NULL};
