// Times what the plugin costs a job, as NCCL would call it: `bench LIBRARY TABLE...`, with DYNAMICCL_RUN set.
//
// In rounds, each of which takes every measurement in turn: a neighbour's load comes and goes within a
// second. One line a measurement: its name, then nanoseconds per call of one batch each.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plugin.h"

enum { BATCH = 128, BATCHES = 100, ROUNDS = 40, N_QUERIES = 1024 };

static const struct nccl_tuner_v6* tuner;
static const struct nccl_profiler_v5* profiler;
static void (*emit)(const struct dccl_record*);
static void *tuner_context, *profiler_context;

// What a step asks for: both collectives in 32 sizes, in no order.
static struct {
  int func;
  size_t n_bytes;
} query[N_QUERIES];

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void ask(int i) {
  float cost[N_ALGOS][N_PROTOS];
  for (int a = 0; a < N_ALGOS; a++) {
    for (int p = 0; p < N_PROTOS; p++) cost[a][p] = a == 1 ? 10.0f + (float)p : -1.0f;
  }
  int n_channels = 0;
  tuner->get_coll_info(tuner_context, query[i % N_QUERIES].func, query[i % N_QUERIES].n_bytes, 1,
                       (float**)cost, N_ALGOS, N_PROTOS, 0, &n_channels);
}

static void ask_nobody(int i) {  // the cost of ask() itself
  float cost[N_ALGOS][N_PROTOS];
  for (int a = 0; a < N_ALGOS; a++) {
    for (int p = 0; p < N_PROTOS; p++) cost[a][p] = a == 1 ? 10.0f + (float)p : -1.0f;
  }
  const size_t n_bytes = query[i % N_QUERIES].n_bytes;
  __asm__ volatile("" : : "r"(cost), "r"(n_bytes) : "memory");
}

static void write_record(int i) {
  struct dccl_record record = {.kind = DCCL_COLL, .n_bytes = (uint64_t)i};
  emit(&record);
}

static void start_and_stop(int i) {
  struct nccl_event_v5 event = {.type = EVENT_COLL};
  event.coll.seq = (uint64_t)i;
  event.coll.func = "ReduceScatter";
  event.coll.count = 1 << 20;
  event.coll.datatype = "ncclBfloat16";
  event.coll.n_channels = 16;
  event.coll.algo = "RING";
  event.coll.proto = "SIMPLE";
  void* handle = NULL;
  profiler->start_event(profiler_context, &handle, &event);
  profiler->stop_event(handle);
}

static void look_at_clock(int i) {
  (void)i;
  (void)now_ns();
}

static void measure(const char* name, void (*call)(int)) {
  printf("%s", name);
  for (int batch = -BATCHES; batch < BATCHES; batch++) {  // the first half warms the caches up
    const int64_t start = now_ns();
    for (int i = 0; i < BATCH; i++) call(batch * BATCH + i + BATCHES * BATCH);
    const int64_t end = now_ns();
    if (batch >= 0) printf(" %.2f", (double)(end - start) / BATCH);
  }
  printf("\n");
}

static void activate(const char* path, int64_t (*activate_message)(const void*, size_t)) {
  static char message[64 + 32 * DCCL_MAX_ROWS];
  FILE* file = fopen(path, "rb");
  const size_t size = file ? fread(message, 1, sizeof message, file) : 0;
  if (file) fclose(file);
  if (activate_message(message, size) < 0) {
    fprintf(stderr, "%s is no table\n", path);
    exit(1);
  }
}

int main(int argc, char** argv) {
  void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (library == NULL) return 1;
  tuner = dlsym(library, "ncclTunerPlugin_v6");
  profiler = dlsym(library, "ncclProfiler_v6");
  *(void**)&emit = dlsym(library, "dynamiccl_emit");
  int64_t (*activate_message)(const void*, size_t);
  *(void**)&activate_message = dlsym(library, "dynamiccl_activate");
  static int mask;
  profiler->init(&profiler_context, 7, &mask, "bench", 1, 8, 0, NULL);
  tuner->init(&tuner_context, 7, 8, 1, NULL, NULL, NULL);
  srand(1);
  for (int i = 0; i < N_QUERIES; i++) {
    query[i].func = rand() % 2 ? FUNC_ALL_GATHER : FUNC_REDUCE_SCATTER;
    query[i].n_bytes = (size_t)1 << rand() % 32;
  }
  for (int round = 0; round < ROUNDS; round++) {
    measure("clock", look_at_clock);
    measure("nothing", ask_nobody);
    for (int t = 2; t < argc; t++) {
      activate(argv[t], activate_message);
      char name[64];
      snprintf(name, sizeof name, "getCollInfo/%d", t - 2);
      measure(name, ask);
    }
    measure("ring", write_record);
    measure("event", start_and_stop);
  }
  return 0;
}
