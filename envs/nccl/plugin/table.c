// Tables in memory: what this process decides by. Which of them answers is a communicator's affair
// (switch.c).
//
// A table is filled while nobody refers to it. A reader that was given its number just before the last
// reference went may find it refilled: the sequence number says so, and the reader asks again which table
// holds. Every word is loaded with acquire and stored with release order (plain moves on x86), which makes
// the check sound without fences: a reader that saw a word of the new table also sees the odd sequence number
// stored before it.
#include <errno.h>
#include <string.h>

#include "plugin.h"

enum { WORDS = sizeof(struct dccl_rule) / 8 };
enum { KEY_BITS = 3 };  // a collective's number has so many; a class leaves them free, see rule_is_valid
_Static_assert(N_FUNCS <= 1 << KEY_BITS, "a collective's number");

struct buffer {
  _Atomic uint32_t sequence;  // odd while it is written
  _Atomic uint32_t n_rows;
  _Atomic uint32_t n_any;  // rows for every communicator; they come first, since their class is 0
  _Atomic uint64_t row[DCCL_MAX_ROWS][WORDS];
};

// The first is empty and stays so: NCCL decides. The rest are filled in turn: one for each communicator that
// may rest in the midst of a trial, and as many again.
static struct buffer buffers[DCCL_BUFFERS];
static _Atomic uint64_t rows_in[DCCL_BUFFERS];  // see dccl_rows_of
static _Atomic dccl_table fixed;                // where no switch of a communicator holds

static uint64_t word(const struct buffer* b, uint32_t row, int i) {
  return atomic_load_explicit(&b->row[row][i], memory_order_acquire);
}

static uint32_t head(const _Atomic uint32_t* value) {
  return atomic_load_explicit(value, memory_order_acquire);
}

// Class and collective as one number, in the order of the rows: what the first word of a row here holds.
static uint64_t key_of(uint64_t class, uint64_t func) { return class << KEY_BITS | func; }

// Whether a row begins after the message of `key` and `n_bytes`.
static bool is_after(const struct buffer* b, uint32_t row, uint64_t key, uint64_t n_bytes) {
  return ((unsigned __int128)word(b, row, 0) << 64 | word(b, row, 1)) >
         ((unsigned __int128)key << 64 | n_bytes);
}

// The row of [low, high) that holds the message, or -1. All rows there are in (class, func, min_bytes) order.
// The steps are arithmetic, not branches: a wrong guess at each would cost more than all of them.
static int64_t search(const struct buffer* b, uint32_t low, uint32_t high, uint64_t key, uint64_t n_bytes) {
  if (low == high) return -1;
  uint32_t row = low;  // the last row that is not after the message is in [row, row + left), if there is one
  for (uint32_t left = high - low; left > 1;) {
    const uint32_t half = left / 2;
    row += half & ((uint32_t)is_after(b, row + half, key, n_bytes) - 1);
    left -= half;
  }
  return word(b, row, 0) == key && word(b, row, 1) <= n_bytes && n_bytes <= word(b, row, 2) ? (int64_t)row
                                                                                            : -1;
}

int dccl_lookup(dccl_table table, uint64_t class, int func, uint64_t n_bytes,
                struct dccl_decision* decision) {
  const struct buffer* b = &buffers[dccl_buffer_of(table)];
  const uint32_t sequence = head(&b->sequence), n_rows = head(&b->n_rows), n_any = head(&b->n_any);
  if (sequence & 1 || n_rows > DCCL_MAX_ROWS || n_any > n_rows) return -1;
  int64_t row = class ? search(b, n_any, n_rows, key_of(class, (uint64_t)func), n_bytes) : -1;
  if (row < 0) row = search(b, 0, n_any, key_of(0, (uint64_t)func), n_bytes);
  const uint64_t last = row < 0 ? 0 : word(b, (uint32_t)row, 3);
  if (head(&b->sequence) != sequence) return -1;
  decision->algo = (uint8_t)(last >> 8);
  decision->proto = (uint8_t)(last >> 16);
  decision->n_channels = (uint8_t)(last >> 24);
  decision->threads = (uint16_t)(last >> 32);
  return row >= 0;
}

uint64_t dccl_epoch(dccl_table table) {
  const uint64_t buffer = dccl_buffer_of(table), fills = head(&buffers[buffer].sequence) & ((1u << 28) - 1);
  return fills << DCCL_BUFFER_BITS | buffer;
}

