// The communicators of this process: how many collectives each has seen, which table holds for the next, what
// NCCL asked about last, and what loaded us.
//
// All ranks of a communicator issue the same collectives in the same order, so their number is a clock that
// the ranks share. A switch names two of its times: from the one its table holds, until the other. A question
// at or beyond the limit waits: there the ranks may be about to agree on a switch.
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "plugin.h"

#ifndef DCCL_BUILD
#define DCCL_BUILD "unknown"  // build.py says the hash of the sources
#endif

enum { SEATS = 256, ASKS = 8, SWITCHES = 4, HELD = SWITCHES - 1 };
#define NO_LIMIT UINT64_MAX

// From collective `from` until `until` the table `trial` holds, at one collective of `one_of` or (0) at all;
// then, and at the others, `base`. Numbers of tables.
struct change {
  _Atomic uint64_t from, until;
  _Atomic uint32_t trial, base, one_of;
};

// A communicator as tuner and profiler share it. Seats of destroyed ones are taken by new ones when all are
// taken.
struct dccl_seat {
  uint64_t comm_id;  // 0: free
  int n_users;       // contexts of tuner and profiler; guarded by `seating`, as comm_id is
  _Atomic bool is_watched;
  _Atomic bool is_captured;  // its last call goes into a CUDA graph
  _Atomic bool is_first;     // asked about since the last collective: the next one begins a group
  uint32_t n_ranks, n_nodes;
  _Atomic uint64_t n_colls, limit;
  _Atomic uint64_t hash;  // of the collectives so far
  struct {
    _Atomic uint64_t at, hash;
  } marks[DCCL_MARKS];
  // The last HELD of them count; the one before is where the next is written.
  struct change changes[SWITCHES];
  _Atomic uint32_t n_changes;
  _Atomic uint32_t decided, generation;  // of the last switch, of the table that answered last
  struct {
    _Atomic uint32_t n;
    _Atomic bool answered;  // a collective came since the last question: the next one begins a new group
    _Atomic uint64_t n_bytes[ASKS];
  } asks[N_FUNCS];
};

static struct dccl_seat seats[SEATS];
static pthread_mutex_t seating = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint32_t n_tuners, abi;
static _Atomic int n_contexts;
static _Atomic uint32_t latest;        // generation of the switch that was decided last
static _Atomic uint64_t first, other;  // answered in this step, and another that did: generation + 1, 0: none
static _Atomic uint32_t n_waiting;
_Atomic bool dccl_tries_few;
static _Atomic bool captures;  // whatever is called now goes into a CUDA graph

_Thread_local struct dccl_comm dccl_last_comm;

// ---- seats ----

static struct dccl_seat* find(uint64_t comm_id) {
  struct dccl_seat *free_one = NULL, *left = NULL;
  for (int i = 0; i < SEATS; i++) {
    if (seats[i].comm_id == comm_id && seats[i].n_users > 0) return &seats[i];
    if (seats[i].comm_id == 0 && free_one == NULL) free_one = &seats[i];
    if (seats[i].n_users == 0 && left == NULL) left = &seats[i];
  }
  struct dccl_seat* seat = free_one != NULL ? free_one : left;
  if (seat != NULL) {
    memset(seat, 0, sizeof *seat);
    seat->comm_id = comm_id;
    seat->limit = NO_LIMIT;
  }
  return seat;
}

