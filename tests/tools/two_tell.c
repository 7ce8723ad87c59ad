// Two threads tell of many collectives on one communicator at once, as with NCCL 2.27 the caller and a thread
// of CUDA's do: `two_tell LIBRARY N` prints how many the plugin has counted, of 2 * N.
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "plugin.h"

static const struct nccl_profiler_v4* profiler;
static void* context;
static pthread_barrier_t both;
static long n;

static void* tell(void* unused) {
  struct nccl_event_v4 e = {.type = EVENT_COLL};
  e.coll = (struct nccl_coll_event){.func = "AllGather",
                                    .count = 8192,
                                    .datatype = "ncclInt8",
                                    .n_channels = 16,
                                    .algo = "RING",
                                    .proto = "SIMPLE"};
  void* handle = NULL;
  pthread_barrier_wait(&both);
  for (long i = 0; i < n; i++) profiler->start_event(context, &handle, &e);
  return unused;
}

int main(int argc, char** argv) {
  void* library = argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (library == NULL) return 2;
  n = atol(argv[2]);
  profiler = dlsym(library, "ncclProfiler_v4");
  uint32_t (*comms)(struct dccl_comm_view*, uint32_t) =
      (uint32_t (*)(struct dccl_comm_view*, uint32_t))dlsym(library, "dynamiccl_comms");
  int mask = 0;
  pthread_t threads[2];
  if (profiler == NULL || comms == NULL) return 2;
  profiler->init(&context, &mask, "told by two", 7, 1, 8, 0, NULL);
  pthread_barrier_init(&both, NULL, 2);
  for (int i = 0; i < 2; i++) {
    if (pthread_create(&threads[i], NULL, tell, NULL) != 0) return 2;
  }
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  struct dccl_comm_view view;
  if (comms(&view, 1) != 1) return 2;
  printf("%llu\n", (unsigned long long)view.count);
  return 0;
}
