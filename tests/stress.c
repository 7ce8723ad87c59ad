// Random jobs against the plugin: `stress JOBS SEED RUN_FOLDER [late]`. Compiled together with the plugin's
// sources, so that the sanitizers see both.
//
// A job has eight ranks, each a process with two threads that issue collectives, each on communicators of its
// own, and a third that agrees with those of the other ranks about tables: a round of limits, votes and one
// decision by compare-and-set, in shared memory. All ranks draw the calls of a communicator from the job's
// seed, and make them as some release does, with delays of their own. The first rank to make a call leaves
// its choice in shared memory, the others compare: a difference would be a hang in real life. Some jobs lose
// a process by SIGKILL. With `late` the last rank does not wait at its limit, and has to be found out.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "plugin.h"

enum { N_RANKS = 8, N_COMMS = 4, N_MADE = 2, N_CALLS = 200, N_ROUNDS = 40, MAX_ROWS = 60 };
enum { N_GROUPS = N_COMMS * N_RANKS * N_MADE, MARKS = N_CALLS / 16 };
enum { OPEN, COMMITTED, ABORTED };
#define NO_VOTE (-1)

extern const struct nccl_tuner_v3 ncclTunerPlugin_v3;
extern const struct nccl_tuner_v4 ncclTunerPlugin_v4;
extern const struct nccl_tuner_v5 ncclTunerPlugin_v5;
extern struct nccl_tuner_v6 ncclTunerPlugin_v6;
extern const struct nccl_profiler_v4 ncclProfiler_v4;
extern const struct nccl_profiler_v5 ncclProfiler_v5, ncclProfiler_v6;

// A round: what each rank says of each communicator, and what was decided.
struct round {
  _Atomic bool is_begun;
  _Atomic int64_t votes[N_GROUPS][N_RANKS];  // the limit, NO_VOTE without one
  _Atomic int n_votes;
  _Atomic int decision;
  _Atomic uint64_t from[N_GROUPS], until[N_GROUPS];  // from 0: left out
};

// What all processes of a job share: the choices made so far and what went wrong.
struct shared {
  _Atomic uint32_t choice[N_GROUPS][N_CALLS];
  _Atomic uint64_t marks[N_GROUPS][MARKS];
  struct round rounds[N_ROUNDS];
  _Atomic uint64_t n_calls, n_forced, n_switches, n_disagreements, n_outside, n_failures;
};
static struct shared* shared;
static bool late;

struct comm {
  uint64_t id;
  int group, size;
  void *tuner, *profiler;
};

struct job {
  uint64_t seed;
  int rank;             // of this process
  int tuner_version;    // 3 to 6
  bool takes_negative;  // as 2.31 on: the smallest number is chosen, whatever its sign
};

struct thread {
  const struct job* job;
  int first, last;  // its communicators
};

