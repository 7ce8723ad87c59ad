// What NCCL waits for in each collective: `path_speed RUN_FOLDER LIBRARY...` times the tuner's answer under a
// table of 64 rows, and the profiler's note, in builds of the plugin, round by round in turn. A note is all
// that NCCL 2.29 tells of one collective: its group, its call, its launch and itself. Between call and launch
// NCCL asks, or the group would not count: that answer is not in the note's time. Prints a line a build:
// nanoseconds of an answer and of a note, medians of the rounds. With `ROUNDS` in the environment so many
// rounds.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plugin.h"

enum { N_ROWS = 64, N_SIZES = 16, N_CALLS = 20000, N_ROUNDS = 61, MOST = 4 };

struct build {
  const struct nccl_tuner_v5* tuner;
  const struct nccl_profiler_v5* profiler;
  void *context, *told;
  int mask;
  double answer[N_ROUNDS], note[N_ROUNDS];
};

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static uint32_t crc_of(const uint8_t* p, size_t n) {
  uint32_t crc = ~0u;
  while (n--) {
    crc ^= *p++;
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

// A row for each 64 KiB, so that each message has its own.
static size_t make_table(uint32_t version, uint8_t* message) {
  struct dccl_table_head head = {
      .magic = DCCL_TABLE_MAGIC, .version = version, .n_rows = N_ROWS, .generation = 1};
  struct dccl_rule rows[N_ROWS];
  for (uint64_t i = 0; i < N_ROWS; i++)
    rows[i] = (struct dccl_rule){8, 1, i << 16, (i << 16) + 65535, FUNC_ALL_GATHER, ALGO_RING, 2, 16, 0};
  memcpy(message, &head, sizeof head);
  memcpy(message + sizeof head, rows, sizeof rows);
  head.crc = crc_of(message, sizeof head + sizeof rows);
  memcpy(message, &head, sizeof head);
  return sizeof head + sizeof rows;
}

static int begin(void* change, uint32_t version, uint32_t owner) {
  static const struct dccl_span to_stay;
  if (version >= 5) return ((int (*)(uint32_t, uint64_t, const struct dccl_span*))change)(owner, 7, &to_stay);
  return ((int (*)(uint32_t, uint64_t, uint64_t, uint64_t))change)(owner, 7, 0, 0);
}

static void load(struct build* b, const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(2);
  }
  b->tuner = dlsym(library, "ncclTunerPlugin_v5");
  b->profiler = dlsym(library, "ncclProfiler_v6");
  void* change = dlsym(library, "dynamiccl_switch");
  uint32_t (*join)(void) = (uint32_t (*)(void))dlsym(library, "dynamiccl_join");  // not in earlier builds
  void* stage = dlsym(library, "dynamiccl_stage");
  b->profiler->init(&b->told, 7, &b->mask, "timed", 1, 8, 0, NULL);
  b->tuner->init(&b->context, 7, 8, 1, NULL, NULL, NULL);
  uint8_t message[sizeof(struct dccl_table_head) + N_ROWS * sizeof(struct dccl_rule)];
  for (uint32_t version = 2; version <= DCCL_TABLE_VERSION; version++) {
    const size_t size = make_table(version, message);
    if (join != NULL) {
      const uint32_t owner = join();
      if (((int64_t (*)(uint32_t, const void*, size_t))stage)(owner, message, size) == 1 &&
          begin(change, version, owner) == 0)
        return;
    } else if (((int64_t (*)(const void*, size_t))stage)(message, size) == 1 &&
               ((int (*)(uint64_t, uint64_t, uint64_t))change)(7, 0, 0) == 0) {
      return;
    }
  }
  fprintf(stderr, "%s: refuses the table\n", path);
  exit(2);
}

// One question, of a build or of none.
static void ask(const struct build* b, int i, double* forced) {
  static const float offer[N_ALGOS][N_PROTOS] = {{-1, -1, -1}, {30, 20, 10}, {-1, -1, -1}, {-1, -1, -1},
                                                 {-1, -1, 40}, {-1, -1, -1}, {-1, -1, 50}};
  float cost[N_ALGOS][N_PROTOS];
  int n_channels = 24;
  memcpy(cost, offer, sizeof cost);
  __asm__ volatile("" : : "r"(cost) : "memory");
  if (b != NULL)
    b->tuner->get_coll_info(b->context, FUNC_ALL_GATHER, (size_t)(4 * (i % N_SIZES)) << 16, 1,
                            (float**)(void*)cost, N_ALGOS, N_PROTOS, 0, &n_channels);
  *forced += n_channels == 16;
}

static double time_answers(const struct build* b, double* forced) {
  const double began = now_ns();
  for (int i = 0; i < N_CALLS; i++) ask(b, i, forced);
  return (now_ns() - began) / N_CALLS;
}

static void tell(const struct build* b, struct nccl_event_v5* e, void** handle) {
  *handle = NULL;
  b->profiler->start_event(b->told, handle, e);
  if (*handle != NULL) b->profiler->stop_event(*handle);
}

static double time_notes(const struct build* b, double* forced) {
  struct nccl_event_v5 group = {.type = EVENT_GROUP_API}, call = {.type = EVENT_COLL_API};
  struct nccl_event_v5 launch = {.type = EVENT_KERNEL_LAUNCH}, e = {.type = EVENT_COLL};
  call.coll_api = (struct nccl_coll_api_event){.func = "AllGather", .count = 2048, .datatype = "ncclFloat32"};
  e.coll = (struct nccl_coll_event){.func = "AllGather",
                                    .count = 8192,
                                    .datatype = "ncclInt8",
                                    .n_channels = 16,
                                    .algo = "RING",
                                    .proto = "SIMPLE"};
  const bool tells_launches = b->mask & EVENT_KERNEL_LAUNCH;
  const double began = now_ns();
  for (int i = 0; i < N_CALLS; i++) {
    void* handle = NULL;
    tell(b, &group, &launch.parent);
    tell(b, &call, &e.parent);
    ask(b, i, forced);
    if (tells_launches) tell(b, &launch, &handle);
    tell(b, &e, &handle);
  }
  return (now_ns() - began) / N_CALLS;
}

static int ascending(const void* a, const void* b) {
  return (*(const double*)a > *(const double*)b) - (*(const double*)a < *(const double*)b);
}

static double median(double* values, int n_rounds) {
  qsort(values, (size_t)n_rounds, sizeof *values, ascending);
  return values[n_rounds / 2];
}

int main(int argc, char** argv) {
  struct build builds[MOST];
  const int n = argc - 2;
  if (n < 1 || n > MOST) return 2;
  setenv("DYNAMICCL_RUN", argv[1], 1);
  for (int i = 0; i < n; i++) load(&builds[i], argv[2 + i]);
  const char* rounds = getenv("ROUNDS");
  const int n_rounds =
      rounds != NULL && atoi(rounds) > 0 && atoi(rounds) < N_ROUNDS ? atoi(rounds) : N_ROUNDS;
  double forced = 0;
  for (int round = 0; round < n_rounds; round++) {
    const double loop = time_answers(NULL, &forced);
    for (int i = 0; i < n; i++) {
      const double asked = time_answers(&builds[i], &forced);
      builds[i].answer[round] = asked - loop;
      builds[i].note[round] = time_notes(&builds[i], &forced) - asked;
    }
  }
  if (forced != 2.0 * n * n_rounds * N_CALLS) return 1;  // each answer was the table's
  for (int i = 0; i < n; i++)
    printf("%.1f %.1f\n", median(builds[i].answer, n_rounds), median(builds[i].note, n_rounds));
  return 0;
}
