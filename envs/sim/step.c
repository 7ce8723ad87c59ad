/* The time of training steps, event by event; step.py says what the arguments mean and checks them.
 *
 * A step is a list of operations on in-order streams. An operation starts when the one before it on its
 * stream and everything it waits for have ended. What runs side by side slows each other by the law of the
 * job.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAX_STREAMS 16

#define N_PORTS 4

typedef struct {
  double us, slow, near, far, crowd, channels, port;
} call_t;

typedef struct {
  double crowd, power, saturation, drag, budget, squeeze, serial, port, knee, steep;
} law_t;

typedef struct {
  int32_t n_ops, n_streams;
  const int32_t *stream, *slot; /* slot: of the job's calls, -1 = compute */
  const double* work;           /* us of compute, or the part of a full call */
  const int32_t *after_at, *after;
} step_t;

static double run(const step_t* w, const call_t* calls, double scale, const law_t* law, double* slot_us,
                  double* exposed, double* begin, double* end, double* bare, uint8_t* done, int32_t* next) {
  int32_t head[MAX_STREAMS];
  double left[MAX_STREAMS], pace[MAX_STREAMS], since[MAX_STREAMS], alone[MAX_STREAMS];
  uint8_t running[MAX_STREAMS] = {0};
  double now = 0.0;
  int32_t n_done = 0, last[MAX_STREAMS];

  memset(done, 0, (size_t)w->n_ops);
  for (int s = 0; s < MAX_STREAMS; s++) head[s] = last[s] = -1;
  for (int32_t i = 0; i < w->n_ops; i++) { /* chain the operations of each stream */
    int s = w->stream[i];
    next[i] = -1;
    if (last[s] < 0)
      head[s] = i;
    else
      next[last[s]] = i;
    last[s] = i;
  }
  while (n_done < w->n_ops) {
    int moved = 1, n_coll = 0, n_comp = 0;
    while (moved) { /* an operation of no duration ends at once and may let others begin */
      moved = 0;
      for (int s = 0; s < w->n_streams; s++) {
        int32_t i = head[s];
        if (i < 0) continue;
        if (!running[s]) {
          int ready = 1;
          for (int32_t k = w->after_at[i]; k < w->after_at[i + 1] && ready; k++) ready = done[w->after[k]];
          if (!ready) continue;
          running[s] = 1;
          since[s] = now;
          alone[s] = 0.0;
          left[s] = w->slot[i] < 0 ? w->work[i] * scale : w->work[i] * calls[w->slot[i]].us;
        }
        if (left[s] <= 0.0) {
          running[s] = 0;
          done[i] = 1;
          n_done++;
          moved = 1;
          head[s] = next[i];
          if (begin) begin[i] = since[s], end[i] = now, bare[i] = alone[s];
          if (w->slot[i] >= 0) {
            slot_us[w->slot[i]] += now - since[s];
            exposed[w->slot[i]] += alone[s];
          }
        }
      }
    }
    if (n_done == w->n_ops) break;
    double slow = 0.0, near = 0.0, far = 0.0, crowd = 0.0, channels = 0.0;
    int on_port[N_PORTS] = {0}, only = -1; /* only: the call that runs where kernels serialise */
    for (int s = 0; s < w->n_streams; s++) {
      if (!running[s]) continue;
      int32_t k = w->slot[head[s]];
      if (k < 0) {
        n_comp++;
        continue;
      }
      n_coll++;
      slow += calls[k].slow;
      near += calls[k].near;
      far += calls[k].far;
      crowd += calls[k].crowd;
      channels += calls[k].channels;
      on_port[(int)calls[k].port]++;
      if (only < 0 || since[s] < since[only]) only = s;
    }
    if (n_coll + n_comp == 0) return -1.0; /* they wait for each other */
    if (n_coll > 1 && law->serial > 0.0 && channels > law->serial) {
      const call_t* c = &calls[w->slot[head[only]]];
      slow = c->slow, near = c->near, far = c->far, crowd = c->crowd, channels = c->channels;
      memset(on_port, 0, sizeof on_port);
      n_coll = 1;
    } else {
      only = -1;
    }
    slow += law->steep * fmax(channels - law->knee, 0.0);
    double squeezed = 1.0;
    if (n_coll > 1 && law->budget > 0.0 && channels > law->budget)
      squeezed += law->squeeze * (channels / law->budget - 1.0);
    double passed = INFINITY;
    int first = -1;
    for (int s = 0; s < w->n_streams; s++) {
      if (!running[s]) continue;
      int32_t k = w->slot[head[s]];
      double p = 1.0;
      if (k < 0) {
        p += slow + law->saturation * slow * slow;
      } else if (only >= 0 && s != only) {
        pace[s] = INFINITY;
        continue;
      } else {
        double load = 1.0;
        if (calls[k].near > 0 && near > load) load = near;
        if (calls[k].far > 0 && far > load) load = far;
        if (load > 1.0) p = law->power == 1.0 ? load : pow(load, law->power);
        p *= 1.0 + law->crowd * (crowd - calls[k].crowd);
        if (n_comp) p *= 1.0 + law->drag;
        p *= squeezed;
        if (calls[k].port > 0.0 && on_port[(int)calls[k].port] > 1) p *= 1.0 + law->port;
      }
      pace[s] = p;
      if (left[s] * p < passed) passed = left[s] * p, first = s;
    }
    now += passed;
    for (int s = 0; s < w->n_streams; s++) {
      if (!running[s]) continue;
      left[s] = s == first ? 0.0 : left[s] - passed / pace[s];
      if (!n_comp && pace[s] < INFINITY) alone[s] += passed / n_coll;
    }
  }
  return now;
}

/* Steps of n jobs. Returns 0, or 1 + the index of a job whose operations wait for each other. */
__attribute__((visibility("default"))) int dynamiccl_steps(
    int32_t n, const int32_t* which, const int32_t* op_at, const int32_t* n_streams, const int32_t* stream,
    const int32_t* slot, const double* work, const int32_t* after_at, const int32_t* after, int32_t n_calls,
    const double* calls, const double* scale, const double* law, double* total, double* slot_us,
    double* exposed, double* begin, double* end, double* bare, uint8_t* done, int32_t* next) {
  for (int32_t j = 0; j < n; j++) {
    int32_t first = op_at[which[j]], count = op_at[which[j] + 1] - first;
    /* after_at of every step begins anew in a row of its own: one entry more than operations */
    step_t w = {count,        n_streams[which[j]],         stream + first, slot + first,
                work + first, after_at + first + which[j], after};
    const call_t* mine = (const call_t*)calls + (size_t)j * (size_t)n_calls;
    double *us = slot_us + (size_t)j * (size_t)n_calls, *open = exposed + (size_t)j * (size_t)n_calls;
    memset(us, 0, sizeof(double) * (size_t)n_calls);
    memset(open, 0, sizeof(double) * (size_t)n_calls);
    total[j] = run(&w, mine, scale[j], (const law_t*)law + j, us, open, begin, end, bare, done, next);
    if (total[j] < 0) return 1 + j;
  }
  return 0;
}