static uint64_t mix(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

static uint64_t draw(uint64_t* state) { return mix((*state)++); }

// ---- the script: the same on all ranks ----

// Communicator c groups ranks: 0 the world, 1 halves, 2 pairs, 3 the world again. Each group has its own id.
static int group_of(int c, int rank) { return c == 1 ? rank / 4 : c == 2 ? rank / 2 : 0; }
static int size_of(int c) { return c == 1 ? 4 : c == 2 ? 2 : N_RANKS; }
static int nodes_of(int c) { return c == 0 ? 2 : 1; }
static uint64_t comm_id(const struct job* job, int c, int rank, int made) {
  return mix(job->seed ^ (uint64_t)(c * 1000 + group_of(c, rank) * 10 + made)) | 1;
}

static size_t message_size(uint64_t* state) {
  const uint64_t r = draw(state);
  return r % 4 ? (size_t)1 << (r >> 8) % 31 : (size_t)(r >> 8) % (1u << 26) + 1;
}

// NCCL's table for a message: the same cells on all ranks, some of them not offered, at times none.
static void fill_offer(float cost[N_ALGOS][N_PROTOS], uint64_t key) {
  const bool nothing = key % 23 == 0;
  for (int a = 0; a < N_ALGOS; a++) {
    for (int p = 0; p < N_PROTOS; p++) {
      const uint64_t r = mix(key + (uint64_t)(a * N_PROTOS + p));
      cost[a][p] = nothing || r % 3 == 0 ? -1.0f : (float)(r >> 40) / 1000.0f + 1.0f;
    }
  }
}

static uint32_t zlib_crc32(uint32_t crc, const uint8_t* p, size_t n) {
  crc = ~crc;
  while (n--) {
    crc ^= *p++;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

// The table of a round: rows for all communicators and for each class of them, in the order that the plugin
// wants.
static size_t make_table(const struct job* job, int round, uint8_t* message) {
  uint64_t state = mix(job->seed + 77 * (uint64_t)round);
  static const uint32_t classes[][2] = {{0, 0}, {2, 1}, {4, 1}, {N_RANKS, 1}, {N_RANKS, 2}};
  struct dccl_rule* rows = (struct dccl_rule*)(message + sizeof(struct dccl_table_head));
  uint32_t n = 0;
  for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
    for (int func = FUNC_ALL_GATHER; func <= FUNC_REDUCE_SCATTER; func++) {
      for (uint64_t low = 0; n < MAX_ROWS && low < UINT64_C(1) << 31;) {
        const uint64_t high = low + draw(&state) % (UINT64_C(1) << 30), r = draw(&state);
        if (r % 3) {
          const bool pair = r >> 8 & 1;
          rows[n++] = (struct dccl_rule){.n_ranks = classes[i][0],
                                         .n_nodes = classes[i][1],
                                         .min_bytes = low,
                                         .max_bytes = high,
                                         .func = (uint8_t)func,
                                         .algo = pair ? (uint8_t)((r >> 16) % N_ALGOS) : DCCL_UNSET,
                                         .proto = pair ? (uint8_t)((r >> 24) % N_PROTOS) : DCCL_UNSET,
                                         .n_channels = (uint8_t)((r >> 32) % 65)};
        }
        low = high + 1;
      }
    }
  }
  struct dccl_table_head head = {.magic = DCCL_TABLE_MAGIC,
                                 .version = DCCL_TABLE_VERSION,
                                 .n_rows = n,
                                 .generation = (uint32_t)round + 1};
  const size_t size = sizeof head + n * sizeof *rows;
  memcpy(message, &head, sizeof head);
  head.crc = zlib_crc32(0, message, size);
  memcpy(message, &head, sizeof head);
  return size;
}

// ---- one call, as a release makes it ----

static int ask(const struct job* job, void* context, int func, size_t n_bytes, int n_pipe_ops,
               float cost[N_ALGOS][N_PROTOS], int reg_buff, int* n_channels) {
  float** table = (float**)(void*)cost;
  switch (job->tuner_version) {
    case 3:
      return ncclTunerPlugin_v3.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              n_channels);
    case 4:
      return ncclTunerPlugin_v4.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              reg_buff, n_channels);
    case 5:
      return ncclTunerPlugin_v5.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              reg_buff, n_channels);
    default:
      return ncclTunerPlugin_v6.get_coll_info(context, func, n_bytes, n_pipe_ops, table, N_ALGOS, N_PROTOS,
                                              reg_buff, n_channels);
  }
}

static int choose(const float cost[N_ALGOS][N_PROTOS], bool takes_negative) {
  int best = 255;
  float least = 3600000000.0f;
  for (int i = 0; i < N_ALGOS * N_PROTOS; i++) {
    const float c = cost[i / N_PROTOS][i % N_PROTOS];
    if (c != -1.0f && (takes_negative || c >= 0) && c < least) {
      least = c;
      best = i;
    }
  }
  return best;
}

static void check_call(const struct job* job, int group, int at, void* context, int func, size_t n_bytes,
                       uint64_t key, int reg_buff) {
  float offer[N_ALGOS][N_PROTOS], cost[N_ALGOS][N_PROTOS];
  fill_offer(offer, key);
  memcpy(cost, offer, sizeof cost);
  int n_channels = 0;
  if (ask(job, context, func, n_bytes, 1, cost, reg_buff, &n_channels))
    atomic_fetch_add(&shared->n_failures, 1);
  const int chosen = choose(cost, job->takes_negative);
  const bool forced = memcmp(cost, offer, sizeof cost) != 0;
  if (chosen != 255 && offer[chosen / N_PROTOS][chosen % N_PROTOS] < 0)
    atomic_fetch_add(&shared->n_outside, 1);
  for (int i = 0; i < N_ALGOS * N_PROTOS; i++) {
    const float before = offer[i / N_PROTOS][i % N_PROTOS], after = cost[i / N_PROTOS][i % N_PROTOS];
    if (after != before && (before < 0 || after < 0 || i != chosen)) atomic_fetch_add(&shared->n_outside, 1);
  }
  if (n_channels < 0 || n_channels > 64) atomic_fetch_add(&shared->n_outside, 1);
  atomic_fetch_add(&shared->n_calls, 1);
  if (forced || n_channels) atomic_fetch_add(&shared->n_forced, 1);
  const uint32_t mine = 1u << 31 | (uint32_t)chosen << 8 | (uint32_t)n_channels;
  uint32_t theirs = 0;
  if (!atomic_compare_exchange_strong(&shared->choice[group][at], &theirs, mine) && theirs != mine) {
    atomic_fetch_add(&shared->n_disagreements, 1);
  }
}