struct dccl_seat* dccl_sit(uint64_t comm_id, uint32_t n_ranks, uint32_t n_nodes, bool as_profiler) {
  atomic_fetch_add(&n_contexts, 1);
  if (comm_id == 0) return NULL;
  pthread_mutex_lock(&seating);
  struct dccl_seat* seat = find(comm_id);
  if (seat != NULL) {
    seat->n_users++;
    seat->n_ranks = n_ranks;
    seat->n_nodes = n_nodes;
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
  atomic_store(&n_contexts, 0);
  atomic_store(&latest, 0);
  atomic_store(&dccl_tries_few, false);
  atomic_store(&n_waiting, 0);
}

// ---- which table holds ----

static uint64_t get(const _Atomic uint64_t* value) {
  return atomic_load_explicit(value, memory_order_acquire);
}

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

uint32_t dccl_table_now(struct dccl_seat* seat) {
  if (seat == NULL) return dccl_fixed();
  // The limit after the count, each in the one order of all: dynamiccl_limit writes and reads them crosswise.
  const uint64_t count = atomic_load(&seat->n_colls);
  if (count >= atomic_load(&seat->limit)) wait_below_limit(seat, count);
  for (;;) {
    const uint32_t n = atomic_load_explicit(&seat->n_changes, memory_order_acquire);
    uint32_t table = dccl_fixed();
    for (uint32_t i = n; i > 0 && n - i < HELD; i--) {
      const struct change* c = &seat->changes[(i - 1) % SWITCHES];
      if (count < get(&c->from)) continue;
      const bool tries = count < get(&c->until) && is_due(c, count);
      table = atomic_load_explicit(tries ? &c->trial : &c->base, memory_order_acquire);
      break;
    }
    if (atomic_load_explicit(&seat->n_changes, memory_order_acquire) == n) return table;
  }
}

void dccl_note_table(struct dccl_seat* seat, uint32_t table) {
  if (seat == NULL) return;
  const uint32_t generation = dccl_generation_of(table);
  atomic_store_explicit(&seat->generation, generation, memory_order_relaxed);
  if (atomic_load_explicit(&seat->decided, memory_order_relaxed) !=
      atomic_load_explicit(&latest, memory_order_relaxed))
    return;  // left out of the last switch: no part of what is tried
  const struct change* last = &seat->changes[(seat->n_changes + SWITCHES - 1) % SWITCHES];
  const bool runs = get(&seat->n_colls) - get(&last->from) < get(&last->until) - get(&last->from);
  if (runs && last->one_of != 0 && table == last->base) return;  // as it is meant to be
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

bool dccl_table_is_used(uint32_t table) {
  bool used = false;
  pthread_mutex_lock(&seating);
  for (int i = 0; i < SEATS && !used; i++) {
    const uint32_t n = seats[i].comm_id == 0 ? 0 : seats[i].n_changes;
    for (uint32_t k = n; k > 0 && n - k < HELD; k--) {
      const struct change* c = &seats[i].changes[(k - 1) % SWITCHES];
      used = used || c->trial == table || c->base == table;
    }
  }
  pthread_mutex_unlock(&seating);
  return used;
}

// ---- what the ranks agree on ----

static struct dccl_seat* seated(uint64_t comm_id) {
  for (int i = 0; i < SEATS; i++) {
    if (seats[i].comm_id == comm_id && seats[i].n_users > 0) return &seats[i];
  }
  return NULL;
}

int64_t dynamiccl_limit(uint64_t comm_id, uint64_t distance) {
  int64_t limit = -ENOENT;
  pthread_mutex_lock(&seating);
  struct dccl_seat* seat = seated(comm_id);
  const uint32_t n = seat != NULL ? seat->n_changes : 0;
  if (seat != NULL && n >= HELD && seat->n_colls < seat->changes[(n - HELD + 1) % SWITCHES].from) {
    limit = -EAGAIN;  // one more switch, and one that may still hold would be forgotten
  } else if (seat != NULL) {
    uint64_t far = 0;
    do {  // whoever asks meanwhile sees the limit, or we see how far he has come
      far = atomic_load(&seat->n_colls) + distance;
      if (n > 0 && far < seat->changes[(n - 1) % SWITCHES].from) far = seat->changes[(n - 1) % SWITCHES].from;
      atomic_store(&seat->limit, far);
    } while (atomic_load(&seat->n_colls) >= far);
    limit = (int64_t)far;
  }
  pthread_mutex_unlock(&seating);
  return limit;
}

int dynamiccl_switch(uint64_t comm_id, uint64_t from, uint64_t until) {
  int error = -ENOENT;
  pthread_mutex_lock(&seating);
  struct dccl_seat* seat = seated(comm_id);
  const uint32_t table = dccl_staged();
  if (seat != NULL && table != 0) {
    const uint32_t n = seat->n_changes;
    struct change* c = &seat->changes[n % SWITCHES];
    c->base = until == 0 ? table : n > 0 ? seat->changes[(n - 1) % SWITCHES].base : dccl_fixed();
    c->trial = table;
    c->from = from;
    c->until = until;
    c->one_of = until == 0 ? 0 : dccl_one_of(table);
    atomic_store(&dccl_tries_few, c->one_of != 0);
    seat->decided = dccl_generation_of(table);
    seat->n_changes = n + 1;
    error = 0;
  }
  pthread_mutex_unlock(&seating);
  return error;
}

void dynamiccl_lift(uint32_t generation) {
  pthread_mutex_lock(&seating);
  if (generation != 0) atomic_store(&latest, generation);
  for (int i = 0; i < SEATS; i++) atomic_store(&seats[i].limit, NO_LIMIT);
  pthread_mutex_unlock(&seating);
}

uint32_t dynamiccl_waiting(void) { return atomic_load(&n_waiting); }

// ---- what NCCL asked about ----

static void count(_Atomic uint64_t* calls) {
  // No locked addition in every collective's path: of two threads at once one may not be counted.
  atomic_store_explicit(calls, atomic_load_explicit(calls, memory_order_relaxed) + 1, memory_order_relaxed);
}

void dccl_note_answer(void) { count(&dccl_counts()->calls.used); }

void dccl_note_call(struct dccl_seat* seat, bool captured) {
  if (seat != NULL) atomic_store_explicit(&seat->is_captured, captured, memory_order_relaxed);
}

bool dccl_is_captured(const struct dccl_seat* seat) {
  return dccl_captures() || (seat != NULL && atomic_load_explicit(&seat->is_captured, memory_order_relaxed));
}

bool dccl_captures(void) { return atomic_load_explicit(&captures, memory_order_relaxed); }

void dynamiccl_capture(int on) { atomic_store(&captures, on != 0); }

// NCCL prices the collectives of a group together: it asks with the sum of their sizes and then enqueues each
// with its own. All of a group's questions come before its first collective.
void dccl_note_question(struct dccl_seat* seat, int func, uint64_t n_bytes) {
  count(&dccl_counts()->calls.asked);
  if (seat == NULL) return;
  if (!dccl_is_captured(seat)) atomic_store_explicit(&seat->is_first, true, memory_order_relaxed);
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

// One more on the clock of its communicator. Ranks that group otherwise would switch at other calls.
static void tick(struct dccl_seat* seat, const struct dccl_record* coll) {
  const uint64_t n = atomic_load(&seat->n_colls) + 1;
  const uint64_t first = atomic_load_explicit(&seat->is_first, memory_order_relaxed);
  const uint64_t kinds = first << 16 | (uint64_t)coll->func << 8 | coll->dtype;
  atomic_store_explicit(&seat->is_first, false, memory_order_relaxed);
  uint64_t hash = (get(&seat->hash) ^ coll->n_bytes) * UINT64_C(0x100000001b3);
  hash = (hash ^ hash >> 29 ^ kinds) * UINT64_C(0x9e3779b97f4a7c15);
  atomic_store_explicit(&seat->hash, hash, memory_order_relaxed);
  if (n % 64 == 0 || (n < 64 && n % 16 == 0)) {
    const uint64_t which = (n < 64 ? n / 16 : n / 64 + 3) % DCCL_MARKS;
    atomic_store(&seat->marks[which].at, 0);
    atomic_store(&seat->marks[which].hash, hash);
    atomic_store(&seat->marks[which].at, n);
  }
  atomic_store(&seat->n_colls, n);
}

uint64_t dccl_note_coll(struct dccl_seat* seat, const struct dccl_record* coll, bool captured) {
  const uint8_t func = coll->func;
  const uint64_t n_bytes = coll->n_bytes;
  if (seat == NULL) return 0;
  if (!captured && (func < FUNC_SEND_RECV || func >= N_FUNCS)) tick(seat, coll);
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
  pthread_mutex_lock(&seating);
  for (int i = 0; i < SEATS; i++) {
    const struct dccl_seat* seat = &seats[i];
    if (seat->comm_id == 0 || seat->n_users == 0 || !atomic_load(&seat->is_watched)) continue;
    if (n < capacity) {
      struct dccl_comm_view* v = &comms[n];
      *v =
          (struct dccl_comm_view){seat->comm_id, seat->n_ranks, seat->n_nodes, get(&seat->n_colls), {{0, 0}}};
      for (int m = 0; m < DCCL_MARKS; m++) {
        const uint64_t at = atomic_load(&seat->marks[m].at);
        v->marks[m].hash = atomic_load(&seat->marks[m].hash);
        v->marks[m].at = at == atomic_load(&seat->marks[m].at) ? at : 0;
      }
    }
    n++;
  }
  pthread_mutex_unlock(&seating);
  return n;
}
