// The communicators of this process: their seats, how they are told, and what loaded us.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "seat.h"

#ifndef DCCL_BUILD
#define DCCL_BUILD "unknown"  // build.py says the hash of the sources
#endif

struct dccl_seat dccl_seats[SEATS];
pthread_mutex_t dccl_seating = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint32_t n_tuners, abi;
static _Atomic int n_contexts;

_Thread_local struct dccl_comm dccl_last_comm;

// ---- seats ----

struct dccl_seat* dccl_seated(uint64_t comm_id) {
  for (int i = 0; i < SEATS; i++) {
    if (dccl_seats[i].comm_id == comm_id && dccl_seats[i].n_users > 0) return &dccl_seats[i];
  }
  return NULL;
}

struct dccl_seat* dccl_counting(uint64_t comm_id) {
  struct dccl_seat* seat = dccl_seated(comm_id);
  return seat != NULL && dccl_clock_of(seat) == DCCL_COUNTS ? seat : NULL;
}

static struct dccl_seat* find(uint64_t comm_id) {
  struct dccl_seat *seat = dccl_seated(comm_id), *left = NULL;
  if (seat != NULL) return seat;
  for (int i = 0; i < SEATS && seat == NULL; i++) {
    if (dccl_seats[i].comm_id == 0) seat = &dccl_seats[i];
    if (dccl_seats[i].n_users == 0 && left == NULL) left = &dccl_seats[i];
  }
  if (seat == NULL) seat = left;
  if (seat != NULL) {
    memset(seat, 0, sizeof *seat);
    seat->comm_id = comm_id;
    seat->limit = NO_LIMIT;
    seat->last_tuned = dccl_last_tuned();
  }
  return seat;
}

struct dccl_seat* dccl_sit(uint64_t comm_id, uint32_t n_ranks, uint32_t n_nodes, uint32_t told) {
  atomic_fetch_add(&n_contexts, 1);
  if (comm_id == 0) return NULL;
  pthread_mutex_lock(&dccl_seating);
  struct dccl_seat* seat = find(comm_id);
  if (seat != NULL) {
    seat->n_users++;
    seat->n_ranks = n_ranks;
    seat->n_nodes = n_nodes;
    if (told != DCCL_TOLD_NOTHING)
      atomic_store(&seat->told, told);
    else
      atomic_store(&seat->has_tuner, true);
  }
  pthread_mutex_unlock(&dccl_seating);
  return seat;
}

void dccl_leave(struct dccl_seat* seat) {
  atomic_fetch_sub(&n_contexts, 1);
  if (seat == NULL) return;
  pthread_mutex_lock(&dccl_seating);
  if (seat->n_users > 0) seat->n_users--;
  const bool is_over = seat->n_users == 0;
  const uint64_t comm_id = seat->comm_id;
  pthread_mutex_unlock(&dccl_seating);
  if (is_over) dccl_forget(comm_id);
}

// The library is unloaded, or the process ends: nothing of it stays mapped. Where NCCL has not let go of us
// its threads may still write.
__attribute__((destructor)) static void let_go(void) { dccl_close_ring(atomic_load(&n_contexts) > 0); }

// In the child of a fork the thread that was seating is gone, and so is NCCL.
static void after_fork(void) {
  pthread_mutex_init(&dccl_seating, NULL);
  memset(dccl_seats, 0, sizeof dccl_seats);
  atomic_store(&n_tuners, 0);
  atomic_store(&n_contexts, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

int dccl_last_tuned(void) {
  const char* asked = getenv("DYNAMICCL_ALL_REDUCE");
  return asked != NULL && *asked != 0 ? FUNC_ALL_REDUCE : FUNC_REDUCE_SCATTER;
}

// ---- records ----

void dccl_emit_comm(const struct dccl_comm* comm, const char* name) {
  struct dccl_record record = {.kind = DCCL_COMM,
                               .func = DCCL_UNSET,
                               .algo = DCCL_UNSET,
                               .proto = DCCL_UNSET,
                               .dtype = DCCL_UNSET,
                               .comm_id = comm->comm_id,
                               .step = dccl_step_now()};
  record.comm.rank = comm->rank;
  record.comm.n_ranks = comm->n_ranks;
  record.comm.n_nodes = comm->n_nodes;
  if (name != NULL) snprintf(record.comm.name, sizeof record.comm.name, "%s", name);
  dccl_note(&record, true);
}

// ---- what loaded us ----

void dccl_note_tuner(int version) {
  atomic_fetch_and(&abi, 0xff);
  atomic_fetch_or(&abi, (uint32_t)version << 8);
  atomic_fetch_add(&n_tuners, 1);
}

void dccl_note_profiler(int version) {
  atomic_fetch_and(&abi, 0xff00);
  atomic_fetch_or(&abi, (uint32_t)version);
}

uint32_t dynamiccl_tuners(void) { return atomic_load(&n_tuners); }

uint64_t dynamiccl_asked(void) { return atomic_load(&dccl_counts()->calls.asked); }

uint32_t dynamiccl_abi(void) { return atomic_load(&abi); }

const char* dynamiccl_build(void) { return DCCL_BUILD; }
