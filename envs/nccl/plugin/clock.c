// The clock that the ranks of a communicator share: how many all-gathers and reduce-scatters each has seen,
// and all-reduces where the job's option has them tuned.
//
// NCCL demands that all ranks of a communicator issue the same collectives in the same order. From 2.28.3 on
// a call is told where the program makes it, and a group's launch where it is made: a group counts at its
// launch, whole. Calls that are priced alone (ncclGroupSimulateEnd), captured, or run without a kernel of the
// ordinary kind (on memory windows, and broadcasts from 2.29 on) are never launched so, and do not count.
//
// Only the collectives that tables are made for count, so that without the option an all-reduce now and then
// leaves the steps alike. It is in the hash all the same: who makes another one is found out.
//
// A launch of sends and receives is told as well, on the ranks that make them alone. It says of which group
// it is, and that group may hold a collective that is not launched. So broadcasts are in no hash, and a group
// counts only if NCCL asked about one of those in it: about one on memory windows it does not ask. In
// such a group with sends of some ranks, two cases are left (read in 2.29.7 and 2.30.7): with one of two
// buffers in a window NCCL may ask and then run another kernel; for broadcasts from several ranks it asks
// about an all-gather. A trial of few calls answers such broadcasts as often as they come before the next
// call.
//
// NCCL 2.27 tells of a collective itself only, at times later and from another thread, as each rank decides
// alone. That is no clock: no table changes there.
#include <stdlib.h>
#include <string.h>

#include "seat.h"

enum { LEVELS = 3, A_LEVEL = DCCL_MARKS / LEVELS };
// Each level has the last marks of so many collectives: ranks that are far apart meet at a coarse one.
static const uint64_t spacing[LEVELS] = {16, 256, 4096};
_Static_assert(LEVELS* A_LEVEL == DCCL_MARKS, "marks");

static _Atomic uint64_t n_threads;
static _Thread_local uint64_t this_group;  // another number for each group of calls on any thread, of 56 bits

bool dccl_is_captured(const struct dccl_seat* seat) {
  return seat != NULL && atomic_load_explicit(&seat->is_captured, memory_order_relaxed);
}

// ---- what NCCL asked about ----

static void count(_Atomic uint64_t* calls) {
  // No locked addition in every collective's path: of two threads at once one may not be counted.
  atomic_store_explicit(calls, atomic_load_explicit(calls, memory_order_relaxed) + 1, memory_order_relaxed);
}

void dccl_note_answer(void) { count(&dccl_counts()->calls.used); }

// NCCL prices the collectives of a group together: it asks with the sum of their sizes and then enqueues each
// with its own. All of a group's questions come before its first collective.
void dccl_note_question(struct dccl_seat* seat, int func, uint64_t n_bytes) {
  count(&dccl_counts()->calls.asked);
  if (seat == NULL) return;
  const uint32_t group = atomic_load_explicit(&seat->n_groups, memory_order_relaxed);
  uint32_t n = atomic_load_explicit(&seat->asks[func].n, memory_order_relaxed);
  if (atomic_load_explicit(&seat->asks[func].group, memory_order_relaxed) != group) {
    atomic_store_explicit(&seat->asks[func].group, group, memory_order_relaxed);
    n = 0;
  }
  if (n == ASKS) return;
  for (uint32_t i = 0; i < n; i++) {  // some releases ask several times for one collective
    if (atomic_load_explicit(&seat->asks[func].n_bytes[i], memory_order_relaxed) == n_bytes) return;
  }
  atomic_store_explicit(&seat->asks[func].n_bytes[n], n_bytes, memory_order_relaxed);
  atomic_store_explicit(&seat->asks[func].n, n + 1, memory_order_relaxed);
}

static uint64_t asked_about(const struct dccl_seat* seat, uint8_t func, uint64_t n_bytes) {
  uint64_t found = 0;
  const uint32_t n = atomic_load_explicit(&seat->asks[func].n, memory_order_relaxed);
  for (uint32_t i = 0; i < n && i < ASKS; i++) {
    const uint64_t asked = atomic_load_explicit(&seat->asks[func].n_bytes[i], memory_order_relaxed);
    if (asked >= n_bytes && (found == 0 || asked < found)) found = asked;
  }
  return found;
}

// ---- marks ----

