// The communicators of this process: their seats, what the probe asks about them, and what loaded us.
#include <stdio.h>
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
    if (told != DCCL_TOLD_NOTHING) atomic_store(&seat->told, told);
  }
  pthread_mutex_unlock(&dccl_seating);
  return seat;
}

void dccl_leave(struct dccl_seat* seat) {
  atomic_fetch_sub(&n_contexts, 1);
  if (seat == NULL) return;
  pthread_mutex_lock(&dccl_seating);
  if (seat->n_users > 0) seat->n_users--;
  pthread_mutex_unlock(&dccl_seating);
}

bool dccl_in_use(void) { return atomic_load(&n_contexts) > 0; }

// In the child of a fork the thread that was seating is gone, and so is NCCL.
void dccl_comms_after_fork(void) {
  pthread_mutex_init(&dccl_seating, NULL);
  memset(dccl_seats, 0, sizeof dccl_seats);
  atomic_store(&n_tuners, 0);
  atomic_store(&n_contexts, 0);
  dccl_clock_after_fork();
  dccl_switch_after_fork();
  dccl_rhythm_after_fork();
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
  dccl_note(&record);
}

// ---- what the probe asks ----

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

uint32_t dynamiccl_comms(struct dccl_comm_view* comms, uint32_t capacity) {
  uint32_t n = 0;
  pthread_mutex_lock(&dccl_seating);
  for (int i = 0; i < SEATS; i++) {
    struct dccl_seat* seat = &dccl_seats[i];
    if (seat->comm_id == 0 || seat->n_users == 0) continue;
    if (atomic_load(&seat->told) == DCCL_TOLD_NOTHING) continue;
    if (n < capacity) {
      struct dccl_comm_view* view = &comms[n];
      *view = (struct dccl_comm_view){.comm_id = seat->comm_id,
                                      .n_ranks = seat->n_ranks,
                                      .n_nodes = seat->n_nodes,
                                      .count = dccl_get(&seat->n_colls),
                                      .clock = dccl_clock_of(seat)};
      dccl_copy_marks(seat, view);
      dccl_copy_rhythm(seat, view);
    }
    n++;
  }
  pthread_mutex_unlock(&dccl_seating);
  return n;
}