// Calls that NCCL makes beside the one that counts: probes of 2.32, the second look of 2.21, broken callers.
static void ask_aside(const struct job* job, void* context, int func, size_t n_bytes, uint64_t r) {
  float cost[N_ALGOS][N_PROTOS];
  int n_channels = 0;
  fill_offer(cost, r);
  if (r % 3 == 0) {
    for (int i = 0; i < N_ALGOS * N_PROTOS; i++) cost[i / N_PROTOS][i % N_PROTOS] = -1.0f;
  }
  ask(job, context, func, n_bytes, 0, cost, 0, &n_channels);
  if (r % 5 == 0) ask(job, context, (int)(r >> 20) - 1000, n_bytes, -7, cost, 3, NULL);
  if (r % 7 == 0) ask(job, NULL, func, n_bytes, 1, cost, 0, &n_channels);
}

static void report(const struct job* job, void* context, int rank, int func, size_t n_bytes, uint64_t seq) {
  const struct nccl_coll_event coll = {.seq = seq,
                                       .func = func == FUNC_ALL_GATHER ? "AllGather" : "ReduceScatter",
                                       .count = n_bytes,
                                       .datatype = "ncclInt8",
                                       .n_channels = 2,
                                       .algo = "RING",
                                       .proto = "LL128"};
  void *handle = NULL, *channel[2] = {NULL, NULL};
  union nccl_event_state state = {.kernel_ch_timer = 200};
  void* group = NULL;  // 2.27 tells of a collective only where its group has a handle
  if (job->tuner_version < 5) {
    struct nccl_event_v4 e = {.type = EVENT_GROUP, .rank = rank};
    ncclProfiler_v4.start_event(context, &group, &e);
    if (group == NULL) atomic_fetch_add(&shared->n_failures, 1);
    handle = group;
  }
  for (int c = -1; c < 2; c++) {
    if (job->tuner_version < 5) {
      struct nccl_event_v4 e = {.type = c < 0 ? EVENT_COLL : EVENT_KERNEL_CH, .parent = handle, .rank = rank};
      if (c < 0) e.coll = coll;
      if (c >= 0) e.kernel_ch = (struct nccl_kernel_ch_event){(uint8_t)c, 100};
      ncclProfiler_v4.start_event(context, c < 0 ? &handle : &channel[c], &e);
    } else {
      struct nccl_event_v5 e = {.type = c < 0 ? EVENT_COLL : EVENT_KERNEL_CH, .parent = handle, .rank = rank};
      if (c < 0) e.coll = coll;
      if (c >= 0) e.kernel_ch = (struct nccl_kernel_ch_event){(uint8_t)c, 100};
      ncclProfiler_v6.start_event(context, c < 0 ? &handle : &channel[c], &e);
    }
  }
  for (int c = 0; c < 2; c++) {
    ncclProfiler_v5.record_event_state(channel[c], STATE_KERNEL_CH_STOP, &state);
    ncclProfiler_v5.stop_event(channel[c]);
  }
  ncclProfiler_v5.stop_event(handle);
  if (group != NULL) ncclProfiler_v4.stop_event(group);
}

// ---- a rank ----

static int mask;  // NCCL's event mask: one a process
static _Atomic bool ended;

static struct comm make(const struct job* job, int c, int made) {
  const int size = size_of(c), nodes = nodes_of(c), rank = job->rank;
  const int group = (c * N_RANKS + group_of(c, rank)) * N_MADE + made;
  struct comm comm = {.id = comm_id(job, c, rank, made), .group = group, .size = size};
  if (job->tuner_version < 5) {
    ncclProfiler_v4.init(&comm.profiler, &mask, "stress", comm.id, nodes, size, rank % size, NULL);
    ncclTunerPlugin_v3.init((size_t)size, (size_t)nodes, NULL, &comm.tuner);
  } else {
    ncclProfiler_v5.init(&comm.profiler, comm.id, &mask, "stress", nodes, size, rank % size, NULL);
    ncclTunerPlugin_v6.init(&comm.tuner, comm.id, (size_t)size, (size_t)nodes, NULL, NULL, NULL);
  }
  return comm;
}

static void destroy(struct comm* comm) {
  ncclTunerPlugin_v5.finalize(comm->tuner);
  ncclProfiler_v5.finalize(comm->profiler);
}