// Ranks that group their calls otherwise would switch at other calls: what begins a group is part of the
// hash.
static uint64_t mixed(uint64_t hash, uint64_t size, uint64_t kinds, bool first) {
  hash = (hash ^ size) * UINT64_C(0x100000001b3);
  return (hash ^ hash >> 29 ^ kinds ^ (uint64_t)first << 16) * UINT64_C(0x9e3779b97f4a7c15);
}

// Nine letters of a name, from its fourth on: there NCCL's names of collectives (AllGather) and of types
// (ncclFloat8e4m3) differ.
static uint64_t word_of(const char* name) {
  uint64_t word = 0;
  const bool is_long = name != NULL && name[0] != 0 && name[1] != 0 && name[2] != 0;
  for (int i = 3; is_long && i < 12 && name[i] != 0; i++) word = word << 7 | (uint8_t)name[i];
  return word;
}

static void mark(struct dccl_seat* seat, uint64_t n, uint64_t hash) {
  for (int level = 0; level < LEVELS && n % spacing[level] == 0; level++) {
    const uint64_t which = (uint64_t)level * A_LEVEL + n / spacing[level] % A_LEVEL;
    atomic_store(&seat->marks[which].at, 0);
    atomic_store(&seat->marks[which].hash, hash);
    atomic_store(&seat->marks[which].at, n);
  }
}

// A mark is made at its call, and is there once that has counted.
void dccl_copy_marks(struct dccl_seat* seat, struct dccl_comm_view* view) {
  for (int m = 0; m < DCCL_MARKS; m++) {
    const uint64_t at = atomic_load(&seat->marks[m].at);
    view->marks[m].hash = atomic_load(&seat->marks[m].hash);
    const bool is_whole = at == atomic_load(&seat->marks[m].at);
    view->marks[m].at = is_whole && at <= view->count ? at : 0;
  }
}

// ---- calls and launches ----

static bool is_broadcast(const char* func) { return func != NULL && strcmp(func, "Broadcast") == 0; }

static bool counts(const struct dccl_seat* seat, const char* func) {
  static const char* const names[] = {"AllGather", "ReduceScatter", "AllReduce"};
  for (int tuned = FUNC_ALL_GATHER; func != NULL && tuned <= seat->last_tuned; tuned++) {
    if (strcmp(func, names[tuned - FUNC_ALL_GATHER]) == 0) return true;
  }
  return false;
}

uint64_t dccl_note_group(void) {
  if (this_group == 0) this_group = (atomic_fetch_add(&n_threads, 1) % (1 << 15) + 1) << 40;
  return ++this_group;
}

// Whether NCCL has asked about one of these functions in the group under way.
static bool has_asked(const struct dccl_seat* seat, int first, int last) {
  const uint32_t group = atomic_load_explicit(&seat->n_groups, memory_order_relaxed);
  for (int func = first; func <= last; func++) {
    if (atomic_load_explicit(&seat->asks[func].group, memory_order_relaxed) == group) return true;
  }
  return false;
}

uint64_t dccl_note_call(struct dccl_seat* seat, const struct dccl_call* call) {
  if (seat == NULL) return 0;
  atomic_store_explicit(&seat->is_captured, call->captured, memory_order_relaxed);
  uint64_t n_called = atomic_load_explicit(&seat->n_called, memory_order_relaxed);
  const bool first = !atomic_load_explicit(&seat->has_begun, memory_order_relaxed) ||
                     atomic_load_explicit(&seat->group, memory_order_relaxed) != this_group;
  if (first) {  // calls of the group before that were not launched are forgotten
    n_called = 0;
    atomic_store_explicit(&seat->group, this_group, memory_order_relaxed);
    atomic_store_explicit(&seat->n_called, 0, memory_order_relaxed);
    atomic_store_explicit(&seat->has_begun, false, memory_order_relaxed);
    const uint32_t n_groups = atomic_load_explicit(&seat->n_groups, memory_order_relaxed);
    atomic_store_explicit(&seat->n_groups, n_groups + 1, memory_order_relaxed);
  }
  if (call->captured) return 0;
  const uint64_t n = atomic_load_explicit(&seat->n_colls, memory_order_relaxed) + n_called + 1;
  const uint64_t beside = n_called > 0 ? n - 1 : n;  // the call that the same table answers
  if (is_broadcast(call->func)) return beside;
  uint64_t hash = atomic_load_explicit(first ? &seat->hash : &seat->called_hash, memory_order_relaxed);
  const uint64_t func = word_of(call->func), type = word_of(call->datatype);
  hash = mixed(hash, call->count, func ^ (type << 24 | type >> 40), first);
  atomic_store_explicit(&seat->called_hash, hash, memory_order_relaxed);
  atomic_store_explicit(&seat->has_begun, true, memory_order_relaxed);
  if (!counts(seat, call->func)) return beside;
  if (n % spacing[0] == 0) mark(seat, n, hash);
  atomic_store_explicit(&seat->n_called, n_called + 1, memory_order_relaxed);
  return n;
}

