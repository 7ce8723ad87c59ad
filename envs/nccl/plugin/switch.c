// Which table holds for the next collective of a communicator.
//
// A switch names two times of its clock: from the one its table holds, until the other. A question at or
// beyond the limit waits, but not for ever: there the ranks may be about to agree on a switch.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "seat.h"

// The word `order` of a seat: how many changes may still hold, their places from the newest on, and above
// these a number that grows. A change is written where no word says that one is, so who reads the same word
// before and after has read whole changes.
enum { PLACE_BITS = 3, PLACES = SWITCHES - 1, COUNTER_BIT = PLACE_BITS * (PLACES + 1) };
_Static_assert(SWITCHES == 1 << PLACE_BITS, "places");

// A nap that took longer was the whole process's: SIGSTOP, a suspended job, a debugger.
#define LONGEST_NAP_NS INT64_C(1000000000)

struct list {
  int n;
  int place[SWITCHES];
};

static _Atomic uint32_t n_waiting;
static _Atomic int64_t longest_ns = INT64_MAX;  // that a call is held
_Atomic bool dccl_tries_few;
_Atomic uint32_t dccl_latest;

static void after_fork(void) {
  atomic_store(&dccl_tries_few, false);
  atomic_store(&dccl_latest, 0);
  atomic_store(&n_waiting, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

// ---- answers ----

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// The store does not answer: nobody will lift the limits of this agreement. Their communicators keep the
// tables of now and take no switch any more: the other ranks may have given up before.
static void give_up(const struct dccl_seat* seat, uint64_t count) {
  pthread_mutex_lock(&dccl_seating);
  const uint32_t owner = seat->limit_owner;
  const bool is_held = count >= atomic_load(&seat->limit);
  for (int i = 0; i < SEATS && is_held; i++) {
    if (dccl_seats[i].limit_owner != owner) continue;
    dccl_seats[i].limit_owner = NOBODY;
    atomic_store(&dccl_seats[i].limit, NO_LIMIT);
  }
  pthread_mutex_unlock(&dccl_seating);
  if (is_held)
    fprintf(stderr, "dynamiccl: the job's store has not answered for %lld s: its tables stay as they are\n",
            (long long)(atomic_load(&longest_ns) / 1000000000));
}

// Counts the time that this thread was awake: a process that was stopped must not give up as it goes on,
// before its agreement could read the decision. That agreement is a thread in Python.
static void wait_below_limit(const struct dccl_seat* seat, uint64_t count) {
  const struct timespec nap = {0, 100000};
  const int64_t began = now_ns(), longest = atomic_load(&longest_ns);
  int64_t awake = 0, last = began;
  void* python = dccl_let_go_of_python();
  atomic_fetch_add(&n_waiting, 1);
  while (count >= atomic_load(&seat->limit)) {
    nanosleep(&nap, NULL);
    const int64_t now = now_ns(), passed = now - last;
    awake += passed < LONGEST_NAP_NS ? passed : LONGEST_NAP_NS;
    last = now;
    if (awake > longest) give_up(seat, count);
  }
  atomic_fetch_sub(&n_waiting, 1);
  atomic_fetch_add(&dccl_counts()->waited_ns, (uint64_t)(last - began));
  dccl_take_python_back(python);
}

void dynamiccl_hold(uint32_t seconds) { atomic_store(&longest_ns, seconds * INT64_C(1000000000)); }

// The turn of a block that is the trial's. Of two turns: A B B A; with `swap` B A A B. Of more: in no step
// with how a job's calls come.
static uint64_t due_turn(const struct change* c, uint64_t block) {
  const uint64_t n = c->one_of, mix = UINT64_C(0x9e3779b97f4a7c15), hash = block * mix;
  if (n == 2) return 2 * block + ((block + c->swap) & 1);
  return block * n + ((hash ^ hash >> 32) * mix >> 32) % n;
}

// Whether the group that begins at this count is the trial's. Nothing here is a rank's own: the change was
// decided, and the counts are those of calls that all ranks make. Where a turn is one collective, a group is
// also the trial's if a collective was that no group began with: else calls that come in groups would miss
// it.
static bool is_due(const struct change* c, const struct dccl_seat* seat, uint64_t count) {
  const uint64_t length = c->length, from = c->from;
  if (length == 0) return true;
  const uint64_t looked_at = atomic_load_explicit(&seat->looked_at, memory_order_relaxed);
  const uint64_t turn = (count - from) / length, block = c->one_of == 2 ? turn / 2 : turn / c->one_of;
  const uint64_t missed = looked_at > from ? looked_at - from : 0;
  const uint64_t earliest = dccl_is_by_calls(length, c->a_step) ? missed : turn;
  const uint64_t due = due_turn(c, block);
  return (earliest <= due && due <= turn) || (block > 0 && earliest <= due_turn(c, block - 1));
}

dccl_table dccl_table_now(struct dccl_seat* seat) {
  if (seat == NULL) return dccl_fixed();
  // The limit after the count, each in the one order of all: dynamiccl_limit writes and reads them crosswise.
  const uint64_t count = atomic_load(&seat->n_colls);
  if (count >= atomic_load(&seat->limit)) wait_below_limit(seat, count);
  for (;;) {
    const uint64_t order = dccl_get(&seat->order);
    dccl_table table = dccl_fixed();
    uint64_t places = order >> PLACE_BITS;
    for (uint64_t n = order % SWITCHES; n > 0; n--, places >>= PLACE_BITS) {
      const struct change* c = &seat->changes[places % SWITCHES];
      if (count < dccl_get(&c->from)) continue;
      const bool tries = count < dccl_get(&c->until) && is_due(c, seat, count);
      table = dccl_get(tries ? &c->trial : &c->base);
      break;
    }
    if (dccl_get(&seat->order) == order) return table;
  }
}

bool dccl_is_rare(const struct dccl_seat* seat) {
  return dccl_tries_few && seat != NULL && seat->generation == seat->decided;
}

uint32_t dccl_generation(const struct dccl_seat* seat) {
  return seat != NULL ? atomic_load_explicit(&seat->generation, memory_order_relaxed)
                      : dccl_generation_of(dccl_fixed());
}

// ---- changes ----

// Those that may still hold once the count is at `count`, from the newest on: all that are ahead, and the one
// that holds now. One that is not before a newer one never will. Holding `dccl_seating`.
static struct list changes_of(const struct dccl_seat* seat, uint64_t count, uint64_t before) {
  const uint64_t order = dccl_get(&seat->order);
  struct list found = {0};
  for (uint64_t i = 0; i < order % SWITCHES; i++) {
    const int place = (int)(order >> PLACE_BITS * (i + 1)) % SWITCHES;
    const uint64_t from = dccl_get(&seat->changes[place].from);
    if (from >= before) continue;
    found.place[found.n++] = place;
    if (from <= count) break;
    before = from;
  }
  return found;
}

// The places that whoever asks now may be reading.
static unsigned places_read(const struct dccl_seat* seat) {
  const uint64_t order = dccl_get(&seat->order);
  unsigned read = 0;
  for (uint64_t i = 0; i < order % SWITCHES; i++) read |= 1u << (order >> PLACE_BITS * (i + 1)) % SWITCHES;
  return read;
}

const struct change* dccl_change_at(const struct dccl_seat* seat, uint64_t count) {
  const struct list changes = changes_of(seat, count, UINT64_MAX);
  const struct change* last = changes.n > 0 ? &seat->changes[changes.place[changes.n - 1]] : NULL;
  return last != NULL && dccl_get(&last->from) <= count ? last : NULL;
}

bool dccl_may_try_few(const struct dccl_seat* seat) {
  const uint64_t count = dccl_get(&seat->n_colls);
  const struct list changes = changes_of(seat, count, UINT64_MAX);
  for (int i = 0; i < changes.n; i++) {
    const struct change* c = &seat->changes[changes.place[i]];
    if (count < dccl_get(&c->until) && dccl_is_by_calls(c->length, c->a_step)) return true;
  }
  return false;
}

static void publish(struct dccl_seat* seat, const struct list* changes) {
  uint64_t order = ((dccl_get(&seat->order) >> COUNTER_BIT) + 1) << COUNTER_BIT | (uint64_t)changes->n;
  for (int i = 0; i < changes->n; i++) order |= (uint64_t)changes->place[i] << PLACE_BITS * (i + 1);
  atomic_store_explicit(&seat->order, order, memory_order_release);
}

static bool may_answer(const struct dccl_seat* seat, uint32_t buffer) {
  const uint64_t count = dccl_get(&seat->n_colls);
  const struct list changes = changes_of(seat, count, UINT64_MAX);
  bool may = false;
  for (int i = 0; i < changes.n; i++) {
    const struct change* c = &seat->changes[changes.place[i]];
    const bool tries = count < dccl_get(&c->until);
    may = may || dccl_buffer_of(dccl_get(&c->base)) == buffer;
    may = may || (tries && dccl_buffer_of(dccl_get(&c->trial)) == buffer);
  }
  return may;
}

bool dccl_table_is_used(uint32_t buffer) {
  bool used = false;
  pthread_mutex_lock(&dccl_seating);
  for (int i = 0; i < SEATS && !used; i++)
    used = dccl_seats[i].n_users > 0 && may_answer(&dccl_seats[i], buffer);
  pthread_mutex_unlock(&dccl_seating);
  return used;
}

// ---- what it will answer ----

// The rows that are tried, and in which turns.
static uint64_t tried_by(const struct change* c) {
  const uint64_t rows = dccl_rows_of(dccl_get(&c->trial)), mix = UINT64_C(0x9e3779b97f4a7c15);
  const uint64_t turns = dccl_get(&c->length) << 32 ^ dccl_get(&c->a_step) << 16 ^ c->one_of << 1 ^ c->swap;
  return ((rows * mix + turns) * mix) | 1;  // also of no rows: they are tried
}

void dccl_copy_plan(const struct dccl_seat* seat, struct dccl_comm_view* view) {
  const struct list changes = changes_of(seat, view->count, UINT64_MAX);
  if (seat->limit_owner == NOBODY) view->state |= DCCL_GAVE_UP;
  view->stays = dccl_rows_of(dccl_fixed());
  uint64_t before = UINT64_MAX;
  for (int i = 0; i < changes.n && view->trial == 0; i++) {
    const struct change* c = &seat->changes[changes.place[i]];
    const uint64_t until = dccl_get(&c->until), last = until < before ? until : before;
    before = dccl_get(&c->from);
    if (i == 0) {
      view->stays = dccl_rows_of(dccl_get(&c->base));
      view->since = before;
    }
    if (until == 0 || (i > 0 && view->count >= last)) continue;
    view->trial = tried_by(c);
    view->first = before;
    view->last = last;
  }
}

// ---- what the ranks agree on ----

static uint64_t last_from(const struct dccl_seat* seat) {
  const uint64_t order = dccl_get(&seat->order);
  return order % SWITCHES == 0 ? 0 : dccl_get(&seat->changes[(order >> PLACE_BITS) % SWITCHES].from);
}

int64_t dynamiccl_limit(uint32_t owner, uint64_t comm_id, uint64_t distance) {
  int64_t limit = -ENOENT;
  pthread_mutex_lock(&dccl_seating);
  struct dccl_seat* seat = dccl_counting(comm_id);
  const bool is_there = seat != NULL;
  if (is_there && seat->limit_owner != 0 && seat->limit_owner != owner) {
    limit = -EBUSY;
  } else if (is_there && changes_of(seat, dccl_get(&seat->n_colls), UINT64_MAX).n >= PLACES) {
    limit = -EAGAIN;  // one more switch, and one that may still hold would be forgotten
  } else if (is_there) {
    uint64_t far = 0;
    do {  // whoever asks meanwhile sees the limit, or we see how far he has come
      far = atomic_load(&seat->n_colls) + distance;
      if (far < last_from(seat)) far = last_from(seat);
      atomic_store(&seat->limit, far);
    } while (atomic_load(&seat->n_colls) >= far);
    seat->limit_owner = owner;
    limit = (int64_t)far;
  }
  pthread_mutex_unlock(&dccl_seating);
  return limit;
}

int dccl_change(struct dccl_seat* seat, dccl_table staged, const struct dccl_span* span) {
  const uint64_t order = dccl_get(&seat->order);
  const struct list before = changes_of(seat, dccl_get(&seat->n_colls), span->from);
  if (before.n >= PLACES) return -EAGAIN;
  const struct change* last = &seat->changes[(order >> PLACE_BITS) % SWITCHES];
  const dccl_table stays = order % SWITCHES == 0 ? dccl_fixed() : dccl_get(&last->base);
  int place = 0;
  while (places_read(seat) & 1u << place) place++;
  struct change* c = &seat->changes[place];
  c->base = span->until == 0 ? staged : stays;
  c->trial = staged;
  c->from = span->from;
  c->until = span->until;
  c->length = span->length;
  c->a_step = span->a_step;
  c->one_of = span->one_of;
  c->swap = span->swap;
  struct list after = {.n = before.n + 1, .place = {place}};
  memcpy(after.place + 1, before.place, sizeof *before.place * (size_t)before.n);
  publish(seat, &after);
  atomic_store(&dccl_tries_few, dccl_is_by_calls(c->length, c->a_step));
  seat->decided = dccl_generation_of(staged);
  return 0;
}

void dynamiccl_lift(uint32_t owner, uint32_t generation) {
  pthread_mutex_lock(&dccl_seating);
  if (generation != 0) atomic_store(&dccl_latest, generation);
  for (int i = 0; i < SEATS; i++) {
    if (dccl_seats[i].limit_owner != owner) continue;
    dccl_seats[i].limit_owner = 0;
    atomic_store(&dccl_seats[i].limit, NO_LIMIT);
  }
  pthread_mutex_unlock(&dccl_seating);
}

uint32_t dynamiccl_waiting(void) { return atomic_load(&n_waiting); }
