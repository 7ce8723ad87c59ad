// Which table holds for the next collective of a communicator.
//
// A switch names two times of its clock: from the one its table holds, until the other. A question at or
// beyond the limit waits: there the ranks may be about to agree on a switch.
#include <errno.h>
#include <string.h>
#include <time.h>

#include "seat.h"

// The word `order` of a seat: how many changes may still hold, their places from the newest on, and above
// these a number that grows. A change is written where no word says that one is, so who reads the same word
// before and after has read whole changes.
enum { PLACE_BITS = 3, PLACES = SWITCHES - 1, COUNTER_BIT = PLACE_BITS * (PLACES + 1) };
_Static_assert(SWITCHES == 1 << PLACE_BITS, "places");

struct list {
  int n;
  int place[SWITCHES];
};

static _Atomic uint32_t latest;        // generation of the switch that was decided last
static _Atomic uint64_t first, other;  // answered in this step, and another that did: generation + 1, 0: none
static _Atomic uint32_t n_waiting;
_Atomic bool dccl_tries_few;

void dccl_switch_after_fork(void) {
  atomic_store(&latest, 0);
  atomic_store(&dccl_tries_few, false);
  atomic_store(&n_waiting, 0);
}

// ---- answers ----

static void wait_below_limit(const struct dccl_seat* seat, uint64_t count) {
  const struct timespec nap = {0, 100000};
  struct timespec began, ended;
  clock_gettime(CLOCK_MONOTONIC, &began);
  atomic_fetch_add(&n_waiting, 1);
  while (count >= atomic_load(&seat->limit)) nanosleep(&nap, NULL);
  atomic_fetch_sub(&n_waiting, 1);
  clock_gettime(CLOCK_MONOTONIC, &ended);
  const int64_t ns = (ended.tv_sec - began.tv_sec) * INT64_C(1000000000) + ended.tv_nsec - began.tv_nsec;
  atomic_fetch_add(&dccl_counts()->waited_ns, (uint64_t)ns);
}

// One of each `one_of` collectives: equal on all ranks, and in no step with how a job's calls come.
static bool is_due(const struct change* c, uint64_t count) {
  const uint64_t n = c->one_of, mix = UINT64_C(0x9e3779b97f4a7c15), hash = n ? count / n * mix : 0;
  return n == 0 || count % n == ((hash ^ hash >> 32) * mix >> 32) % n;
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
      const bool tries = count < dccl_get(&c->until) && is_due(c, count);
      table = dccl_get(tries ? &c->trial : &c->base);
      break;
    }
    if (dccl_get(&seat->order) == order) return table;
  }
}

// Of a trial of few calls the others are answered by what is there to stay, as they are meant to be.
static bool is_meant_to_stay(const struct dccl_seat* seat, dccl_table table) {
  const uint64_t order = dccl_get(&seat->order);
  if (order % SWITCHES == 0) return false;
  const struct change* last = &seat->changes[(order >> PLACE_BITS) % SWITCHES];
  if (last->one_of == 0 || table != last->base) return false;
  const uint64_t count = dccl_get(&seat->n_colls);
  return count >= dccl_get(&last->from) && count < dccl_get(&last->until);
}

void dccl_note_table(struct dccl_seat* seat, dccl_table table) {
  if (seat == NULL) return;
  const uint32_t generation = dccl_generation_of(table);
  atomic_store_explicit(&seat->generation, generation, memory_order_relaxed);
  if (atomic_load_explicit(&seat->decided, memory_order_relaxed) !=
      atomic_load_explicit(&latest, memory_order_relaxed))
    return;  // left out of the last switch: no part of what is tried
  if (atomic_load_explicit(&dccl_tries_few, memory_order_relaxed) && is_meant_to_stay(seat, table)) return;
  const uint64_t before = atomic_load_explicit(&first, memory_order_relaxed), now = generation + UINT64_C(1);
  if (before != now) atomic_store_explicit(before == 0 ? &first : &other, now, memory_order_relaxed);
}

bool dccl_is_rare(const struct dccl_seat* seat) {
  return dccl_tries_few && seat != NULL && seat->generation == seat->decided;
}