void dccl_note_launch(struct dccl_seat* seat, uint64_t group_of_calls) {
  if (seat == NULL || !atomic_load_explicit(&seat->has_begun, memory_order_relaxed)) return;
  if (atomic_load_explicit(&seat->group, memory_order_relaxed) != group_of_calls) return;
  const bool has_tuner = atomic_load_explicit(&seat->has_tuner, memory_order_relaxed);
  if (has_tuner && !has_asked(seat, FUNC_BROADCAST + 1, N_FUNCS - 1)) return;
  const uint64_t hash = atomic_load_explicit(&seat->called_hash, memory_order_relaxed);
  atomic_store_explicit(&seat->hash, hash, memory_order_relaxed);
  const uint32_t group = atomic_load_explicit(&seat->n_groups, memory_order_relaxed);
  atomic_store_explicit(&seat->launched, group, memory_order_relaxed);
  const bool is_asked = !has_tuner || has_asked(seat, FUNC_ALL_GATHER, seat->last_tuned);
  const uint64_t n_called = is_asked ? atomic_load_explicit(&seat->n_called, memory_order_relaxed) : 0;
  atomic_store_explicit(&seat->n_launched, n_called, memory_order_relaxed);
  atomic_store_explicit(&seat->n_called, 0, memory_order_relaxed);
  atomic_store_explicit(&seat->has_begun, false, memory_order_relaxed);
  if (n_called == 0) return;
  const uint64_t before = atomic_load_explicit(&seat->n_colls, memory_order_relaxed), n = before + n_called;
  const uint64_t generation = dccl_generation(seat);
  dccl_note_step(seat);
  for (uint64_t call = n_called > MADE ? n - MADE + 1 : before + 1; call <= n; call++) {
    atomic_store_explicit(&seat->made[call % MADE], call << 32 | generation, memory_order_relaxed);
    atomic_store_explicit(&seat->firsts[call % MADE], before + 1, memory_order_relaxed);
  }
  atomic_store_explicit(&seat->looked_at, before + 1, memory_order_relaxed);
  atomic_fetch_add(&seat->n_colls, n_called);
}

// Whether a collective is told before the next group has begun: what NCCL asked last, it asked about this
// one.
static bool is_of_the_last(const struct dccl_seat* seat, uint64_t number) {
  const uint64_t n = atomic_load_explicit(&seat->n_colls, memory_order_relaxed);
  return number + atomic_load_explicit(&seat->n_launched, memory_order_relaxed) > n &&
         atomic_load_explicit(&seat->launched, memory_order_relaxed) ==
             atomic_load_explicit(&seat->n_groups, memory_order_relaxed);
}

static void note_call_of(const struct dccl_seat* seat, uint64_t number, struct dccl_record* coll) {
  const uint64_t made = atomic_load_explicit(&seat->made[number % MADE], memory_order_relaxed);
  if (made >> 32 != (number & UINT32_MAX)) return;  // too long ago
  coll->generation = (uint32_t)made;
  coll->coll.first = atomic_load_explicit(&seat->firsts[number % MADE], memory_order_relaxed);
}

void dccl_note_coll(struct dccl_seat* seat, struct dccl_record* coll, uint64_t number) {
  coll->generation = dccl_generation(seat);
  if (seat == NULL || dccl_clock_of(seat) != DCCL_COUNTS) return;
  if (number != 0) note_call_of(seat, number, coll);
  const bool is_asked_about = number == 0 || is_of_the_last(seat, number);
  if (coll->func < N_FUNCS && is_asked_about)
    coll->coll.asked_bytes = asked_about(seat, coll->func, coll->n_bytes);
}