// One collective, number `at` of its communicator, with what else NCCL may ask before it.
static void call(const struct job* job, const struct comm* comm, int at, uint64_t r) {
  uint64_t script = mix(job->seed ^ (uint64_t)(comm->group * N_CALLS + at));
  const int func = FUNC_ALL_GATHER + (int)(draw(&script) % 2);
  const size_t n_bytes = message_size(&script);
  if (r % 4 == 0) ask_aside(job, comm->tuner, func, n_bytes, r);
  if (r % 16 == 0) sched_yield();
  if (r % 8 == 1) usleep((useconds_t)(r >> 20) % 500);
  check_call(job, comm->group, at, comm->tuner, func, n_bytes, draw(&script), (int)(r >> 40 & 1));
  report(job, comm->profiler, job->rank, func, n_bytes, (uint64_t)at);
}

static void* issue(void* argument) {
  const struct thread* self = argument;
  const struct job* job = self->job;
  uint64_t own =
      mix(job->seed ^ (uint64_t)(job->rank * N_COMMS + self->first + 1) << 32);  // this thread's alone
  for (int made = 0; made < N_MADE; made++) {
    struct comm comms[N_COMMS];
    for (int c = self->first; c < self->last; c++) comms[c] = make(job, c, made);
    for (int at = 0; at < N_CALLS; at++) {
      for (int c = self->first; c < self->last; c++) call(job, &comms[c], at, draw(&own));
      if (self->first == 0 && at % 10 == 9) {
        dynamiccl_boundary(&(struct dccl_record){.step = (uint32_t)at}, (uint32_t)at + 1, at % 20 > 9);
        dynamiccl_ended();
      }
    }
    for (int c = self->first; c < self->last; c++) destroy(&comms[c]);
  }
  return NULL;
}

// ---- a rank's side of a round ----

static int group_named(const struct job* job, uint64_t id) {
  for (int c = 0; c < N_COMMS; c++) {
    for (int made = 0; made < N_MADE; made++) {
      if (comm_id(job, c, job->rank, made) == id)
        return (c * N_RANKS + group_of(c, job->rank)) * N_MADE + made;
    }
  }
  return -1;
}

static void check_marks(const struct dccl_comm_view* view, int group) {
  for (int m = 0; m < DCCL_MARKS; m++) {
    const uint64_t at = view->marks[m].at / 16, mine = view->marks[m].hash;
    uint64_t theirs = 0;
    if (at == 0 || at >= MARKS) continue;
    if (!atomic_compare_exchange_strong(&shared->marks[group][at], &theirs, mine) && theirs != mine)
      atomic_fetch_add(&shared->n_disagreements, 1);
  }
}

static void vote(const struct job* job, struct round* round, uint64_t* own) {
  struct dccl_comm_view views[2 * N_COMMS];
  const uint32_t n = dynamiccl_comms(views, 2 * N_COMMS);
  for (uint32_t i = 0; i < n && i < 2 * N_COMMS; i++) {
    const int group = group_named(job, views[i].comm_id);
    check_marks(&views[i], group);
    const int64_t limit = dynamiccl_limit(views[i].comm_id, 1 + draw(own) % 20);
    if (limit > 0) atomic_store(&round->votes[group][job->rank], limit);
  }
  if (late && job->rank == N_RANKS - 1) dynamiccl_lift(0);
  atomic_fetch_add(&round->n_votes, 1);
}

static void decide(struct round* round, uint64_t* own) {
  for (int group = 0; group < N_GROUPS; group++) {
    const int c = group / N_MADE / N_RANKS, first = group / N_MADE % N_RANKS * size_of(c);
    uint64_t from = 0;
    for (int r = first; r < first + size_of(c) && r < N_RANKS; r++) {
      const int64_t limit = atomic_load(&round->votes[group][r]);
      if (limit == NO_VOTE) {
        from = 0;
        break;
      }
      if ((uint64_t)limit > from) from = (uint64_t)limit;
    }
    atomic_store(&round->from[group], from);
    atomic_store(&round->until[group], draw(own) % 3 ? from + 1 + draw(own) % 30 : 0);
  }
  int open = OPEN;
  atomic_compare_exchange_strong(&round->decision, &open, COMMITTED);
}

static void act(const struct job* job, const struct round* round, int number) {
  for (int c = 0; c < N_COMMS && atomic_load(&round->decision) == COMMITTED; c++) {
    for (int made = 0; made < N_MADE; made++) {
      const int group = (c * N_RANKS + group_of(c, job->rank)) * N_MADE + made;
      const uint64_t from = atomic_load(&round->from[group]), until = atomic_load(&round->until[group]);
      if (from == 0) continue;
      // Refused where this rank has ended with the communicator: it made all its calls below the limit.
      if (dynamiccl_switch(comm_id(job, c, job->rank, made), from, until) == 0)
        atomic_fetch_add(&shared->n_switches, 1);
    }
  }
  dynamiccl_lift(atomic_load(&round->decision) == COMMITTED ? (uint32_t)number + 1 : 0);
}