uint32_t dccl_generation(const struct dccl_seat* seat) {
  return seat != NULL ? atomic_load_explicit(&seat->generation, memory_order_relaxed)
                      : dccl_generation_of(dccl_fixed());
}

uint32_t dynamiccl_ended(void) {
  const uint64_t one = atomic_exchange(&first, 0), two = atomic_exchange(&other, 0);
  const uint32_t last = atomic_load(&latest);
  if (one == 0) return last != 0 ? last : dccl_generation_of(dccl_fixed());
  return (uint32_t)(two != 0 && one - 1 == last ? two - 1 : one - 1);
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

void dccl_freeze(struct dccl_seat* seat) {
  const struct list nothing = {0};
  pthread_mutex_lock(&dccl_seating);
  atomic_store(&seat->is_frozen, true);
  seat->decided = UINT32_MAX;  // it has no part in what is tried
  publish(seat, &nothing);
  atomic_store(&seat->limit, NO_LIMIT);
  seat->limit_owner = 0;
  pthread_mutex_unlock(&dccl_seating);
}

// ---- what the ranks agree on ----

static uint64_t last_from(const struct dccl_seat* seat) {
  const uint64_t order = dccl_get(&seat->order);
  return order % SWITCHES == 0 ? 0 : dccl_get(&seat->changes[(order >> PLACE_BITS) % SWITCHES].from);
}

int64_t dynamiccl_limit(uint32_t owner, uint64_t comm_id, uint64_t distance) {
  int64_t limit = -ENOENT;
  pthread_mutex_lock(&dccl_seating);
  struct dccl_seat* seat = dccl_seated(comm_id);
  const bool is_there = seat != NULL && !atomic_load(&seat->is_frozen);
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

static int change(struct dccl_seat* seat, const struct dccl_staged* staged, uint64_t from, uint64_t until) {
  const uint64_t order = dccl_get(&seat->order);
  const struct list before = changes_of(seat, dccl_get(&seat->n_colls), from);
  if (before.n >= PLACES) return -EAGAIN;
  const struct change* last = &seat->changes[(order >> PLACE_BITS) % SWITCHES];
  const dccl_table stays = order % SWITCHES == 0 ? dccl_fixed() : dccl_get(&last->base);
  int place = 0;
  while (places_read(seat) & 1u << place) place++;
  struct change* c = &seat->changes[place];
  c->base = until == 0 ? staged->table : stays;
  c->trial = staged->table;
  c->from = from;
  c->until = until;
  c->one_of = until == 0 ? 0 : staged->one_of;
  struct list after = {.n = before.n + 1, .place = {place}};
  memcpy(after.place + 1, before.place, sizeof *before.place * (size_t)before.n);
  publish(seat, &after);
  atomic_store(&dccl_tries_few, c->one_of != 0);
  seat->decided = dccl_generation_of(staged->table);
  return 0;
}

int dynamiccl_switch(uint32_t owner, uint64_t comm_id, uint64_t from, uint64_t until) {
  struct dccl_staged staged;
  if (!dccl_staged(owner, &staged)) return -EINVAL;
  pthread_mutex_lock(&dccl_seating);
  struct dccl_seat* seat = dccl_seated(comm_id);
  const bool is_there = seat != NULL && !atomic_load(&seat->is_frozen);
  const int error = is_there ? change(seat, &staged, from, until) : -ENOENT;
  pthread_mutex_unlock(&dccl_seating);
  return error;
}

void dynamiccl_lift(uint32_t owner, uint32_t generation) {
  pthread_mutex_lock(&dccl_seating);
  if (generation != 0) atomic_store(&latest, generation);
  for (int i = 0; i < SEATS; i++) {
    if (dccl_seats[i].limit_owner != owner) continue;
    dccl_seats[i].limit_owner = 0;
    atomic_store(&dccl_seats[i].limit, NO_LIMIT);
  }
  pthread_mutex_unlock(&dccl_seating);
}

uint32_t dynamiccl_waiting(void) { return atomic_load(&n_waiting); }
