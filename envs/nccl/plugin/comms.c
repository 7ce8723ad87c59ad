// The communicators of this process: how many collectives each has seen, what NCCL asked about last, and what
// loaded us. The probe compares these between ranks.
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "plugin.h"

#ifndef DCCL_BUILD
#define DCCL_BUILD "unknown"  // build.py says the hash of the sources
#endif

enum { SEATS = 256, ASKS = 8 };

// A communicator as tuner and profiler share it. Seats of destroyed ones are taken by new ones when all are
// taken.
struct dccl_seat {
  uint64_t comm_id;  // 0: free
  int n_users;       // contexts of tuner and profiler; guarded by `seating`, as comm_id is
  _Atomic bool is_watched;
  _Atomic bool is_captured;  // its last call goes into a CUDA graph
  _Atomic uint64_t n_colls;
  struct {
    _Atomic uint32_t n;
    _Atomic bool answered;  // a collective came since the last question: the next one begins a new group
    _Atomic uint64_t n_bytes[ASKS];
  } asks[N_FUNCS];
};

static struct dccl_seat seats[SEATS];
static pthread_mutex_t seating = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint32_t n_tuners, widest, abi;
static _Atomic int n_contexts;
static struct dccl_calls unseen;  // of a process without a ring

_Thread_local struct dccl_comm dccl_last_comm;

// ---- seats ----

static struct dccl_seat* find(uint64_t comm_id) {
  struct dccl_seat *free_one = NULL, *left = NULL;
  for (int i = 0; i < SEATS; i++) {
    if (seats[i].comm_id == comm_id) return &seats[i];
    if (seats[i].comm_id == 0 && free_one == NULL) free_one = &seats[i];
    if (seats[i].n_users == 0 && left == NULL) left = &seats[i];
  }
  struct dccl_seat* seat = free_one != NULL ? free_one : left;
  if (seat != NULL) {
    memset(seat, 0, sizeof *seat);
    seat->comm_id = comm_id;
  }
  return seat;
}

struct dccl_seat* dccl_sit(uint64_t comm_id, bool as_profiler) {
  atomic_fetch_add(&n_contexts, 1);
  if (comm_id == 0) return NULL;
  pthread_mutex_lock(&seating);
  struct dccl_seat* seat = find(comm_id);
  if (seat != NULL) {
    seat->n_users++;
    if (as_profiler) atomic_store(&seat->is_watched, true);
  }
  pthread_mutex_unlock(&seating);
  return seat;
}

void dccl_leave(struct dccl_seat* seat) {
  atomic_fetch_sub(&n_contexts, 1);
  if (seat == NULL) return;
  pthread_mutex_lock(&seating);
  if (seat->n_users > 0) seat->n_users--;
  pthread_mutex_unlock(&seating);
}

bool dccl_in_use(void) { return atomic_load(&n_contexts) > 0; }

// In the child of a fork the thread that was seating is gone, and so is NCCL.
void dccl_comms_after_fork(void) {
  pthread_mutex_init(&seating, NULL);
  memset(seats, 0, sizeof seats);
  atomic_store(&n_tuners, 0);
  atomic_store(&widest, 0);
  atomic_store(&n_contexts, 0);
}

// ---- what NCCL asked about ----

static void count(_Atomic uint64_t* calls) {
  // No locked addition in every collective's path: of two threads at once one may not be counted.
  atomic_store_explicit(calls, atomic_load_explicit(calls, memory_order_relaxed) + 1, memory_order_relaxed);
}

static struct dccl_calls* calls(void) {
  struct dccl_calls* seen = dccl_ring_calls();
  return seen != NULL ? seen : &unseen;
}

void dccl_note_answer(void) { count(&calls()->used); }

void dccl_note_call(struct dccl_seat* seat, bool captured) {
  if (seat != NULL) atomic_store_explicit(&seat->is_captured, captured, memory_order_relaxed);
}

bool dccl_is_captured(const struct dccl_seat* seat) {
  return seat != NULL && atomic_load_explicit(&seat->is_captured, memory_order_relaxed);
}

