// What the probe calls that takes several parts of the plugin: a run is opened, tables are laid ready and
// switched to, communicators are told.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "seat.h"

enum { MAX_MESSAGE = sizeof(struct dccl_table_head) + sizeof(struct dccl_rule) * DCCL_MAX_ROWS };
enum { AGREEMENTS = 8 };
// What the agreements of this process have laid ready, by their numbers less 1; guarded by `writing`.
static struct {
  bool is_taken, has_table;
  dccl_table next;
} stages[AGREEMENTS];
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER, writing = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool opened, has_run;

// In the child of a fork the thread that was opening or writing is gone.
static void after_fork(void) {
  atomic_store(&opened, false);
  pthread_mutex_init(&opening, NULL);
  pthread_mutex_init(&writing, NULL);
  memset(stages, 0, sizeof stages);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

// ---- tables ----

static bool is_free(uint32_t buffer) {
  if (buffer == dccl_buffer_of(dccl_fixed())) return false;
  for (int i = 0; i < AGREEMENTS; i++) {
    if (stages[i].has_table && dccl_buffer_of(stages[i].next) == buffer) return false;
  }
  return !dccl_table_is_used(buffer);
}

// Fills a buffer that nobody refers to; 0 or -ENOSPC. Holding `writing`.
static int keep(const void* message, const struct dccl_table_head* h, dccl_table* table) {
  uint32_t buffer = h->n_rows == 0 ? 0 : 1;
  while (buffer != 0 && buffer < DCCL_BUFFERS && !is_free(buffer)) buffer++;
  if (buffer == DCCL_BUFFERS) return -ENOSPC;
  if (buffer != 0) dccl_fill(buffer, message, h);
  *table = (dccl_table)h->generation << 32 | buffer;
  return 0;
}

int64_t dynamiccl_activate(const void* message, size_t size) {
  struct dccl_table_head h;
  dccl_table table;
  int error = dccl_check_table(message, size, &h);
  if (error) return error;
  pthread_mutex_lock(&writing);
  error = keep(message, &h, &table);
  if (!error) dccl_fix(table);
  pthread_mutex_unlock(&writing);
  return error ? error : (int64_t)h.generation;
}

int64_t dynamiccl_stage(uint32_t owner, const void* message, size_t size) {
  struct dccl_table_head h;
  dccl_table table;
  if (owner < 1 || owner > AGREEMENTS) return -EINVAL;
  int error = dccl_check_table(message, size, &h);
  if (error) return error;
  pthread_mutex_lock(&writing);
  stages[owner - 1].has_table = false;
  error = keep(message, &h, &table);
  if (!error) {
    stages[owner - 1].next = table;
    stages[owner - 1].has_table = true;
  }
  pthread_mutex_unlock(&writing);
  return error ? error : (int64_t)h.generation;
}

// The table that the next switches of an agreement are to; false: none.
static bool staged_by(uint32_t owner, dccl_table* table) {
  if (owner < 1 || owner > AGREEMENTS) return false;
  pthread_mutex_lock(&writing);
  const bool is_there = stages[owner - 1].has_table;
  *table = stages[owner - 1].next;
  pthread_mutex_unlock(&writing);
  return is_there;
}

int dynamiccl_switch(uint32_t owner, uint64_t comm_id, const struct dccl_span* span) {
  dccl_table staged;
  if (span->length != 0 && (span->one_of == 0 || span->until == 0)) return -EINVAL;
  if (!staged_by(owner, &staged)) return -EINVAL;
  pthread_mutex_lock(&dccl_seating);
  struct dccl_seat* seat = dccl_counting(comm_id);
  const bool is_there = seat != NULL;
  const bool is_late = is_there && seat->limit_owner == NOBODY;
  const int error = is_late ? -ETIMEDOUT : is_there ? dccl_change(seat, staged, span) : -ENOENT;
  pthread_mutex_unlock(&dccl_seating);
  return error;
}

uint32_t dynamiccl_join(void) {
  uint32_t owner = 0;
  pthread_mutex_lock(&writing);
  for (uint32_t i = 0; i < AGREEMENTS && owner == 0; i++) {
    if (stages[i].is_taken) continue;
    stages[i].is_taken = true;
    owner = i + 1;
  }
  pthread_mutex_unlock(&writing);
  dccl_begin_steps();
  return owner;
}

void dynamiccl_part(uint32_t owner) {
  if (owner < 1 || owner > AGREEMENTS) return;
  dynamiccl_lift(owner, 0);
  pthread_mutex_lock(&writing);
  stages[owner - 1].is_taken = stages[owner - 1].has_table = false;
  pthread_mutex_unlock(&writing);
}

// ---- a run, or a table without a daemon ----

static ssize_t read_hex(const char* text, uint8_t* message) {
  const size_t length = strlen(text);
  if (length % 2 || length / 2 > MAX_MESSAGE) return -1;
  for (size_t i = 0; i < length / 2; i++) {
    if (sscanf(text + 2 * i, "%2hhx", &message[i]) != 1)
      return -1;  // what else it takes the checksum refuses
  }
  return (ssize_t)(length / 2);
}

// DYNAMICCL_TABLE is `hex:<the message>`: it travels with the environment, so that every rank that loads the
// plugin at all has the same table. It is loaded once.
static void load_static_table(void) {
  static atomic_flag loaded = ATOMIC_FLAG_INIT;
  const char *source = getenv("DYNAMICCL_TABLE"), *run = getenv("DYNAMICCL_RUN");
  if (source == NULL || *source == 0 || (run != NULL && *run)) return;
  if (atomic_flag_test_and_set(&loaded)) return;
  uint8_t* message = malloc(MAX_MESSAGE);
  if (message == NULL) return;
  const ssize_t size = strncmp(source, "hex:", 4) ? -1 : read_hex(source + 4, message);
  const int64_t generation = size < 0 ? -ENOENT : dynamiccl_activate(message, (size_t)size);
  free(message);
  if (generation < 0) {
    fprintf(stderr, "dynamiccl: DYNAMICCL_TABLE is not a usable table (%s); NCCL decides alone\n",
            strerror((int)-generation));
  }
}

bool dccl_has_run(void) { return atomic_load(&has_run); }

// Whoever comes second waits for the first: its records must find the ring.
int dynamiccl_open(void) {
  if (!atomic_load(&opened)) {
    pthread_mutex_lock(&opening);
    if (!atomic_load(&opened)) {
      const char* path = getenv("DYNAMICCL_RUN");
      atomic_store(&has_run, path != NULL && *path);
      if (dccl_has_run()) dccl_open_ring(path);
      load_static_table();
      atomic_store(&opened, true);
    }
    pthread_mutex_unlock(&opening);
  }
  return dccl_ring_is_open();
}

// ---- communicators ----

uint32_t dynamiccl_comms(struct dccl_comm_view* comms, uint32_t capacity) {
  uint32_t n = 0;
  pthread_mutex_lock(&dccl_seating);
  for (int i = 0; i < SEATS; i++) {
    struct dccl_seat* seat = &dccl_seats[i];
    if (seat->comm_id == 0 || seat->n_users == 0) continue;
    if (atomic_load(&seat->told) == DCCL_TOLD_NOTHING) continue;
    if (n < capacity) {
      struct dccl_comm_view* view = &comms[n];
      *view = (struct dccl_comm_view){.comm_id = seat->comm_id,
                                      .n_ranks = seat->n_ranks,
                                      .n_nodes = seat->n_nodes,
                                      .count = dccl_get(&seat->n_colls),
                                      .clock = dccl_clock_of(seat)};
      dccl_copy_marks(seat, view);
      dccl_copy_rhythm(seat, view);
      dccl_copy_plan(seat, view);
    }
    n++;
  }
  pthread_mutex_unlock(&dccl_seating);
  return n;
}
