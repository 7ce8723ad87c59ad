// The ring: one file a process, written by whatever thread has something to say, read by the daemon.
//
// A producer takes a position, claims its slot, fills it and stamps it. It never waits: the reader finds out
// by the stamps what it missed. Claiming makes a record whole even if a thread sleeps for a full lap of the
// ring.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "plugin.h"

enum { RESERVE_TRIES = 100 };

static struct dccl_ring* _Atomic ring;
static uint64_t lap_mask;   // records of the ring less one; set before `ring` is
static int ring_file = -1;  // kept open: its lock says that this process lives
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint32_t step_now;

static const int64_t* _Atomic borrowed_clock;

void dynamiccl_clock(const int64_t* ns) { atomic_store(&borrowed_clock, ns); }

int64_t dccl_now_ns(void) {
  const int64_t* clock = atomic_load_explicit(&borrowed_clock, memory_order_relaxed);
  if (clock) return *clock;
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// The ring proper begins after what is known.
static struct dccl_slot* slots_of(struct dccl_ring* r) { return r->slots + DCCL_KNOWN_RECORDS; }

void dccl_emit(const struct dccl_record* record) {
  struct dccl_ring* r = atomic_load_explicit(&ring, memory_order_acquire);
  if (r == NULL) return;
  const uint64_t position = atomic_fetch_add_explicit(&r->head, 1, memory_order_acq_rel);
  struct dccl_slot* slot = &slots_of(r)[position & lap_mask];
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
  const struct dccl_slot* soon = &slots_of(r)[(position + 4) & lap_mask];
  __builtin_prefetch(&soon->word[0], 1);
  __builtin_prefetch(&soon->word[8], 1);
}

// Communicators and offers, beside the ring: told once, and to be found by a daemon that comes late. Offers
// leave some places to what must be known: communicators, and that one has registered buffers. Where all
// places are taken, those of communicators that are no more are used again.

static _Atomic uint64_t n_alive;  // known records of communicators that are there
static bool is_dead[DCCL_KNOWN_RECORDS];

static bool is_same(const struct dccl_record* a, const struct dccl_record* b) {
  return a->kind == b->kind && a->comm_id == b->comm_id && a->func == b->func && a->n_bytes == b->n_bytes &&
         a->flags == b->flags && (a->kind != DCCL_COMM || a->comm.rank == b->comm.rank);
}

static const struct dccl_record* known_at(const struct dccl_ring* r, uint64_t i) {
  return (const struct dccl_record*)&r->slots[i];
}

static void set_alive(uint64_t i, bool alive) {
  is_dead[i] = !alive;
  atomic_fetch_add_explicit(&n_alive, alive ? 1 : UINT64_MAX, memory_order_relaxed);
}

// Where the record is, or shall lie; DCCL_KNOWN_RECORDS: there is no place.
static uint64_t place_of(const struct dccl_ring* r, const struct dccl_record* record, uint64_t n) {
  uint64_t place = n;
  for (uint64_t i = 0; i < n; i++) {
    if (is_same(known_at(r, i), record)) return i;
    if (is_dead[i] && n == DCCL_KNOWN_RECORDS && place == n) place = i;
  }
  return place;
}

void dccl_note(const struct dccl_record* record, bool must) {
  struct dccl_ring* r = atomic_load_explicit(&ring, memory_order_acquire);
  if (r == NULL) return;
  dccl_emit(record);
  const uint64_t room = DCCL_KNOWN_RECORDS - (must ? 0 : DCCL_KNOWN_RECORDS / 8);
  if (atomic_load_explicit(&n_alive, memory_order_relaxed) >= room) return;
  pthread_mutex_lock(&noting);
  const uint64_t n = atomic_load_explicit(&r->known, memory_order_relaxed), place = place_of(r, record, n);
  const bool is_there = place < n && is_same(known_at(r, place), record);
  const bool has_room = atomic_load_explicit(&n_alive, memory_order_relaxed) < room;
  if (is_there && is_dead[place]) set_alive(place, true);
  if (!is_there && has_room && place < DCCL_KNOWN_RECORDS) {
    uint64_t words[16];
    memcpy(words, record, sizeof words);
    words[0] = place + 1;
    struct dccl_slot* slot = &r->slots[place];
    // Without its kind (in word 1) a record says nothing: a reader never sees the halves of two.
    atomic_store_explicit(&slot->word[1], 0, memory_order_release);
    for (int i = 0; i < 16; i++) {
      if (i != 1) atomic_store_explicit(&slot->word[i], words[i], memory_order_release);
    }
    atomic_store_explicit(&slot->word[1], words[1], memory_order_release);
    set_alive(place, true);
    if (place == n) atomic_store_explicit(&r->known, n + 1, memory_order_release);
  }
  pthread_mutex_unlock(&noting);
}

void dccl_forget(uint64_t comm_id) {
  struct dccl_ring* r = atomic_load_explicit(&ring, memory_order_acquire);
  if (r == NULL) return;
  pthread_mutex_lock(&noting);
  const uint64_t n = atomic_load_explicit(&r->known, memory_order_relaxed);
  for (uint64_t i = 0; i < n; i++) {
    if (known_at(r, i)->comm_id == comm_id && !is_dead[i]) set_alive(i, false);
  }
  pthread_mutex_unlock(&noting);
}

struct dccl_ring* dccl_counts(void) {
  static struct dccl_ring nowhere;
  struct dccl_ring* r = atomic_load_explicit(&ring, memory_order_relaxed);
  return r != NULL ? r : &nowhere;
}

bool dccl_ring_is_open(void) { return atomic_load_explicit(&ring, memory_order_relaxed) != NULL; }

uint32_t dccl_step_now(void) { return atomic_load_explicit(&step_now, memory_order_relaxed); }

void dccl_set_step(uint32_t step) { atomic_store_explicit(&step_now, step, memory_order_relaxed); }

// A folder that others may write to could have its files swapped: it is not used. Where there is none the run
// is over, and nothing is said.
static int open_folder(const char* path) {
  const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat s;
  const char* why = "it is another user's, or others may write to it";
  if (folder < 0) {
    if (errno == ENOENT) return -1;
    why = strerror(errno);
  } else {
    if (fstat(folder, &s) == 0 && s.st_uid == geteuid() && (s.st_mode & (S_IWGRP | S_IWOTH)) == 0)
      return folder;
    close(folder);
  }
  fprintf(stderr, "dynamiccl: no ring in %s: %s\n", path, why);
  return -1;
}

// ---- making the ring ----

static uint64_t number_in(const char* const* names, uint64_t otherwise) {
  for (; *names != NULL; names++) {
    const char* text = getenv(*names);
    char* end = NULL;
    const unsigned long long number = text != NULL ? strtoull(text, &end, 10) : 0;
    if (text != NULL && end != text && *end == 0) return number;
  }
  return otherwise;
}

// Records that fit: all rings of the node together take at most an eighth of what the file system has free,
// which NCCL's own buffers and data loaders need too. 0: not even the least ring fits.
static uint64_t records_for(int folder, uint64_t* free_bytes) {
  static const char* const ranks[] = {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                                      "SLURM_NTASKS_PER_NODE", NULL};
  struct statvfs fs;
  if (fstatvfs(folder, &fs)) return 0;
  *free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
  const uint64_t n_ranks = number_in(ranks, 8), share = *free_bytes / 8 / (n_ranks ? n_ranks : 1);
  uint64_t records = DCCL_RING_RECORDS;
  while (records >= DCCL_RING_LEAST && dccl_ring_bytes(records) > share) records /= 2;
  return records >= DCCL_RING_LEAST ? records : 0;
}

// Where there is no ring, a file of its name says why, if there can be one: the daemon shows it.
static void leave_word(int folder, const char* name, const char* text) {
  fprintf(stderr, "dynamiccl: %s\n", text);
  const int fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return;
  if (dprintf(fd, "DCCLNONE%s\n", text) < 0) unlinkat(folder, name, 0);
  close(fd);
}

// In a shared-memory file system a signal ends posix_fallocate, which then begins anew: a profiler's timer
// might end it each time. Returns 0, or the error.
static int reserve(int fd, size_t size) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = EINTR;  // that of a debugger, say, cannot be held back
  for (int i = 0; i < RESERVE_TRIES && error == EINTR; i++) error = posix_fallocate(fd, 0, (off_t)size);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

// What the probe has announced; of a process without one, or that was forked behind Python's back, a number
// of its own.
static uint64_t own_life(void) {
  const char* text = getenv("DYNAMICCL_LIFE");
  char* end = NULL;
  if (text != NULL && strtoull(text, &end, 10) == (unsigned long long)getpid() && *end == ':') {
    const unsigned long long announced = strtoull(end + 1, &end, 10);
    if (*end == 0 && announced != 0) return announced;
  }
  uint64_t drawn = 0;
  if (getrandom(&drawn, sizeof drawn, GRND_NONBLOCK) == (ssize_t)sizeof drawn && drawn != 0) return drawn;
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec << 32 ^ (uint64_t)t.tv_nsec << 16 ^ (uint64_t)getpid();
}

// The file is made whole under another name first: the reader never meets a ring without header and lock.
// Its name is the rank and the moment: processes of two containers may have one id.
static struct dccl_ring* create_ring(int folder) {
  static const char* const ranks[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", NULL};
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  char name[64], draft[64], text[160];
  const uint64_t rank = number_in(ranks, (uint64_t)getpid());
  snprintf(draft, sizeof draft, ".ring-%llu-%llx%08lx", (unsigned long long)rank,
           (unsigned long long)t.tv_sec, (unsigned long)t.tv_nsec);
  snprintf(name, sizeof name, "%s", draft + 1);
  uint64_t room = 0;
  const uint64_t records = records_for(folder, &room);
  const double mb = (double)room / 1e6;
  if (records == 0) {
    snprintf(text, sizeof text, "%.0f MB of shared memory are free: too little for a ring of this rank", mb);
    leave_word(folder, name, text);
    return NULL;
  }
  const size_t size = dccl_ring_bytes(records);
  const int fd = openat(folder, draft, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  int error = fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 ? errno : 0;
  // Reserved now: a full shared-memory file system must say so here and not by a signal at the first write.
  if (error == 0) error = reserve(fd, size);
  void* map = error == 0 ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  // A child must not hold the lock on when its parent is gone; see after_fork for the file itself.
  if (error == 0 && (map == MAP_FAILED || madvise(map, size, MADV_DONTFORK) != 0)) error = errno;
  if (error == 0) {
    struct dccl_ring* r = map;
    r->magic = DCCL_RING_MAGIC;
    r->version = DCCL_RING_VERSION;
    r->record_bytes = sizeof(struct dccl_record);
    r->capacity = records;
    r->pid = (uint32_t)getpid();
    r->n_known = DCCL_KNOWN_RECORDS;
    r->life = own_life();
    if (renameat(folder, draft, folder, name) == 0) {
      if (records < DCCL_RING_RECORDS && rank == 0)
        fprintf(stderr,
                "dynamiccl: %.0f MB of shared memory are free: rings of %llu records in place of %d\n", mb,
                (unsigned long long)records, DCCL_RING_RECORDS);
      lap_mask = records - 1;
      ring_file = fd;
      return r;
    }
    error = errno;
  }
  if (map != MAP_FAILED) munmap(map, size);
  if (fd >= 0) {
    unlinkat(folder, draft, 0);
    close(fd);
  }
  snprintf(text, sizeof text, "the ring of this rank could not be made: %s", strerror(error));
  leave_word(folder, name, text);
  return NULL;
}

// The child of a fork must not write into its parent's ring. It gets one of its own if it becomes a rank.
static void after_fork(void) {
  atomic_store(&ring, NULL);
  if (ring_file >= 0) close(ring_file);
  ring_file = -1;
  pthread_mutex_init(&noting, NULL);
  atomic_store(&n_alive, 0);
  memset(is_dead, 0, sizeof is_dead);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

void dccl_open_ring(const char* path) {
  const int folder = open_folder(path);
  if (folder < 0) return;
  atomic_store_explicit(&ring, create_ring(folder), memory_order_release);
  close(folder);
}

void dccl_close_ring(bool is_used) {
  struct dccl_ring* r = atomic_exchange(&ring, NULL);
  if (r == NULL || is_used) return;
  munmap(r, dccl_ring_bytes(r->capacity));
  close(ring_file);
}

void dynamiccl_started(uint64_t life) { atomic_store(&dccl_counts()->start, life); }

void dynamiccl_emit(const struct dccl_record* record) {
  if (record != NULL) dccl_emit(record);
}
