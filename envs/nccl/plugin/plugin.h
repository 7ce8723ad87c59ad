// What the parts of the plugin share with one another, with the probe (ctypes) and with the daemon (shared
// memory).
//
// Layouts are those of traces/records.py and envs/nccl/shm.py; tests/envs/nccl/test_plugin.py compares them
// byte by byte.
#ifndef DYNAMICCL_PLUGIN_H_
#define DYNAMICCL_PLUGIN_H_

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

#define DCCL_EXPORT __attribute__((visibility("default")))

enum { DCCL_UNSET = 255 };  // algo, proto or dtype byte: NCCL decides, or unknown
enum { DCCL_NO_RANK = 0xffffffff };
#define DCCL_NO_OFFER 1e30f  // a cost of this or more means that NCCL does not have the cell

// ---- table: a 64-byte head and rows of 32 bytes, the same bytes in the file, on the wire and here ----

#define DCCL_TABLE_MAGIC UINT64_C(0x314c42544c434344)  // "DCCLTBL1"
enum { DCCL_TABLE_VERSION = 6, DCCL_MAX_ROWS = 1024, DCCL_MAX_CHANNELS = 64 };

struct dccl_table_head {
  uint64_t magic;
  uint32_t version;
  uint32_t n_rows;
  uint32_t generation;
  uint32_t crc;     // CRC-32 of head and rows with this field zero
  uint64_t unused;  // zero
  // For the probe of rank 0, not for us: what the ranks decide on counts.
  uint32_t trial_steps;  // zero: confirmed, else a trial
  uint32_t one_of;       // a trial holds in one turn of so many, 0: throughout
  uint32_t turn_steps;   // steps of a turn, 0: a turn is one collective
  uint32_t swap;         // of two turns the other one is the trial's
  uint64_t reserved[2];
};

struct dccl_rule {
  // The class of communicators, which every rank's tuner is told; both 0: all whose class has no row for the
  // message.
  uint32_t n_ranks, n_nodes;
  uint64_t min_bytes;
  uint64_t max_bytes;
  uint8_t func;
  uint8_t algo;
  uint8_t proto;
  uint8_t n_channels;
  // 0, or the row is a ceiling: NCCL's own pair, with the channels that NCCL itself gives such a message on a
  // communicator of `n_channels`. Threads of a ring's block under Simple, 256 or 512, on which that depends.
  uint32_t threads;
};

_Static_assert(sizeof(struct dccl_table_head) == 64, "table head");
_Static_assert(sizeof(struct dccl_rule) == 32, "table row");

// A class as one number, in the order of a table's rows.
static inline uint64_t dccl_class(uint32_t n_ranks, uint32_t n_nodes) {
  return (uint64_t)n_nodes << 32 | n_ranks;
}

struct dccl_decision {
  uint8_t algo;
  uint8_t proto;
  uint8_t n_channels;  // 0: NCCL decides
  uint16_t threads;    // as in a row
};

// A table as it is referred to: its generation << 32 | the number of the buffer that it lies in. Buffer 0 is
// empty for ever: tables without rows need no other.
typedef uint64_t dccl_table;
enum { DCCL_BUFFER_BITS = 9, DCCL_BUFFERS = 1 << DCCL_BUFFER_BITS };
static inline uint32_t dccl_buffer_of(dccl_table table) { return (uint32_t)table; }
static inline uint32_t dccl_generation_of(dccl_table table) { return (uint32_t)(table >> 32); }

// 1: `decision` is that of a message under a table, 0: the table is silent, -1: its buffer is being filled
// with another. `class` is dccl_class() of the communicator.
int dccl_lookup(dccl_table table, uint64_t class, int func, uint64_t n_bytes, struct dccl_decision* decision);
uint64_t dccl_epoch(dccl_table table);  // another one each time that its buffer is filled; 37 bits
dccl_table dccl_fixed(
    void);  // what dynamiccl_activate or the environment gave; holds where nothing was agreed
void dccl_fix(dccl_table table);          // from now on it holds there
uint64_t dccl_rows_of(dccl_table table);  // their number << 32 | checksum: equal where the rows are; 0: none
// 0 and the head of a message, or the negative errno that says what is wrong with it.
int dccl_check_table(const void* message, size_t size, struct dccl_table_head* head);
// Copies a checked message into a buffer that nobody refers to.
void dccl_fill(uint32_t buffer, const void* message, const struct dccl_table_head* head);

