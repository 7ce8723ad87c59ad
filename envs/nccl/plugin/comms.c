// The communicators of this process: their seats, what the probe asks about them, and what loaded us.
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

bool dccl_in_use(void) { return atomic_load(&n_contexts) > 0; }

// In the child of a fork the thread that was seating is gone, and so is NCCL.
void dccl_comms_after_fork(void) {
  pthread_mutex_init(&dccl_seating, NULL);
  memset(dccl_seats, 0, sizeof dccl_seats);
  atomic_store(&n_tuners, 0);
  atomic_store(&n_contexts, 0);
  dccl_switch_after_fork();
  dccl_rhythm_after_fork();
}

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
      dccl_copy_plan(seat, view);
    }
    n++;
  }
  pthread_mutex_unlock(&dccl_seating);
  return n;
}

// ---- steps ----
//
// Steps as the counts of collectives show them: whether one is like the next, and which table a step belongs
// to.
//
// Nothing here decides about an answer. What the steps have in common is told in votes, and the ranks decide
// on it together.

enum { ALIKE = 4 };  // steps in a row that make a rhythm
enum { QUAD = 4 };   // turns of two tables that make a block: A B B A

_Atomic uint32_t dccl_latest;
static _Atomic uint64_t first, other;  // answered in this step, and another that did: generation + 1, 0: none
static uint64_t n_steps;               // since the ranks have begun to count them; guarded by `dccl_seating`

void dccl_rhythm_after_fork(void) {
  atomic_store(&dccl_latest, 0);
  atomic_store(&first, 0);
  atomic_store(&other, 0);
  n_steps = 0;
}

void dccl_begin_steps(void) {
  pthread_mutex_lock(&dccl_seating);
  n_steps = 0;
  pthread_mutex_unlock(&dccl_seating);
}

// ---- which table ----

void dccl_note_table(struct dccl_seat* seat, dccl_table table) {
  if (seat == NULL) return;
  atomic_store_explicit(&seat->generation, dccl_generation_of(table), memory_order_relaxed);
  // Else once the group counts: a broadcast at the end of a step is answered by the table of the next turn.
  if (atomic_load_explicit(&seat->told, memory_order_relaxed) != DCCL_TOLD_AT_CALLS) dccl_note_step(seat);
}

void dccl_note_step(const struct dccl_seat* seat) {
  const uint32_t generation = atomic_load_explicit(&seat->generation, memory_order_relaxed);
  // Left out of the last switch: no part of what is tried, unless a lease before it is not over.
  const uint32_t decided = atomic_load_explicit(&seat->decided, memory_order_relaxed);
  if (decided != atomic_load_explicit(&dccl_latest, memory_order_relaxed) &&
      !atomic_load_explicit(&seat->in_turns, memory_order_relaxed))
    return;
  const uint64_t before = atomic_load_explicit(&first, memory_order_relaxed), now = generation + UINT64_C(1);
  if (before != now) atomic_store_explicit(before == 0 ? &first : &other, now, memory_order_relaxed);
}

// `is_answered`: anything was.
static uint32_t answered_by(bool* is_answered) {
  const uint64_t one = atomic_exchange(&first, 0), two = atomic_exchange(&other, 0);
  const uint32_t latest = atomic_load(&dccl_latest);
  *is_answered = one != 0;
  if (two != 0) return DCCL_MIXED;
  if (one != 0) return (uint32_t)(one - 1);
  return latest != 0 ? latest : dccl_generation_of(dccl_fixed());
}

// ---- which turn ----

// The trial that is under way at this count, or NULL.
static const struct change* trial_at(const struct dccl_seat* seat, uint64_t count) {
  const struct change* c = dccl_change_at(seat, count);
  return c != NULL && count < dccl_get(&c->until) ? c : NULL;
}

// Whether its turns follow steps.
static bool is_by_steps(const struct change* c) {
  return c != NULL && c->length != 0 && !dccl_is_by_calls(c->length, c->a_step);
}

static uint32_t block_of(const struct change* c, uint64_t count) {
  const uint64_t turns = c->one_of == 2 ? QUAD : c->one_of;
  return (uint32_t)((count - c->from) / c->length / turns) + 1;
}

// What one communicator says of the step that has ended, and of the next.
static void look_at(struct dccl_seat* seat, struct dccl_step_end* end, bool* is_odd) {
  const uint64_t before = seat->ended_at, now = dccl_get(&seat->n_colls), made = now - before;
  const struct change *then = trial_at(seat, before), *next = trial_at(seat, now);
  seat->n_alike = made == seat->a_step ? seat->n_alike + 1 : 1;
  seat->a_step = made;
  seat->ended_at = now;
  const uint32_t trial = then != NULL ? dccl_generation_of(then->trial) : 0;
  if (end->trial == 0) end->trial = trial;
  if (is_by_steps(then)) {
    end->is_whole = true;
    *is_odd = *is_odd || (then->a_step != 0 && made != then->a_step) || trial != end->trial;
  }
  const bool in_turns = is_by_steps(next);
  if (in_turns && next->a_step != 0) end->block = block_of(next, now);
  atomic_store_explicit(&seat->in_turns, in_turns, memory_order_relaxed);
}

void dynamiccl_ended(struct dccl_step_end* end) {
  bool is_odd = false, tries_few = false, is_answered = false;
  *end = (struct dccl_step_end){.generation = answered_by(&is_answered)};
  pthread_mutex_lock(&dccl_seating);
  n_steps++;
  for (int i = 0; i < SEATS && dccl_seats[i].comm_id != 0; i++) {
    if (dccl_seats[i].n_users == 0) continue;
    look_at(&dccl_seats[i], end, &is_odd);
    tries_few = tries_few || dccl_may_try_few(&dccl_seats[i]);
  }
  // Over, and its tuner may have died in it: no switch comes that says so.
  if (!tries_few) atomic_store(&dccl_tries_few, false);
  pthread_mutex_unlock(&dccl_seating);
  end->is_whole = end->is_whole && is_answered && !is_odd && end->generation != DCCL_MIXED;
}

// ---- what the steps have in common ----

void dccl_copy_rhythm(const struct dccl_seat* seat, struct dccl_comm_view* view) {
  // Where the probe is off no step ends any more.
  const bool is_old = view->count - seat->ended_at > 2 * seat->a_step;
  view->a_step = seat->n_alike < ALIKE || is_old ? 0 : seat->a_step;
  view->offset = (int64_t)(seat->ended_at - view->a_step * n_steps);
  view->steps = n_steps;
}
