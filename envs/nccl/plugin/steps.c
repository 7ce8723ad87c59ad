// Steps as the counts of collectives show them: whether one is like the next, and which table a step belongs
// to.
//
// Nothing here decides about an answer. What the steps have in common is told in votes, and the ranks decide
// on it together.
#include "seat.h"

enum { ALIKE = 4 };  // steps in a row that make a rhythm
enum { QUAD = 4 };   // turns of two tables that make a block: A B B A

static _Atomic uint64_t first, other;  // answered in this step, and another that did: generation + 1, 0: none
static uint64_t n_steps;               // since the ranks have begun to count them; guarded by `dccl_seating`

static void after_fork(void) {
  atomic_store(&first, 0);
  atomic_store(&other, 0);
  n_steps = 0;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

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