// ---- ring ----

#define DCCL_RING_MAGIC UINT64_C(0x31474e524c434344)  // "DCCLRNG1"
#define DCCL_RING_BUSY UINT64_MAX                     // stamp of a record that is being written
enum { DCCL_RING_VERSION = 3, DCCL_RING_RECORDS = 1 << 16, DCCL_RING_LEAST = 1 << 11 };
enum { DCCL_KNOWN_RECORDS = 1 << 10 };  // places for what is told once: communicators and offers

enum { DCCL_COMM = 1, DCCL_OFFER, DCCL_COLL, DCCL_KERNEL, DCCL_STEP, DCCL_STATE, DCCL_WAIT };
// WHOLE: see dccl_step_end.
enum { DCCL_FLAG_REGISTERED = 1, DCCL_FLAG_CAPTURED = 2, DCCL_FLAG_SAMPLED = 4, DCCL_FLAG_WHOLE = 16 };

struct dccl_record {
  uint64_t stamp;  // position in the ring + 1 once the record is whole
  uint8_t kind;
  uint8_t func;
  uint8_t algo;
  uint8_t proto;
  uint8_t n_channels;
  uint8_t dtype;
  uint16_t flags;
  uint64_t comm_id;
  uint64_t n_bytes;
  uint32_t step;
  uint32_t generation;
  union {
    struct {
      uint32_t rank, n_ranks, n_nodes, spare;
      char name[64];
    } comm;
    struct {
      float cost_us[N_ALGOS][N_PROTOS];
      int32_t n_pipe_ops;
    } offer;
    struct {
      uint64_t seq;
      int64_t enqueue_ns;
      uint32_t rank;
      uint64_t asked_bytes;  // what NCCL asked the tuner about, see dccl_note_coll
      uint64_t first;        // number of its group's first collective, from 1 on; 0: not known
    } coll;
    struct {
      uint64_t seq;
      int64_t start_ns, end_ns;
      uint32_t rank;
    } kernel;
    struct {
      uint32_t rank, sample_every;
      int64_t end_ns, duration_ns;
      uint64_t memory_used, memory_total;
      uint32_t trial;  // see dccl_step_end
    } at_step;
    struct {
      uint32_t rank, code;
      char text[80];
    } state;
    struct {
      uint32_t rank, spare;
      int64_t start_ns, end_ns;
    } wait;
    uint8_t bytes[88];
  };
};

_Static_assert(sizeof(struct dccl_record) == 128, "record");
_Static_assert(offsetof(struct dccl_record, comm_id) == 16, "record");
_Static_assert(offsetof(struct dccl_record, comm) == 40, "record");
_Static_assert(offsetof(struct dccl_record, kernel.rank) == 64, "record");
_Static_assert(offsetof(struct dccl_record, at_step.memory_total) == 72, "record");

struct dccl_slot {
  _Atomic uint64_t word[16];  // word 0 is the stamp
};

// Calls on NCCL's collectives in this process.
struct dccl_calls {
  _Atomic uint64_t asked;  // about which NCCL has asked the tuner
  _Atomic uint64_t used;   // that the table had its word in
  uint64_t reserved[2];
};

struct dccl_ring {
  uint64_t magic;
  uint32_t version;
  uint32_t record_bytes;
  uint64_t capacity;
  uint32_t pid;
  uint32_t n_known;  // places for known records, DCCL_KNOWN_RECORDS
  struct dccl_calls calls;
  _Atomic uint64_t head;       // positions handed out so far; on its own cache line
  _Atomic uint64_t known;      // known records written so far
  _Atomic uint64_t waited_ns;  // by threads of the job at the limit of a communicator
  uint64_t life;               // of the process: the same in its votes, see envs/nccl/life.py
  _Atomic uint64_t start;      // of the job: the life of its rank 0; 0: it has not been told
  uint64_t reserved_line[3];
  struct dccl_slot slots[];  // the known records, then the ring
};

_Static_assert(offsetof(struct dccl_ring, head) == 64, "ring");
_Static_assert(offsetof(struct dccl_ring, life) == 88, "ring");
_Static_assert(offsetof(struct dccl_ring, start) == 96, "ring");
_Static_assert(offsetof(struct dccl_ring, slots) == 128, "ring");

