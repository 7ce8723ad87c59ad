// What the parts that keep communicators share: comms.c seats them, switch.c says which table holds, steps.c
// tells their steps, clock.c counts their collectives, and control.c does what the probe asks of all of it.
#ifndef DYNAMICCL_SEAT_H_
#define DYNAMICCL_SEAT_H_

#include <pthread.h>

#include "plugin.h"

enum { SEATS = 256, ASKS = 8, SWITCHES = 8, MADE = 256 };
#define NO_LIMIT UINT64_MAX
#define NOBODY UINT32_MAX  // owns the limits that were given up

// From collective `from` until `until` the table `trial` holds, in its turns or throughout (see dccl_span);
// then, and in the other turns, `base`.
struct change {
  _Atomic uint64_t from, until, length, a_step;
  _Atomic uint64_t trial, base;
  _Atomic uint32_t one_of, swap;
};

// A communicator as tuner and profiler share it. Seats of destroyed ones are taken by new ones when all are
// taken.
struct dccl_seat {
  uint64_t comm_id;  // 0: free
  int n_users;       // contexts of tuner and profiler; guarded by `dccl_seating`, as comm_id is
  uint32_t n_ranks, n_nodes;
  int last_tuned;            // see dccl_last_tuned
  _Atomic uint32_t told;     // how NCCL tells of its collectives
  _Atomic bool has_tuner;    // NCCL asks us about its collectives
  _Atomic bool is_captured;  // its last call goes into a CUDA graph
  _Atomic uint64_t n_colls, limit;
  uint32_t limit_owner;   // whose limit it is; guarded by `dccl_seating`
  _Atomic uint64_t hash;  // of the collectives so far
  // The group under way: which it is, its calls so far that count, none of which may ever run, the hash with
  // all its calls, and whether there is one in the hash.
  _Atomic uint64_t group, n_called, called_hash;
  _Atomic bool has_begun;
  _Atomic uint32_t n_groups, launched;  // groups begun; of the last that ran, which and how many calls
  _Atomic uint64_t n_launched;
  // The group before the one under way was answered by its first collective; which is the first after that.
  _Atomic uint64_t looked_at;
  _Atomic uint64_t made[MADE];    // number of a call << 32 | generation of the table that answered it
  _Atomic uint64_t firsts[MADE];  // number of the first call of its group
  // Steps: collectives up to the last end of one, those of the last, and how many in a row had so many.
  uint64_t ended_at, a_step, n_alike;  // guarded by `dccl_seating`
  struct {
    _Atomic uint64_t at, hash;
  } marks[DCCL_MARKS];
  struct change changes[SWITCHES];
  // Which changes may still hold, see switch.c. Another word at each change, as the high bits count them.
  _Atomic uint64_t order;
  _Atomic uint32_t decided, generation;  // of the last switch, of the table that answered last
  _Atomic bool in_turns;                 // turns that follow steps are under way
  struct {
    _Atomic uint32_t n, group;
    _Atomic uint64_t n_bytes[ASKS];
  } asks[N_FUNCS];
};

extern struct dccl_seat dccl_seats[SEATS];
extern pthread_mutex_t dccl_seating;

// The seat of a communicator that is in use, or NULL. Holding `dccl_seating`.
struct dccl_seat* dccl_seated(uint64_t comm_id);
// The same if its count is a clock. Holding `dccl_seating`.
struct dccl_seat* dccl_counting(uint64_t comm_id);
// The change that holds at a collective, or NULL. Holding `dccl_seating`.
const struct change* dccl_change_at(const struct dccl_seat* seat, uint64_t count);
// The staged table holds at these collectives. 0 or -EAGAIN, see dynamiccl_switch. Holding `dccl_seating`.
int dccl_change(struct dccl_seat* seat, dccl_table staged, const struct dccl_span* span);
// Whether a trial of few calls is under way there, or ahead. Holding `dccl_seating`.
bool dccl_may_try_few(const struct dccl_seat* seat);
// Fills in what its steps have in common, see dccl_comm_view. Holding `dccl_seating`.
void dccl_copy_rhythm(const struct dccl_seat* seat, struct dccl_comm_view* view);
// Fills in what it will answer from its next call on, see dccl_comm_view. Holding `dccl_seating`.
void dccl_copy_plan(const struct dccl_seat* seat, struct dccl_comm_view* view);
// The step under way is one of the table that answered last.
void dccl_note_step(const struct dccl_seat* seat);
// Marks of its count that are there.
void dccl_copy_marks(struct dccl_seat* seat, struct dccl_comm_view* view);

static inline uint64_t dccl_get(const _Atomic uint64_t* value) {
  return atomic_load_explicit(value, memory_order_acquire);
}

static inline uint32_t dccl_get32(const _Atomic uint32_t* value) {
  return atomic_load_explicit(value, memory_order_acquire);
}

// Whether its count is a clock, see dccl_comm_view.
static inline uint32_t dccl_clock_of(const struct dccl_seat* seat) {
  const uint32_t told = atomic_load_explicit(&seat->told, memory_order_relaxed);
  return told == DCCL_TOLD_AT_CALLS ? DCCL_COUNTS : DCCL_TOLD_NO_CALLS;
}

#endif  // DYNAMICCL_SEAT_H_
