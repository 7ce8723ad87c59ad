// Random jobs against the plugin: `stress JOBS SEED RUN_FOLDER [MODE]`. Compiled together with the plugin's
// sources, so that the sanitizers see both.
//
// A job has eight ranks, each a process with two threads that issue collectives, each on communicators of its
// own, and a third that agrees with those of the other ranks about tables: a round of limits, votes and one
// decision by compare-and-set, in shared memory. All ranks draw the calls of a communicator from the job's
// seed, and make them as some release does, with delays of their own. The first rank to make a call leaves
// its choice in shared memory, the others compare: a difference would be a hang in real life. Some jobs lose
// a process by SIGKILL. In mode 1 collectives that go over the network are told later, by another thread, as
// each rank decides at random. In mode 2 the last rank does not wait at its limit, and has
// to be found out.
#include "stress.h"

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

enum { OPEN, COMMITTED, ABORTED };
#define NO_VOTE (-1)
enum { OWNER = 1 };

struct shared* shared;
enum { AT_ONCE, TELLS_LATE, PASSES_LIMITS };
static int mode;

struct thread {
  const struct job* job;
  int first, last;  // its communicators
};

// ---- a rank ----

static _Atomic bool ended;

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
        struct dccl_step_end end;
        dynamiccl_ended(&end);
      }
    }
    catch_up();
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
    const int64_t limit = dynamiccl_limit(OWNER, views[i].comm_id, 1 + draw(own) % 20);
    if (limit > 0) atomic_store(&round->votes[group][job->rank], limit);
  }
  if (mode == PASSES_LIMITS && job->rank == N_RANKS - 1) dynamiccl_lift(OWNER, 0);
  atomic_fetch_add(&round->n_votes, 1);
}

// To stay, a trial throughout, at few calls, in turns of steps, or in long turns.
static struct dccl_span draw_span(uint64_t from, uint64_t* own) {
  struct dccl_span span = {.from = from};
  if (draw(own) % 3 == 0) return span;
  span.until = from + 1 + draw(own) % 30;
  const uint64_t kind = draw(own) % 4;
  if (kind == 0) return span;
  span.a_step = kind == 2 ? 1 + draw(own) % 6 : 0;
  span.length = kind == 1 ? 1 : kind == 2 ? span.a_step * (1 + draw(own) % 2) : 2 + draw(own) % 9;
  span.one_of = draw(own) % 2 ? 2 : 1 + (uint32_t)(draw(own) % 9);
  span.swap = (uint32_t)(draw(own) % 2);
  return span;
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
    round->span[group] = draw_span(from, own);
  }
  int open = OPEN;
  atomic_compare_exchange_strong(&round->decision, &open, COMMITTED);
}

static void act(const struct job* job, const struct round* round, int number) {
  for (int c = 0; c < N_COMMS && atomic_load(&round->decision) == COMMITTED; c++) {
    for (int made = 0; made < N_MADE; made++) {
      const int group = (c * N_RANKS + group_of(c, job->rank)) * N_MADE + made;
      const struct dccl_span span = round->span[group];
      if (span.from == 0) continue;
      // Refused where this rank has ended with the communicator: it made all its calls below the limit.
      if (dynamiccl_switch(OWNER, comm_id(job, c, job->rank, made), &span) == 0)
        atomic_fetch_add(&shared->n_switches, 1);
    }
  }
  dynamiccl_lift(OWNER, atomic_load(&round->decision) == COMMITTED ? (uint32_t)number + 1 : 0);
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
    if (dynamiccl_stage(OWNER, message, make_table(job, number, message)) != number + 1)
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
  begin_host_stream(job);
  pthread_t threads[3];
  struct thread trains = {job, 0, N_COMMS - 1}, beside = {job, N_COMMS - 1, N_COMMS};
  if (pthread_create(&threads[0], NULL, issue, &trains) ||
      pthread_create(&threads[1], NULL, issue, &beside) ||
      pthread_create(&threads[2], NULL, agree, (void*)job))
    abort();
  for (int t = 0; t < 2; t++) pthread_join(threads[t], NULL);
  atomic_store(&ended, true);
  pthread_join(threads[2], NULL);
  end_host_stream();
}

// 0, or the number of processes that ended otherwise than they should.
static int run_job(uint64_t seed) {
  uint64_t state = mix(seed);
  struct job job = {
      .seed = seed, .tuner_version = 3 + (int)(draw(&state) % 4), .takes_negative = draw(&state) % 2};
  job.tells_late = mode == TELLS_LATE;
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
  mode = argc > 4 ? atoi(argv[4]) : AT_ONCE;
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