static inline size_t dccl_ring_bytes(uint64_t records) {
  return sizeof(struct dccl_ring) + (records + DCCL_KNOWN_RECORDS) * sizeof(struct dccl_slot);
}

// Writes a record (its stamp is set here). Never waits; a record that finds no ring or a busy slot is lost.
void dccl_emit(const struct dccl_record* record);
// The same for what is told once: kept beside the ring for whoever comes later; `must`: also in a last place.
void dccl_note(const struct dccl_record* record, bool must);
void dccl_forget(uint64_t comm_id);  // the communicator is no more: its places may be used again
// Makes the ring in the run folder; where that cannot be, there is none.
void dccl_open_ring(const char* path);
// Nothing is recorded any more. `is_used`: threads of NCCL may still write, so it stays mapped.
void dccl_close_ring(bool is_used);
bool dccl_ring_is_open(void);
struct dccl_ring* dccl_counts(void);  // `calls` and `waited_ns` are counted here, without a ring too
bool dccl_has_run(void);              // whether this process belongs to a run, with a ring or without
uint32_t dccl_step_now(void);
void dccl_set_step(uint32_t step);  // records from now on are of it
int64_t dccl_now_ns(void);

// ---- the tuner that the job has without us (next_tuner.c) ----

// What NCCL asks, whatever the version.
struct dccl_question {
  int func;
  size_t n_bytes;
  int n_pipe_ops;
  float* cost;
  int n_algos;
  int n_protos;
  int reg_buff;
  int* n_channels;
};

// A communicator as NCCL announces it to a tuner; what a version does not have is zero.
struct dccl_tuner_init {
  int version;
  uint64_t comm_id;
  size_t n_ranks, n_nodes;
  nccl_logger log;
  struct nccl_nvl_domains* domains;
  void* constants;
};

// Its context for a communicator.
struct dccl_next_tuner {
  int version;  // in which it is called, 0: there is none, or it was left out
  void* context;
};
void dccl_next_tuner_init(struct dccl_next_tuner* next, const struct dccl_tuner_init* init);
// False if it failed: whatever it wrote is then no answer.
bool dccl_next_tuner_ask(const struct dccl_next_tuner* next, const struct dccl_question* question);
void dccl_next_tuner_finalize(const struct dccl_next_tuner* next);

// ---- Python's lock (gil.c) ----

// Before a wait: the lock goes if this thread holds it, and Python neither lacks nor ends. For the other one.
void* dccl_let_go_of_python(void);
void dccl_take_python_back(void* state);

// ---- what NCCL needs for kernel times (room.c) ----

// A communicator is there; `inside_nccl` is an address in NCCL's library, or NULL.
void dccl_announce(uint32_t n_ranks, uint32_t n_nodes, const void* inside_nccl);
void dccl_needs_no_room(void);  // one has run a collective with kernel times, or is gone without
// Whether EVENT_KERNEL_CH may be set now for all communicators that are there.
bool dccl_may_time_kernels(void);

// ---- communicators ----

// The communicator whose profiler part was last initialised on this thread: tuner v3 and v4 are not told an
// id, but NCCL initialises the profiler first, on the same thread.
struct dccl_comm {
  bool fresh;
  uint64_t comm_id;
  uint32_t rank, n_ranks, n_nodes;
};
extern _Thread_local struct dccl_comm dccl_last_comm;
void dccl_emit_comm(const struct dccl_comm* comm, const char* name);

