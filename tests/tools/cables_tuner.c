// A tuner plugin for NCCL 2.24 to 2.29 that answers from tables which the job itself loads: for
// cables_nccl.py.
//
// The job calls `cables_row` and `cables_use` through the same loaded library. NCCL asks on the thread that
// issues the collective, so a table that every rank selects before the same call holds for the same calls on
// every rank.
#include <stddef.h>

enum { TABLES = 64, ROWS = 64, RING = 1, NOT_OFFERED = -1 };
struct row {
  int func;            // 2 all_gather, 3 reduce_scatter
  size_t first, last;  // bytes of the whole buffer, both inclusive
  int proto;           // 0 LL, 1 LL128, 2 Simple; -1 leaves it to NCCL
  int channels;        // 0 leaves it to NCCL
};
static struct row rows[TABLES][ROWS];
static int used[TABLES];
static int current = -1;
static int offered;  // whether NCCL offered what the last row asked for

int cables_row(int table, int func, size_t first, size_t last, int proto, int channels) {
  if (table < 0 || table >= TABLES || used[table] >= ROWS) return 1;
  rows[table][used[table]++] = (struct row){func, first, last, proto, channels};
  return 0;
}
void cables_clear(int table) { used[table] = 0; }
void cables_use(int table) { current = table; }
int cables_offered(void) { return offered; }

static int init(size_t n_ranks, size_t n_nodes, void* log, void** context) {
  (void)n_ranks, (void)n_nodes, (void)log;
  *context = NULL;
  return 0;
}
static int get(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost, int n_algos,
               int n_protos, int reg_buff, int* n_channels) {
  (void)context, (void)n_pipe_ops, (void)n_algos, (void)reg_buff;
  if (current < 0) return 0;
  for (int k = 0; k < used[current]; k++) {
    const struct row* row = &rows[current][k];
    if (row->func != func || n_bytes < row->first || n_bytes > row->last) continue;
    if (row->proto >= 0) {
      float* cell = (float*)cost + RING * n_protos + row->proto;
      offered = *cell != NOT_OFFERED;
      *cell = 0;
    }
    if (row->channels > 0) *n_channels = row->channels;
    return 0;
  }
  return 0;
}
static int destroy(void* context) {
  (void)context;
  return 0;
}
struct {
  const char* name;
  int (*init)(size_t, size_t, void*, void**);
  int (*get)(void*, int, size_t, int, float**, int, int, int, int*);
  int (*destroy)(void*);
} ncclTunerPlugin_v4 = {"cables", init, get, destroy};
