// The tuner that the job has without us: loaded as NCCL would load it, and asked before our table has its
// word.
//
// NCCL loads one tuner. The launcher puts the user's into DYNAMICCL_NEXT_TUNER; where it has none, NCCL
// itself would look for libnccl-tuner.so and then into the net plugin (those of AWS and Google hold a tuner).
// It is called in the newest version that it has and NCCL speaks. Whatever is wrong with it is said once, and
// it is left out: so a tuner that fails must do so on all ranks, as it must decide alike on all of them.
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "plugin.h"

enum { OLDEST = 3, NEWEST = 6 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const void* found[NEWEST + 1];  // its interface of each version, or NULL
static bool has_any;
static _Atomic int called;  // the version in which NCCL calls us; set before anything is loaded
static char source[PATH_MAX];
static atomic_flag said = ATOMIC_FLAG_INIT, said_of_chunks = ATOMIC_FLAG_INIT;

static void leave_out(const char* why) {
  if (!atomic_flag_test_and_set(&said))
    fprintf(stderr, "dynamiccl: the tuner %s %s; it is left out\n", source, why);
}

// All versions begin with a name, an init, a question and an end.
static bool is_usable(const struct nccl_tuner_v5* t) {
  const bool ours = t != NULL && t->name != NULL && strcmp(t->name, "dynamiccl") == 0;
  return t != NULL && !ours && t->init != NULL && t->get_coll_info != NULL && t->finalize != NULL;
}

static bool take_from(void* library) {
  for (int v = OLDEST; v <= NEWEST; v++) {
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclTunerPlugin_v%d", v);
    const void* t = dlsym(library, symbol);
    if (is_usable(t)) found[v] = t;
    has_any |= found[v] != NULL;
  }
  return has_any;
}

// By path or name as NCCL takes it, else completed by `pattern`; NULL if there is none.
static void* open_named(const char* name, const char* pattern) {
  snprintf(source, sizeof source, "%s", name);
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  char full[PATH_MAX];
  if (library != NULL || snprintf(full, sizeof full, pattern, name) >= PATH_MAX) return library;
  return dlopen(full, RTLD_NOW | RTLD_LOCAL);
}

static bool is_none(const char* name) { return strcasecmp(name, "none") == 0; }

// A list that is there and empty names no plugin.
static bool take_from_net(void) {
  const char* names = getenv("NCCL_NET_PLUGIN");
  char list[PATH_MAX];
  snprintf(list, sizeof list, "%s", names != NULL ? names : "libnccl-net.so");
  char* rest = NULL;
  for (char* name = strtok_r(list, ",", &rest); name != NULL; name = strtok_r(NULL, ",", &rest)) {
    if (is_none(name)) continue;
    void* library = open_named(name, "libnccl-net-%s.so");
    if (library != NULL && take_from(library)) return true;
    if (library != NULL) dlclose(library);
  }
  return false;
}

static void load(void) {
  const char* name = getenv("DYNAMICCL_NEXT_TUNER");
  const bool named = name != NULL && *name, none = named && is_none(name);
  // Before 2.28, which brought version 5, this was no word of NCCL's: it looked into the net plugin then too.
  if (none && called >= 5) return;
  void* library = open_named(named ? name : "libnccl-tuner.so", "libnccl-tuner-%s.so");
  if (library != NULL && take_from(library)) return;
  if (library != NULL) {
    if (named) leave_out("has no whole interface of version 3 to 6");
    dlclose(library);
    return;  // NCCL would look no further either
  }
  if (!take_from_net() && named && !none) {
    snprintf(source, sizeof source, "%s", name);
    leave_out("cannot be loaded");
  }
}

void dccl_next_tuner_init(struct dccl_next_tuner* next, const struct dccl_tuner_init* a) {
  called = a->version;
  pthread_once(&once, load);
  *next = (struct dccl_next_tuner){0};
  int v = a->version;
  while (v >= OLDEST && found[v] == NULL) v--;
  if (v < OLDEST) {
    if (has_any) leave_out("has no version that this NCCL calls");
    return;
  }
  int error;
  if (v <= 4) {
    error = ((const struct nccl_tuner_v4*)found[v])->init(a->n_ranks, a->n_nodes, a->log, &next->context);
  } else {
    error = ((const struct nccl_tuner_v5*)found[v])
                ->init(&next->context, a->comm_id, a->n_ranks, a->n_nodes, a->log, a->domains, a->constants);
  }
  if (error == NCCL_SUCCESS)
    next->version = v;
  else
    leave_out("refuses a communicator");
  if (v == 6 && ((const struct nccl_tuner_v6*)found[6])->get_chunk_size != NULL &&
      !atomic_flag_test_and_set(&said_of_chunks))
    fprintf(stderr, "dynamiccl: the tuner %s is not asked for sizes of chunks: these stay NCCL's\n", source);
}

bool dccl_next_tuner_ask(const struct dccl_next_tuner* next, const struct dccl_question* q) {
  const void* t = found[next->version];
  int error;
  if (next->version == 3) {
    error = ((const struct nccl_tuner_v3*)t)
                ->get_coll_info(next->context, q->func, q->n_bytes, q->n_pipe_ops, (float**)q->cost,
                                q->n_algos, q->n_protos, q->n_channels);
  } else {
    error = ((const struct nccl_tuner_v4*)t)
                ->get_coll_info(next->context, q->func, q->n_bytes, q->n_pipe_ops, (float**)q->cost,
                                q->n_algos, q->n_protos, q->reg_buff, q->n_channels);
  }
  if (error != NCCL_SUCCESS) leave_out("fails on a collective");
  return error == NCCL_SUCCESS;
}

void dccl_next_tuner_finalize(const struct dccl_next_tuner* next) {
  if (next->version) ((const struct nccl_tuner_v4*)found[next->version])->destroy(next->context);
}