// NCCL prices the collectives of a group together: it asks with the sum of their sizes and then enqueues each
// with its own. All of a group's questions come before its first collective.
void dccl_note_question(struct dccl_seat* seat, int func, uint64_t n_bytes) {
  count(&calls()->asked);
  if (func == FUNC_ALL_GATHER || func == FUNC_REDUCE_SCATTER) count(&calls()->tuned);
  if (seat == NULL) return;
  uint32_t n = 0;
  if (!atomic_load_explicit(&seat->asks[func].answered, memory_order_relaxed))
    n = atomic_load_explicit(&seat->asks[func].n, memory_order_relaxed);
  else
    atomic_store_explicit(&seat->asks[func].answered, false, memory_order_relaxed);
  if (n == ASKS) return;
  for (uint32_t i = 0; i < n; i++) {  // some releases ask several times for one collective
    if (atomic_load_explicit(&seat->asks[func].n_bytes[i], memory_order_relaxed) == n_bytes) return;
  }
  atomic_store_explicit(&seat->asks[func].n_bytes[n], n_bytes, memory_order_relaxed);
  atomic_store_explicit(&seat->asks[func].n, n + 1, memory_order_relaxed);
}

uint64_t dccl_note_coll(struct dccl_seat* seat, uint8_t func, uint64_t n_bytes, bool captured) {
  count(&calls()->told);
  if (seat == NULL) return 0;
  if (!captured && (func < FUNC_SEND_RECV || func >= N_FUNCS))
    atomic_fetch_add_explicit(&seat->n_colls, 1, memory_order_relaxed);
  if (func >= N_FUNCS) return 0;
  uint64_t found = 0;
  const uint32_t n = atomic_load_explicit(&seat->asks[func].n, memory_order_relaxed);
  for (uint32_t i = 0; i < n && i < ASKS; i++) {
    const uint64_t asked = atomic_load_explicit(&seat->asks[func].n_bytes[i], memory_order_relaxed);
    if (asked >= n_bytes && (found == 0 || asked < found)) found = asked;
  }
  atomic_store_explicit(&seat->asks[func].answered, true, memory_order_relaxed);
  return found;
}

// ---- records ----

void dccl_emit_comm(const struct dccl_comm* comm, const char* name) {
  struct dccl_record record = {.kind = DCCL_COMM,
                               .func = DCCL_UNSET,
                               .algo = DCCL_UNSET,
                               .proto = DCCL_UNSET,
                               .dtype = DCCL_UNSET,
                               .comm_id = comm->comm_id,
                               .step = dccl_step_now(),
                               .generation = dccl_generation()};
  record.comm.rank = comm->rank;
  record.comm.n_ranks = comm->n_ranks;
  record.comm.n_nodes = comm->n_nodes;
  if (name != NULL) snprintf(record.comm.name, sizeof record.comm.name, "%s", name);
  dccl_note(&record);
}

// ---- what the probe asks ----

void dccl_note_tuner(int version, uint32_t n_ranks) {
  atomic_fetch_and(&abi, 0xff);
  atomic_fetch_or(&abi, (uint32_t)version << 8);
  if (n_ranks > atomic_load(&widest)) atomic_store(&widest, n_ranks);
  atomic_fetch_add(&n_tuners, 1);
}

void dccl_note_profiler(int version) {
  atomic_fetch_and(&abi, 0xff00);
  atomic_fetch_or(&abi, (uint32_t)version);
}

uint32_t dynamiccl_tuners(void) { return atomic_load(&n_tuners); }

uint32_t dynamiccl_widest(void) { return atomic_load(&widest); }

uint64_t dynamiccl_asked(void) { return atomic_load(&calls()->asked); }

int dynamiccl_untold(void) { return atomic_load(&calls()->tuned) > 0 && atomic_load(&calls()->told) == 0; }

uint32_t dynamiccl_abi(void) { return atomic_load(&abi); }

const char* dynamiccl_build(void) { return DCCL_BUILD; }

uint32_t dynamiccl_counts(uint64_t* comm_ids, uint64_t* counts, uint32_t capacity) {
  uint32_t n = 0;
  pthread_mutex_lock(&seating);
  for (int i = 0; i < SEATS; i++) {
    if (seats[i].comm_id == 0 || seats[i].n_users == 0 || !atomic_load(&seats[i].is_watched)) continue;
    if (n < capacity) {
      comm_ids[n] = seats[i].comm_id;
      counts[n] = atomic_load(&seats[i].n_colls);
    }
    n++;
  }
  pthread_mutex_unlock(&seating);
  return n;
}
