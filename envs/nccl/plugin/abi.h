// NCCL's plugin interfaces as this library meets them: tuner v3 to v6, profiler v4 to v6.
//
// Profiler v7 (2.31 on) adds phases of a kernel, variants of symmetric kernels, and tags, none of which we
// use; the offsets of its larger events are not documented. A release that knows v7 loads our v6.
//
// Declared here from the documented layouts, without NCCL's headers, so that one build serves every release
// from 2.22 on. A wrong offset would corrupt a training job, hence the assertions under each struct (LP64).
#ifndef DYNAMICCL_ABI_H_
#define DYNAMICCL_ABI_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NCCL_SUCCESS = 0 };

// NCCL's numbers for collectives, algorithms and protocols; the same in every release served.
enum { FUNC_BROADCAST = 0, FUNC_ALL_GATHER = 2, FUNC_REDUCE_SCATTER = 3, FUNC_ALL_REDUCE = 4, N_FUNCS = 8 };
enum { ALGO_TREE = 0, ALGO_RING = 1, ALGO_NVLS = 4, ALGO_PAT = 6, N_ALGOS = 7 };
enum { PROTO_LL = 0, PROTO_LL128 = 1, PROTO_SIMPLE = 2, N_PROTOS = 3 };

// Levels and flag of the logger that NCCL hands to a plugin.
enum { LOG_WARN = 2, LOG_INFO = 3, LOG_FLAG_TUNING = 0x40 };
typedef void (*nccl_logger)(int level, unsigned long flags, const char* file, int line, const char* format,
                            ...);

// ---- tuner ----

// `cost` is typed float** by NCCL but is one block of float[n_algos][n_protos], microseconds, -1 = not
// available.
struct nccl_tuner_v3 {  // 2.22, 2.23
  const char* name;
  int (*init)(size_t n_ranks, size_t n_nodes, nccl_logger log, void** context);
  int (*get_coll_info)(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost, int n_algos,
                       int n_protos, int* n_channels);
  int (*destroy)(void* context);
};

struct nccl_tuner_v4 {  // 2.24 to 2.27
  const char* name;
  int (*init)(size_t n_ranks, size_t n_nodes, nccl_logger log, void** context);
  int (*get_coll_info)(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost, int n_algos,
                       int n_protos, int reg_buff, int* n_channels);
  int (*destroy)(void* context);
};

struct nccl_nvl_domains {  // how ranks are spread over NVLink domains
  int n_domains;
  int min_ranks;
  int max_ranks;
};

struct nccl_tuner_v5 {  // 2.28, 2.29
  const char* name;
  int (*init)(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
              struct nccl_nvl_domains* domains, void* constants);
  int (*get_coll_info)(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost, int n_algos,
                       int n_protos, int reg_buff, int* n_channels);
  int (*finalize)(void* context);
};

struct nccl_tuner_v6 {  // 2.30 on
  const char* name;
  int (*init)(void** context, uint64_t comm_id, size_t n_ranks, size_t n_nodes, nccl_logger log,
              struct nccl_nvl_domains* domains, void* constants);
  int (*get_coll_info)(void* context, int func, size_t n_bytes, int n_pipe_ops, float** cost, int n_algos,
                       int n_protos, int reg_buff, int* n_channels);
  int (*finalize)(void* context);
  int (*get_chunk_size)(void* context, int func, size_t n_bytes, int algo, int proto, int n_channels,
                        size_t* chunk_size);  // NULL: NCCL's own
};

_Static_assert(sizeof(void*) == 8, "written for 64-bit Linux");
_Static_assert(sizeof(struct nccl_tuner_v3) == 32 && sizeof(struct nccl_tuner_v4) == 32, "tuner v3, v4");
_Static_assert(sizeof(struct nccl_tuner_v5) == 32 && sizeof(struct nccl_tuner_v6) == 40, "tuner v5, v6");
_Static_assert(offsetof(struct nccl_tuner_v6, get_coll_info) == 16, "tuner v6");
_Static_assert(offsetof(struct nccl_tuner_v6, get_chunk_size) == 32, "tuner v6");
_Static_assert(sizeof(struct nccl_nvl_domains) == 12, "NVLink domains");

// ---- profiler ----