static void* agree(void* argument) {
  const struct job* job = argument;
  uint64_t own = mix(job->seed ^ (uint64_t)job->rank << 40);
  for (int number = 0; number < N_ROUNDS; number++) {
    struct round* round = &shared->rounds[number];
    if (job->rank == 0) usleep((useconds_t)(draw(&own) % 1000));
    if (job->rank == 0) atomic_store(&round->is_begun, true);
    while (!atomic_load(&round->is_begun)) {
      if (atomic_load(&ended)) return NULL;
      sched_yield();
    }
    uint8_t message[sizeof(struct dccl_table_head) + MAX_ROWS * sizeof(struct dccl_rule)];
    if (dynamiccl_stage(message, make_table(job, number, message)) != number + 1)
      atomic_fetch_add(&shared->n_failures, 1);
    vote(job, round, &own);
    // Rank 0 decides with the votes that are there in time; who waits longer gives the round up.
    for (int waits = 0; atomic_load(&round->decision) == OPEN; waits++) {
      if (job->rank == 0 && (atomic_load(&round->n_votes) == N_RANKS || waits > 40)) decide(round, &own);
      int open = OPEN;
      if (waits > 400) atomic_compare_exchange_strong(&round->decision, &open, ABORTED);
      usleep(50);
    }
    act(job, round, number);
  }
  return NULL;
}

static void run_process(const struct job* job) {
  pthread_t threads[3];
  struct thread trains = {job, 0, N_COMMS - 1}, beside = {job, N_COMMS - 1, N_COMMS};
  if (pthread_create(&threads[0], NULL, issue, &trains) ||
      pthread_create(&threads[1], NULL, issue, &beside) ||
      pthread_create(&threads[2], NULL, agree, (void*)job))
    abort();
  for (int t = 0; t < 2; t++) pthread_join(threads[t], NULL);
  atomic_store(&ended, true);
  pthread_join(threads[2], NULL);
}

// 0, or the number of processes that ended otherwise than they should.
static int run_job(uint64_t seed) {
  uint64_t state = mix(seed);
  struct job job = {
      .seed = seed, .tuner_version = 3 + (int)(draw(&state) % 4), .takes_negative = draw(&state) % 2};
  const bool kills = draw(&state) % 5 == 0;
  const int victim = (int)(draw(&state) % N_RANKS);
  memset(shared->choice, 0, sizeof shared->choice);
  memset(shared->marks, 0, sizeof shared->marks);
  memset(shared->rounds, 0, sizeof shared->rounds);
  for (int i = 0; i < N_ROUNDS; i++) memset(shared->rounds[i].votes, 0xff, sizeof shared->rounds[i].votes);
  pid_t pids[N_RANKS];
  int bad = 0;
  for (int p = 0; p < N_RANKS; p++) {
    pids[p] = fork();
    if (pids[p] < 0) abort();
    if (pids[p] == 0) {
      job.rank = p;
      run_process(&job);
      exit(0);
    }
  }
  if (kills) {
    usleep((useconds_t)(draw(&state) % 10000));
    kill(pids[victim], SIGKILL);
  }
  for (int p = 0; p < N_RANKS; p++) {
    int status = 0;
    while (waitpid(pids[p], &status, 0) < 0 && errno == EINTR) {
    }
    const bool killed = kills && p == victim;
    if (status != 0 && !(killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) bad++;
  }
  return bad;
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  late = argc > 4;
  const int n_jobs = atoi(argv[1]);
  const uint64_t seed = strtoull(argv[2], NULL, 10);
  setenv("DYNAMICCL_RUN", argv[3], 1);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  int crashed = 0;
  for (int j = 0; j < n_jobs; j++) crashed += run_job(seed * 1000003 + (uint64_t)j);
  printf(
      "jobs %d\ncalls %llu\nforced %llu\nswitches %llu\ndisagreements %llu\noutside %llu\nfailures "
      "%llu\ncrashed %d\n",
      n_jobs, (unsigned long long)shared->n_calls, (unsigned long long)shared->n_forced,
      (unsigned long long)shared->n_switches, (unsigned long long)shared->n_disagreements,
      (unsigned long long)shared->n_outside, (unsigned long long)shared->n_failures, crashed);
  return crashed || shared->n_disagreements || shared->n_outside || shared->n_failures;
}
