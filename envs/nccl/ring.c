// The ring: one file a process, written by whatever thread has something to say, read by the daemon.
//
// A producer takes a position, claims its slot, fills it and stamps it. It never waits: the reader finds out
// by the stamps what it missed. Claiming makes a record whole even if a thread sleeps for a full lap of the
// ring.
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "plugin.h"

static struct dccl_ring* _Atomic ring;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool opened, has_run;
static _Atomic uint32_t step_now;

int64_t dccl_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void dccl_emit(const struct dccl_record* record) {
  struct dccl_ring* r = atomic_load_explicit(&ring, memory_order_acquire);
  if (r == NULL) return;
  const uint64_t position = atomic_fetch_add_explicit(&r->head, 1, memory_order_acq_rel);
  struct dccl_slot* slot = &r->slots[position & (DCCL_RING_RECORDS - 1)];
  uint64_t stamp = atomic_load_explicit(&slot->word[0], memory_order_relaxed);
  // Another thread is still in this slot from a lap ago, or has overtaken us by one: the record is lost.
  if (stamp > position ||
      !atomic_compare_exchange_strong_explicit(&slot->word[0], &stamp, DCCL_RING_BUSY, memory_order_acq_rel,
                                               memory_order_relaxed)) {
    return;
  }
  uint64_t words[16];
  memcpy(words, record, sizeof words);
  // Release, so that no word can be seen before the BUSY stamp.
  for (int i = 1; i < 16; i++) atomic_store_explicit(&slot->word[i], words[i], memory_order_release);
  atomic_store_explicit(&slot->word[0], position + 1, memory_order_release);
  const struct dccl_slot* soon = &r->slots[(position + 4) & (DCCL_RING_RECORDS - 1)];
  __builtin_prefetch(&soon->word[0], 1);
  __builtin_prefetch(&soon->word[8], 1);
}

bool dccl_ring_is_open(void) { return atomic_load_explicit(&ring, memory_order_relaxed) != NULL; }

uint32_t dccl_step_now(void) { return atomic_load_explicit(&step_now, memory_order_relaxed); }

// A folder that others may write to could have its files swapped: it is not used.
static int open_folder(const char* path) {
  const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat s;
  if (folder < 0) return -1;
  if (fstat(folder, &s) == 0 && s.st_uid == geteuid() && (s.st_mode & (S_IWGRP | S_IWOTH)) == 0)
    return folder;
  close(folder);
  return -1;
}

// The file is made whole under another name first: the reader never meets a ring without its header.
static struct dccl_ring* create_ring(int folder) {
  const size_t size = sizeof(struct dccl_ring) + DCCL_RING_RECORDS * sizeof(struct dccl_slot);
  char name[32], draft[32];
  snprintf(name, sizeof name, "ring-%d", (int)getpid());
  snprintf(draft, sizeof draft, ".ring-%d", (int)getpid());
  unlinkat(folder, draft, 0);
  const int fd = openat(folder, draft, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return NULL;
  // Reserved now: a full shared-memory file system must say so here and not by a signal at the first write.
  void* map = posix_fallocate(fd, 0, (off_t)size)
                  ? MAP_FAILED
                  : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (map != MAP_FAILED) {
    struct dccl_ring* r = map;
    r->magic = DCCL_RING_MAGIC;
    r->version = DCCL_RING_VERSION;
    r->record_bytes = sizeof(struct dccl_record);
    r->capacity = DCCL_RING_RECORDS;
    r->pid = (uint32_t)getpid();
    if (renameat(folder, draft, folder, name) == 0) return r;
    munmap(map, size);
  }
  unlinkat(folder, draft, 0);
  return NULL;
}

// The child of a fork must not write into its parent's ring. It gets one of its own if it becomes a rank.
static void after_fork(void) {
  atomic_store(&ring, NULL);
  atomic_store(&opened, false);
  pthread_mutex_init(&opening, NULL);
  dccl_table_after_fork();
  dccl_comms_after_fork();
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

bool dccl_has_run(void) { return atomic_load(&has_run); }

// Whoever comes second waits for the first: its records must find the ring.
int dynamiccl_open(void) {
  if (!atomic_load(&opened)) {
    pthread_mutex_lock(&opening);
    if (!atomic_load(&opened)) {
      const char* path = getenv("DYNAMICCL_RUN");
      atomic_store(&has_run, path != NULL && *path);
      const int folder = dccl_has_run() ? open_folder(path) : -1;
      if (folder >= 0) {
        atomic_store_explicit(&ring, create_ring(folder), memory_order_release);
        close(folder);
      }
      dccl_load_static_table();
      atomic_store(&opened, true);
    }
    pthread_mutex_unlock(&opening);
  }
  return dccl_ring_is_open();
}

int64_t dynamiccl_boundary(const struct dccl_record* ended, uint32_t next_step, int sample, int flip) {
  if (ended != NULL) {
    struct dccl_record record = *ended;
    record.kind = DCCL_STEP;
    record.generation = dccl_generation();
    dccl_emit(&record);
  }
  atomic_store_explicit(&step_now, next_step, memory_order_relaxed);
  dynamiccl_sample(sample);
  const int64_t flipped = flip ? dynamiccl_flip() : 0;
  return flipped < 0 ? flipped : dccl_generation();
}

void dynamiccl_emit(const struct dccl_record* record) {
  if (record != NULL) dccl_emit(record);
}