// What tuner and profiler know of one communicator together; NULL where there is no id or no room.
struct dccl_seat;
// How NCCL tells of collectives on it: not at all, each by itself and maybe late (2.27), or at calls (2.28.3
// on).
enum { DCCL_TOLD_NOTHING, DCCL_TOLD_LATE, DCCL_TOLD_AT_CALLS };
struct dccl_seat* dccl_sit(uint64_t comm_id, uint32_t n_ranks, uint32_t n_nodes, uint32_t told);
void dccl_leave(struct dccl_seat* seat);
// The table that holds for the question of now. Waits while the communicator is at its limit.
dccl_table dccl_table_now(struct dccl_seat* seat);
bool dccl_table_is_used(uint32_t buffer);                        // by a switch that may still hold
void dccl_note_table(struct dccl_seat* seat, dccl_table table);  // it answers
uint32_t dccl_generation(const struct dccl_seat* seat);          // of the table that answered last
bool dccl_is_rare(const struct dccl_seat* seat);                 // a trial of few calls answered last
extern _Atomic bool dccl_tries_few;   // the last switch is to such a trial, not over
extern _Atomic uint32_t dccl_latest;  // generation of the switch decided last
void dccl_begin_steps(void);          // the steps of a job are counted from here
void dccl_note_question(struct dccl_seat* seat, int func, uint64_t n_bytes);
void dccl_note_answer(void);  // the table has had its word
// A call as the program makes it; names as NCCL gives them.
struct dccl_call {
  const char *func, *datatype;
  uint64_t count;
  bool captured;  // it goes into a CUDA graph
};
uint64_t dccl_note_group(void);  // this thread begins another group of calls: its number, of 56 bits
// The call's number on its communicator, from 1 on, should its group be launched; of one that never counts,
// that of a call which the same table answers; 0: it is captured.
uint64_t dccl_note_call(struct dccl_seat* seat, const struct dccl_call* call);
void dccl_note_launch(struct dccl_seat* seat, uint64_t group_of_calls);  // its calls count
// Fills in which table answered the collective, and the size that NCCL asked about before it: its own, or of
// the group that it is part of; 0 if it did not ask, or who knows. `number`: that of its call, 0 without one.
void dccl_note_coll(struct dccl_seat* seat, struct dccl_record* coll, uint64_t number);
// Whether the communicator's call under way goes into a CUDA graph.
bool dccl_is_captured(const struct dccl_seat* seat);
void dccl_set_mask(void);
// The last of the functions that tables are made for, from FUNC_ALL_GATHER on: reduce-scatter, or all-reduce
// where the job's option says so. It is read as a communicator begins, and is the same on all ranks that
// agree.
int dccl_last_tuned(void);
void dccl_note_tuner(int version);
void dccl_note_profiler(int version);

// ---- control functions, called by the probe ----

// Opens the ring in the folder named by DYNAMICCL_RUN, once a process. 1 = there is a ring, 0 = there is
// none.
DCCL_EXPORT int dynamiccl_open(void);
// The times of records are read from *ns from now on: an emulated job has a clock of its own.
DCCL_EXPORT void dynamiccl_clock(const int64_t* ns);
// This process was started together with rank 0 of that life; the ring's reader is told.
DCCL_EXPORT void dynamiccl_started(uint64_t life);
// Makes a table message the one that holds where nothing was agreed. Its generation, or a negative errno and
// the table before stays.
DCCL_EXPORT int64_t dynamiccl_activate(const void* message, size_t size);
// Each agreement of a process has a number, by which what it stages and limits is its own; 0: there are too
// many. All ranks join at one step: from there on steps are counted.
DCCL_EXPORT uint32_t dynamiccl_join(void);
DCCL_EXPORT void dynamiccl_part(uint32_t owner);
// The same as dynamiccl_activate for a table that the switches of `owner` will name, in place of the one
// before. -ENOSPC: all buffers hold tables that may still answer; the empty table needs none.
DCCL_EXPORT int64_t dynamiccl_stage(uint32_t owner, const void* message, size_t size);

