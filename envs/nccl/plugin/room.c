// Whether NCCL finds the room that kernel times need. It takes for granted that it does, and crashes where
// not.
//
// Below 2.32 the first collective of a communicator with the bit EVENT_KERNEL_CH makes NCCL open the memory
// of its proxy, which a job on one node does without otherwise: about 34 MiB of /dev/shm a rank, a thread and
// some descriptors. Where any of that fails, the failure is dropped and the collective goes on without that
// memory: SIGSEGV. Read in 2.27.7, 2.28.9, 2.29.7 and 2.30.7 (ncclProfilerNeedsProxy drops the status of
// proxyProfilerConnect, SaveProxyProfiler then appends to a pool at address 0); reported with a cure as
// NVIDIA/nccl#2326; 2.31 was not read and counts as the others; 2.32.3 was seen to go on without kernel
// times.
//
// The room is the job's: its loaders and NCCL's later communicators need it too. At least half of what is
// free stays so.
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include "plugin.h"

enum { POOL_BYTES = 34 << 20, FIRST_RELEASE_WITHOUT_CRASH = 23200, POOL_FILES = 32, MOST_RANKS_HERE = 1024 };

// Communicators that live and have run no collective with kernel times: for these NCCL has not opened its
// memory. Room that was there for one of them may be gone when it runs the first.
static _Atomic uint64_t waiting;
static _Atomic uint64_t local_ranks = 1;  // the most on a node of any communicator
static _Atomic int release;               // of NCCL, as its own number: 22907 for 2.29.7; 0: not known

// The release of the library that this address lies in.
static int release_of(const void* inside) {
  Dl_info info;
  if (inside == NULL || dladdr(inside, &info) == 0 || info.dli_fname == NULL) return 0;
  void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (library == NULL) return 0;
  int (*version)(int*) = (int (*)(int*))dlsym(library, "ncclGetVersion");
  int found = 0;
  if (version == NULL || version(&found) != NCCL_SUCCESS) found = 0;
  dlclose(library);
  return found;
}

static uint64_t ranks_here(uint32_t n_ranks, uint32_t n_nodes) {
  const uint64_t here = n_nodes > 0 ? (n_ranks + n_nodes - 1) / n_nodes : n_ranks;
  const char* told = getenv("LOCAL_WORLD_SIZE");  // more where a communicator is of one rank a node
  const unsigned long all = told != NULL ? strtoul(told, NULL, 10) : 0;
  return all > here && all < MOST_RANKS_HERE ? all : here;
}

void dccl_announce(uint32_t n_ranks, uint32_t n_nodes, const void* inside_nccl) {
  const uint64_t here = ranks_here(n_ranks, n_nodes);
  if (atomic_load(&release) == 0) atomic_store(&release, release_of(inside_nccl));
  uint64_t most = atomic_load(&local_ranks);
  while (here > most && !atomic_compare_exchange_weak(&local_ranks, &most, here)) {
  }
  atomic_fetch_add(&waiting, 1);
}

void dccl_needs_no_room(void) { atomic_fetch_sub(&waiting, 1); }

static bool leaves_half(uint64_t needed, uint64_t most, uint64_t in_use) {
  return in_use < most && needed <= (most - in_use) / 2;
}

static uint64_t free_shared_memory(void) {
  struct statvfs status;
  if (statvfs("/dev/shm", &status) != 0) return 0;
  return (uint64_t)status.f_bavail * status.f_frsize;
}

static bool has_files(void) {
  struct rlimit limit;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == NULL || getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    if (folder != NULL) closedir(folder);
    return false;
  }
  rlim_t in_use = 0;
  while (readdir(folder) != NULL) in_use++;
  closedir(folder);
  return leaves_half(POOL_FILES, limit.rlim_cur, in_use);
}

// UINT64_MAX: without a limit, or not known.
static uint64_t number_of(const char* path) {
  FILE* file = fopen(path, "re");
  unsigned long long number = 0;
  const bool is_number = file != NULL && fscanf(file, "%llu", &number) == 1;
  if (file != NULL) fclose(file);
  return is_number ? number : UINT64_MAX;
}

// Whether the container may have so many threads more, by the kernel's count of those that it has. To make
// some and see would take them from the job for that moment.
static bool has_threads(uint64_t needed) {
  static const char* const files[][2] = {
      {"/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids.current"},
      {"/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/pids/pids.current"}};
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    const uint64_t most = number_of(files[i][0]);
    if (most == UINT64_MAX) continue;
    const uint64_t now = number_of(files[i][1]);
    if (now != UINT64_MAX && !leaves_half(needed, most, now)) return false;
  }
  return true;
}

bool dccl_may_time_kernels(void) {
  if (atomic_load(&waiting) == 0 || atomic_load(&release) >= FIRST_RELEASE_WITHOUT_CRASH) return true;
  const char* cluster = getenv("DYNAMICCL_CLUSTER");
  if (cluster != NULL && *cluster) return true;  // emulated: no NCCL is here
  const uint64_t needed = atomic_load(&waiting) * atomic_load(&local_ranks);
  return leaves_half(needed * POOL_BYTES, free_shared_memory(), 0) && has_files() && has_threads(needed);
}