// Bits of the activation mask, and what NCCL takes for each that a job without a profiler does not need (read
// in 2.27.7, 2.28.9, 2.29.7 and 2.30.7). The pinned memory for kernels' time stamps, one block a
// communicator, is taken whether or not there is a profiler.
enum {
  // Never set by us. Told with EVENT_COLL; nothing is allocated: the event lies on the caller's stack.
  EVENT_GROUP = 1,
  // Nothing is allocated, in any release: the event lies on the caller's stack. Nothing can fail. NCCL also
  // tells
  // of groups, and from 2.28 on of calls.
  EVENT_COLL = 2,
  // Never set by us: told with EVENT_KERNEL_CH, for which NCCL takes the same memory.
  EVENT_P2P = 4,
  // 2.27 to 2.31: about 34 MiB of /dev/shm a rank and communicator at its first collective, a thread and some
  // descriptors; where one of them is not to be had the rank dies (SIGSEGV). 2.32.3: goes on without times.
  // Set
  // only where dccl_may_time_kernels says so. 2.26 and older: not loaded by us.
  EVENT_KERNEL_CH = 64,
  // 2.28 on. Never set by us: told with EVENT_COLL. Nothing is allocated: the events lie on the caller's
  // stack.
  EVENT_GROUP_API = 256,
  EVENT_COLL_API = 512,
  // 2.28 on. Nothing is allocated: the event lies on the caller's stack. Nothing can fail.
  EVENT_KERNEL_LAUNCH = 2048,
};
enum { STATE_KERNEL_CH_STOP = 22 };

struct nccl_coll_event {
  uint64_t seq;  // per communicator and collective
  const char* func;
  const void* send_buffer;
  void* recv_buffer;
  size_t count;  // all_gather: bytes of one rank (retyped to int8); reduce_scatter: elements of one rank
  int root;
  const char* datatype;
  uint8_t n_channels;
  uint8_t n_warps;
  const char* algo;
  const char* proto;
};

struct nccl_kernel_ch_event {
  uint8_t channel;
  uint64_t timer;  // GPU clock, nanoseconds
};

struct nccl_coll_api_event {  // from v5 on: the call as the program made it
  const char* func;
  size_t count;
  const char* datatype;
  int root;
  void* stream;
  bool graph_captured;
};

struct nccl_event_v4 {
  uint8_t type;
  void* parent;
  int rank;
  union {
    struct nccl_coll_event coll;
    struct nccl_kernel_ch_event kernel_ch;
  };
};

struct nccl_event_v5 {  // v6 adds event kinds, not fields
  uint64_t type;
  void* parent;
  int rank;
  union {
    struct {
      struct nccl_coll_event coll;
      void* parent_group;
    };
    struct nccl_kernel_ch_event kernel_ch;
    struct nccl_coll_api_event coll_api;
  };
};

union nccl_event_state {
  uint64_t kernel_ch_timer;
  void* other;
};

struct nccl_profiler_v4 {  // 2.27
  const char* name;
  int (*init)(void** context, int* mask, const char* comm_name, uint64_t comm_id, int n_nodes, int n_ranks,
              int rank, nccl_logger log);
  int (*start_event)(void* context, void** handle, struct nccl_event_v4* event);
  int (*stop_event)(void* handle);
  int (*record_event_state)(void* handle, int state, union nccl_event_state* args);
  int (*finalize)(void* context);
};

struct nccl_profiler_v5 {  // v5: 2.28, v6: 2.29 on
  const char* name;
  int (*init)(void** context, uint64_t comm_id, int* mask, const char* comm_name, int n_nodes, int n_ranks,
              int rank, nccl_logger log);
  int (*start_event)(void* context, void** handle, struct nccl_event_v5* event);
  int (*stop_event)(void* handle);
  int (*record_event_state)(void* handle, int state, union nccl_event_state* args);
  int (*finalize)(void* context);
};

_Static_assert(sizeof(struct nccl_profiler_v4) == 48 && sizeof(struct nccl_profiler_v5) == 48, "profiler");
_Static_assert(sizeof(struct nccl_event_v4) == 104 && sizeof(struct nccl_event_v5) == 112, "event");
_Static_assert(offsetof(struct nccl_event_v4, parent) == 8 && offsetof(struct nccl_event_v4, rank) == 16, "");
_Static_assert(offsetof(struct nccl_event_v4, coll) == 24 && offsetof(struct nccl_event_v5, coll) == 24, "");
_Static_assert(offsetof(struct nccl_event_v5, parent) == 8 && offsetof(struct nccl_event_v5, rank) == 16, "");
_Static_assert(offsetof(struct nccl_coll_event, func) == 8 && offsetof(struct nccl_coll_event, count) == 32,
               "");
_Static_assert(offsetof(struct nccl_coll_event, datatype) == 48, "coll");
_Static_assert(offsetof(struct nccl_coll_event, n_channels) == 56, "coll");
_Static_assert(offsetof(struct nccl_coll_event, algo) == 64 && offsetof(struct nccl_coll_event, proto) == 72,
               "");
_Static_assert(offsetof(struct nccl_event_v5, parent_group) == 104, "v5");
_Static_assert(offsetof(struct nccl_event_v5, kernel_ch.timer) == 32, "kernel_ch");
_Static_assert(offsetof(struct nccl_event_v5, coll_api.count) == 32, "coll_api");
_Static_assert(offsetof(struct nccl_event_v5, coll_api.graph_captured) == 64, "coll_api");
_Static_assert(sizeof(union nccl_event_state) == 8, "state");

#endif  // DYNAMICCL_ABI_H_