uint64_t dccl_rows_of(dccl_table table) { return atomic_load(&rows_in[dccl_buffer_of(table)]); }

dccl_table dccl_fixed(void) { return atomic_load_explicit(&fixed, memory_order_acquire); }

void dccl_fix(dccl_table table) { atomic_store(&fixed, table); }

// ---- messages ----

static uint32_t crc32(uint32_t crc, const void* data, size_t size) {  // as zlib has it
  crc = ~crc;
  for (const uint8_t* p = data; size--; p++) {
    crc ^= *p;
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

static struct dccl_rule rule_at(const void* rows, uint32_t i) {
  struct dccl_rule rule;  // copied: a message need not be aligned
  memcpy(&rule, (const char*)rows + (size_t)i * sizeof rule, sizeof rule);
  return rule;
}

static bool rule_is_valid(const struct dccl_rule* r) {
  const bool pair_unset = r->algo == DCCL_UNSET && r->proto == DCCL_UNSET;
  const bool is_ceiling = pair_unset && r->n_channels > 0 && (r->threads == 256 || r->threads == 512);
  return (r->threads == 0 || is_ceiling) && r->func < N_FUNCS &&
         (pair_unset || (r->algo < N_ALGOS && r->proto < N_PROTOS)) && r->n_channels <= DCCL_MAX_CHANNELS &&
         r->min_bytes <= r->max_bytes && (r->n_ranks == 0) == (r->n_nodes == 0) &&
         r->n_nodes >> (32 - KEY_BITS) == 0;
}

static bool in_order(const struct dccl_rule* a, const struct dccl_rule* b) {
  const uint64_t class = dccl_class(a->n_ranks, a->n_nodes), next = dccl_class(b->n_ranks, b->n_nodes);
  if (class != next) return class < next;
  if (a->func != b->func) return a->func < b->func;
  return a->max_bytes < b->min_bytes;
}

int dccl_check_table(const void* message, size_t size, struct dccl_table_head* h) {
  if (message == NULL || size < sizeof *h || size > SIZE_MAX / 2) return -EINVAL;
  memcpy(h, message, sizeof *h);
  if (h->magic != DCCL_TABLE_MAGIC) return -EINVAL;
  if (h->version != DCCL_TABLE_VERSION) return -EPROTONOSUPPORT;
  if (h->n_rows > DCCL_MAX_ROWS) return -E2BIG;
  if (size < sizeof *h + h->n_rows * sizeof(struct dccl_rule)) return -EMSGSIZE;
  const char* rows = (const char*)message + sizeof *h;
  struct dccl_table_head bare = *h;
  bare.crc = 0;
  if (crc32(crc32(0, &bare, sizeof bare), rows, h->n_rows * sizeof(struct dccl_rule)) != h->crc)
    return -EBADMSG;
  struct dccl_rule before = {0};
  for (uint32_t i = 0; i < h->n_rows; i++) {
    const struct dccl_rule rule = rule_at(rows, i);
    if (!rule_is_valid(&rule) || (i > 0 && !in_order(&before, &rule))) return -EDOM;
    before = rule;
  }
  return 0;
}

void dccl_fill(uint32_t buffer, const void* message, const struct dccl_table_head* h) {
  struct buffer* b = &buffers[buffer];
  const char* rows = (const char*)message + sizeof *h;
  // Already odd if a fork left the buffer half written.
  const uint32_t odd = head(&b->sequence) | 1;
  atomic_store_explicit(&b->sequence, odd, memory_order_relaxed);
  uint32_t n_any = 0;
  for (uint32_t i = 0; i < h->n_rows; i++) {
    uint64_t words[WORDS];
    memcpy(words, rows + (size_t)i * sizeof words, sizeof words);
    n_any += words[0] == 0;
    words[0] = key_of(words[0], words[3] & 0xff);
    for (int w = 0; w < WORDS; w++) atomic_store_explicit(&b->row[i][w], words[w], memory_order_release);
  }
  atomic_store_explicit(&b->n_rows, h->n_rows, memory_order_release);
  atomic_store_explicit(&b->n_any, n_any, memory_order_release);
  atomic_store_explicit(&b->sequence, odd + 1, memory_order_release);
  atomic_store(&rows_in[buffer],
               (uint64_t)h->n_rows << 32 | crc32(0, rows, h->n_rows * sizeof(struct dccl_rule)));
}
