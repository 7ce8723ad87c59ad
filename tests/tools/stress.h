// What the two halves of the stress test share: stress.c runs jobs, stress_calls.c makes their calls.
#ifndef DYNAMICCL_STRESS_H_
#define DYNAMICCL_STRESS_H_

#include "plugin.h"

enum { N_RANKS = 8, N_COMMS = 4, N_MADE = 2, N_CALLS = 240, N_ROUNDS = 40, MAX_ROWS = 60 };
enum { N_GROUPS = N_COMMS * N_RANKS * N_MADE, MARKS = 2 * N_CALLS / 16 };

extern const struct nccl_tuner_v3 ncclTunerPlugin_v3;
extern const struct nccl_tuner_v4 ncclTunerPlugin_v4;
extern const struct nccl_tuner_v5 ncclTunerPlugin_v5;
extern const struct nccl_tuner_v6 ncclTunerPlugin_v6;
extern const struct nccl_profiler_v4 ncclProfiler_v4;
extern const struct nccl_profiler_v5 ncclProfiler_v5, ncclProfiler_v6;

// A round: what each rank says of each communicator, and what was decided.
struct round {
  _Atomic bool is_begun;
  _Atomic int64_t votes[N_GROUPS][N_RANKS];  // the limit, NO_VOTE without one
  _Atomic int n_votes;
  _Atomic int decision;
  struct dccl_span span[N_GROUPS];  // from 0: left out; written before `decision` is
};

// What all processes of a job share: the choices made so far and what went wrong.
struct shared {
  _Atomic uint32_t choice[N_GROUPS][2 * N_CALLS];  // two for each number: of a group
  _Atomic uint64_t marks[N_GROUPS][MARKS];
  struct round rounds[N_ROUNDS];
  _Atomic uint64_t n_calls, n_forced, n_switches, n_disagreements, n_outside, n_failures;
};
extern struct shared* shared;

struct comm {
  uint64_t id;
  int group, size, n_nodes;
  void *tuner, *profiler;
};

struct job {
  uint64_t seed;
  int rank;             // of this process
  int tuner_version;    // 3 to 6
  bool takes_negative;  // as 2.31 on: the smallest number is chosen, whatever its sign
  bool tells_late;      // of what goes over the network, from another thread, as each rank decides by itself
};

uint64_t mix(uint64_t x);
uint64_t draw(uint64_t* state);
// Communicator c groups ranks: 0 the world, 1 halves, 2 pairs, 3 the world again. Each group has its own id.
int group_of(int c, int rank);
int size_of(int c);
uint64_t comm_id(const struct job* job, int c, int rank, int made);
// The table of a round: rows for all communicators and for each class of them, in the order that the plugin
// wants. Its size.
size_t make_table(const struct job* job, int round, uint8_t* message);
struct comm make(const struct job* job, int c, int made);
void destroy(struct comm* comm);
// The thread that tells late: begun once a process, ended when all is told. A communicator is destroyed only
// then.
void begin_host_stream(const struct job* job);
void end_host_stream(void);
void catch_up(void);
// What the program calls as number `at` on the communicator, with what else NCCL may ask before it: one call,
// or a group of two. Some are all-reduces, which no clock counts.
void call(const struct job* job, const struct comm* comm, int at, uint64_t r);

#endif  // DYNAMICCL_STRESS_H_