// All ranks of a communicator switch at a call. Each rank sets a limit and tells the others; the switch is at
// the largest, which nobody has passed.
enum { DCCL_MARKS = 24 };
// Whether a count is a clock: it is one, or NCCL tells of no calls (2.27).
enum { DCCL_COUNTS, DCCL_TOLD_NO_CALLS };
// `state` of a communicator: it has waited at a limit for too long, and takes no switch any more.
enum { DCCL_GAVE_UP = 1 };
struct dccl_comm_view {
  uint64_t comm_id;
  uint32_t n_ranks, n_nodes;
  uint64_t count;   // collectives so far that tables are made for, as everywhere here
  uint64_t a_step;  // collectives of a step, 0: the last steps differed
  int64_t
      offset;  // collectives at the end of the last step, less `a_step` for each step since dynamiccl_join
  uint64_t steps;  // since dynamiccl_join
  uint32_t clock, state;
  // What it will answer from its next call on: from collective `since` on the rows that stay (by their hash,
  // 0: none) but for those from `first` until `last`, at which a trial holds (rows and turns; 0: there is
  // none). The last switch is told also if its trial is over. What holds before `since` is not told.
  uint64_t stays, since, trial, first, last;
  // Hash of the first `at` of them; at = 0: none. The last 8 of each 16, of each 256 and of each 4096.
  struct {
    uint64_t at, hash;
  } marks[DCCL_MARKS];
};
// The communicators that count, in no order; how many there are, which may be more than `capacity`.
DCCL_EXPORT uint32_t dynamiccl_comms(struct dccl_comm_view* comms, uint32_t capacity);
// From now on no question on the communicator is answered once so many collectives are made: `distance` from
// now, or where its last switch is if that is farther. Returns that limit; -ENOENT: no such communicator, or
// its count is no clock, -EAGAIN: its last switches are all ahead of it, -EBUSY: another limits it.
DCCL_EXPORT int64_t dynamiccl_limit(uint32_t owner, uint64_t comm_id, uint64_t distance);
// A question is held at a limit for at most so long (without this call, for ever). Then all limits of that
// agreement are given up, and its communicators take no switch any more.
DCCL_EXPORT void dynamiccl_hold(uint32_t seconds);
// The collectives at which a table holds, from `from` on: until `until`, then again what was there to stay
// before; 0: to stay. Until then it holds throughout (`length` 0), or in one turn of each `one_of`, which are
// `length` collectives long; in the others holds what was there to stay. Everything here is decided by all.
struct dccl_span {
  uint64_t from, until, length;
  uint64_t a_step;  // collectives of a step, where a turn is so many whole steps; 0: no steps are agreed
  uint32_t one_of, swap;
};
// Whether a turn is one collective, picked out of so many (few calls); longer ones follow steps.
static inline bool dccl_is_by_calls(uint64_t length, uint64_t a_step) { return length == 1 && a_step == 0; }
// The staged table holds there. Returns 0, or a negative errno: -ENOENT as for a limit, -EINVAL: nothing is
// staged, or no such turns, -EAGAIN: a change that may still hold would be forgotten, -ETIMEDOUT: the limit
// was given up.
DCCL_EXPORT int dynamiccl_switch(uint32_t owner, uint64_t comm_id, const struct dccl_span* span);
// None of the limits of `owner` any more. `generation`: of the switches since, whose steps are told by it; 0:
// there were none.
DCCL_EXPORT void dynamiccl_lift(uint32_t owner, uint32_t generation);
DCCL_EXPORT uint32_t dynamiccl_waiting(void);  // threads at a limit
// A step has ended, as one rank sees it.
enum { DCCL_MIXED = 0xffffffff };
struct dccl_step_end {
  // Of the table that answered all its questions, but for communicators that were left out of the last
  // switch; DCCL_MIXED: there were several.
  uint32_t generation;
  uint32_t trial;  // generation of the trial in which the step began, 0: in none
  // Turns follow steps, one table has answered all in it, and each communicator in turns of agreed steps made
  // just one step's collectives.
  uint32_t is_whole;
  // Of the step that begins: which block of turns it is in, from 1 on: four turns where two tables alternate,
  // else one of each `one_of`. 0: no turns of agreed steps.
  uint32_t block;
};
// Call it once a step: steps are counted by it.
DCCL_EXPORT void dynamiccl_ended(struct dccl_step_end* end);
// A step has ended, all in one call: emits `ended`, if given, as a STEP record; later records belong to
// `next_step`; kernel times as dynamiccl_sample.
DCCL_EXPORT void dynamiccl_boundary(const struct dccl_record* ended, uint32_t next_step, int sample);
// Kernel times on (1) or off (0) for the collectives enqueued from now on.
DCCL_EXPORT void dynamiccl_sample(int on);
// What NCCL has done with us in this process: communicators on which it has initialised our tuner, questions
// that it has asked, and the versions that it speaks, tuner's << 8 | profiler's (0 = not loaded).
DCCL_EXPORT uint32_t dynamiccl_tuners(void);
DCCL_EXPORT uint64_t dynamiccl_asked(void);
DCCL_EXPORT uint32_t dynamiccl_abi(void);
// Of which sources this library was built.
DCCL_EXPORT const char* dynamiccl_build(void);
// Emits a record as it is, for benchmarks and tests.
DCCL_EXPORT void dynamiccl_emit(const struct dccl_record* record);

#endif  // DYNAMICCL_PLUGIN_H_
