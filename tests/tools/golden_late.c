// A tuner plugin for a positive control of golden_nccl.py: it stands between NCCL (2.28, 2.29: tuner v5) and
// the plugin in GOLDEN_TUNER, and gives of each message the answer to the question before. So one rank is
// late by one call whenever the table changes. It may run on one rank only, to show that this is caught.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

enum { MOST = 64, CELLS = 64 };

struct answer {
  int func, n_channels;
  size_t n_bytes;
  float cost[CELLS];
};

static const struct nccl_tuner_v5* inner;
static struct answer last[MOST];
static int n_last;

static int init(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
                struct nccl_nvl_domains* domains, void* constants) {
  const char* path = getenv("GOLDEN_TUNER");
  void* library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  inner = library != NULL ? dlsym(library, "ncclTunerPlugin_v5") : NULL;
  if (inner == NULL) {
    fprintf(stderr, "golden_late: no tuner v5 in GOLDEN_TUNER=%s\n", path != NULL ? path : "");
    abort();
  }
  return inner->init(context, comm_id, n_ranks, n_nodes, log, domains, constants);
}

static struct answer* answer_of(int func, size_t n_bytes) {
  for (int i = 0; i < n_last; i++)
    if (last[i].func == func && last[i].n_bytes == n_bytes) return &last[i];
  return NULL;
}

static int get_coll_info(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost, int n_algos,
                         int n_protos, int reg_buff, int* n_channels) {
  const int error =
      inner->get_coll_info(context, func, n_bytes, n_pipe_ops, cost, n_algos, n_protos, reg_buff, n_channels);
  const size_t size = (size_t)(n_algos * n_protos) * sizeof(float);
  if (size > sizeof last[0].cost) return error;
  struct answer now = {.func = func, .n_channels = *n_channels, .n_bytes = n_bytes};
  memcpy(now.cost, cost, size);
  struct answer* before = answer_of(func, n_bytes);
  if (before != NULL) {
    *n_channels = before->n_channels;
    memcpy(cost, before->cost, size);
    *before = now;
  } else if (n_last < MOST) {
    last[n_last++] = now;
  }
  return error;
}

static int finalize(void* context) { return inner->finalize(context); }

__attribute__((visibility("default")))
const struct nccl_tuner_v5 ncclTunerPlugin_v5 = {"golden_late", init, get_coll_info, finalize};
