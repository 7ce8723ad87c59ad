// The profiler that the user named besides us: loaded, and told of every event that it asked for.
//
// NCCL loads one profiler. The launcher puts the user's into DYNAMICCL_NEXT_PROFILER; we load it as NCCL
// would and forward each call in the version in which NCCL calls us, so that no event is translated. NCCL
// keeps one handle an event and hands it back as `parent` of others, which we cannot all know: so the handle
// that NCCL gets is the user's profiler's wherever that has one, and ours is found by it. Whatever is wrong
// with it is said once, and we go on.
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "plugin.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct nccl_profiler_v5* next;
static int next_mask;   // what it asks for; it may keep the address and change its mind
static int no_context;  // stands for a context that is NULL
static atomic_flag said = ATOMIC_FLAG_INIT;

static bool is_whole(const struct nccl_profiler_v5* p) {
  return p->init != NULL && p->start_event != NULL && p->stop_event != NULL &&
         p->record_event_state != NULL && p->finalize != NULL;
}

// Its symbol of a version; NULL if it has none, if that lacks a function, or if it is our own.
static const void* version(void* library, const char* symbol) {
  const void* found = dlsym(library, symbol);
  const bool ours = found == &ncclProfiler_v4 || found == &ncclProfiler_v5 || found == &ncclProfiler_v6;
  return found != NULL && !ours && is_whole(found) ? found
                                                   : NULL;  // all versions have the same five functions
}

static void leave_out(const char* why) {
  if (!atomic_flag_test_and_set(&said))
    fprintf(stderr, "dynamiccl: the profiler %s %s; it is left out\n", getenv("DYNAMICCL_NEXT_PROFILER"),
            why);
}

void* dccl_open_library(const char* name, const char* pattern) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  char full[PATH_MAX];
  if (library != NULL || snprintf(full, sizeof full, pattern, name) >= PATH_MAX) return library;
  return dlopen(full, RTLD_NOW | RTLD_LOCAL);
}

static void load(void) {
  const char* name = getenv("DYNAMICCL_NEXT_PROFILER");
  if (name == NULL || *name == 0) return;
  void* library = dccl_open_library(name, "libnccl-profiler-%s.so");
  if (library == NULL) {
    leave_out("cannot be loaded");
    return;
  }
  next = version(library, "ncclProfiler_v6");  // v6 has further kinds of events and the layout of v5
  if (next == NULL) next = version(library, "ncclProfiler_v5");
  if (next == NULL) leave_out("has no whole interface of version 5 or 6");
}

void* dccl_next_init(int version, const char* name, uint64_t comm_id, int n_nodes, int n_ranks, int rank,
                     nccl_logger log) {
  pthread_once(&once, load);
  if (next == NULL) return NULL;
  if (version < 5) {
    leave_out("is told of nothing by NCCL 2.27 beside ours");
    return NULL;
  }
  void* context = NULL;
  if (next->init(&context, comm_id, &next_mask, name, n_nodes, n_ranks, rank, log) == NCCL_SUCCESS)
    return context != NULL ? context : &no_context;
  leave_out("refuses a communicator");
  return NULL;
}

int dccl_next_mask(void) { return __atomic_load_n(&next_mask, __ATOMIC_RELAXED); }

static void* their(void* context) { return context == &no_context ? NULL : context; }

void* dccl_next_start(void* context, struct nccl_event_v5* event) {
  if (context == NULL || !(event->type & (uint64_t)(unsigned)dccl_next_mask())) return NULL;
  struct nccl_event_v5 copy = *event;
  if (dccl_is_ours(copy.parent)) copy.parent = NULL;  // of an event that it did not ask for
  void* handle = NULL;
  return next->start_event(their(context), &handle, &copy) == NCCL_SUCCESS ? handle : NULL;
}

void dccl_next_stop(void* handle) {
  if (next != NULL) next->stop_event(handle);
}

void dccl_next_state(void* handle, int state, union nccl_event_state* args) {
  if (next != NULL) next->record_event_state(handle, state, args);
}

void dccl_next_finalize(void* context) {
  if (context != NULL) next->finalize(their(context));
}
