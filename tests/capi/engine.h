/* What the engine of capi_engine_test.c stands on: its handles, streams whose rows are known by
 * number, steps over them, and the check of each output against loops in double over exactly the
 * rows that the stream should hold. */
#pragma once

#include <math.h>
#include <string.h>

#include "check.h"
#include "mla/mla_engine.h"
#include "noise.h"

enum { HEADS = 2, RANK = 6, ROPE = 2, LATENT = RANK + ROPE, PAGE = 4, PAGES = 12, LAYERS = 2 };
enum { MAX_ROWS = 64, MAX_TOKENS = 32 };

static const float kScale = 0.3F;

/* What a stream should hold: the numbers of its rows. */
typedef struct stream {
  uint64_t request;
  const char* label; /* as the library gets it */
  int rows[MAX_ROWS];
  int num_rows;
} stream;

/* How many rows a step appends to a stream. */
typedef struct part {
  stream* of;
  int32_t span;
} part;

static mla_kv_resource* kv;
static mla_attention_resource* attention;
static mla_step_runner* runner;
static mla_step* steps[2]; /* by slot */
static int next_row = 1;

static float ckv_of(int row, int layer, int c) {
  return noise((uint32_t)row, (uint32_t)layer + 1, (uint32_t)c);
}
static float query_of(int token, int head, int c) {
  return noise(7919, (uint32_t)(token * HEADS + head), (uint32_t)c);
}

static mla_tensor tensor(void* data, int32_t rank, int64_t a, int64_t b, int64_t c) {
  int64_t shape[3];
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  return mla_contiguous_tensor(data, MLA_FLOAT32, rank, shape);
}

static mla_kv_stream name_of(const stream* s) {
  mla_kv_stream name;
  name.request = s->request;
  name.label = s->label;
  return name;
}

static mla_lease slot_of(int32_t slot) {
  const mla_lease lease = {.struct_size = sizeof lease, .slot = slot};
  return lease;
}

/* Gives each part's stream its new rows, and writes them to every layer of the label's plan. */
static void write_new_rows(const char* label, const part* parts, int num_parts) {
  float ckv[MAX_TOKENS * RANK], kpe[MAX_TOKENS * ROPE];
  mla_tensor ckv_rows, kpe_rows;
  int first = next_row, num_new = 0, layer, p, i, c;
  for (p = 0; p < num_parts; ++p) {
    stream* s = parts[p].of;
    for (i = 0; i < parts[p].span; ++i, ++num_new) s->rows[s->num_rows++] = next_row++;
  }
  ckv_rows = tensor(ckv, 2, num_new, RANK, 0);
  kpe_rows = tensor(kpe, 2, num_new, ROPE, 0);
  for (layer = 0; layer < LAYERS; ++layer) {
    for (i = 0; i < num_new; ++i) {
      for (c = 0; c < RANK; ++c) ckv[i * RANK + c] = ckv_of(first + i, layer, c);
      for (c = 0; c < ROPE; ++c) kpe[i * ROPE + c] = ckv_of(first + i, layer, RANK + c);
    }
    OK(mla_kv_resource_write(kv, layer, label, &ckv_rows, &kpe_rows, NULL));
  }
}

/* One output row over the given keys, in double; returns the LSE. */
static double expected_row(const int* keys, int num_keys, int layer, int token, int head,
                           double* row) {
  double total = 0;
  int k, c;
  for (c = 0; c < RANK; ++c) row[c] = 0;
  for (k = 0; k < num_keys; ++k) {
    double score = 0;
    for (c = 0; c < LATENT; ++c) {
      score += (double)query_of(token, head, c) * (double)ckv_of(keys[k], layer, c);
    }
    score = exp(score * (double)kScale);
    total += score;
    for (c = 0; c < RANK; ++c) row[c] += score * (double)ckv_of(keys[k], layer, c);
  }
  for (c = 0; c < RANK && total > 0; ++c) row[c] /= total;
  return log(total);
}

/* A row of a plan as it should be. Causal: query j of n sees all keys but the last n - 1 - j. */
typedef struct wanted {
  const int* keys;
  int num_keys;
  int num_queries;
  int causal;
} wanted;

/* Runs a label's pass in every layer, with `tokens` query tokens, and compares; tokens past those
 * of the rows must come out empty. */
static void check_attends(const char* label, int32_t pass, const wanted* rows, int num_rows,
                          int tokens) {
  float q[MAX_TOKENS * HEADS * LATENT], out[MAX_TOKENS * HEADS * RANK], lse[MAX_TOKENS * HEADS];
  mla_attend_args args = {.struct_size = sizeof args, .label = label, .pass = pass};
  int layer, token, r, j, head, c;
  args.q_nope = args.q_pe = tensor(q, 3, tokens, HEADS, LATENT);
  args.q_nope.shape[2] = RANK;
  args.q_pe.shape[2] = ROPE;
  args.q_pe.data = q + RANK;
  args.out = tensor(out, 3, tokens, HEADS, RANK);
  args.lse = tensor(lse, 2, tokens, HEADS, 0);
  for (token = 0; token < tokens; ++token) {
    for (head = 0; head < HEADS; ++head) {
      for (c = 0; c < LATENT; ++c) {
        q[(token * HEADS + head) * LATENT + c] = query_of(token, head, c);
      }
    }
  }
  for (layer = 0; layer < LAYERS; ++layer) {
    memset(out, 0xff, sizeof out);
    memset(lse, 0xff, sizeof lse);
    args.layer = layer;
    OK(mla_attention_resource_run(attention, &args, NULL));
    token = 0;
    for (r = 0; r < num_rows; ++r) {
      for (j = 0; j < rows[r].num_queries; ++j, ++token) {
        const int hidden = rows[r].causal ? rows[r].num_queries - 1 - j : 0;
        for (head = 0; head < HEADS; ++head) {
          const float* got = out + (token * HEADS + head) * RANK;
          double want[RANK];
          const double want_lse =
              expected_row(rows[r].keys, rows[r].num_keys - hidden, layer, token, head, want);
          const double got_lse = (double)lse[token * HEADS + head];
          CHECK(isinf(want_lse) ? got_lse == want_lse : fabs(got_lse - want_lse) < 1e-5);
          for (c = 0; c < RANK; ++c) CHECK(fabs((double)got[c] - want[c]) < 1e-5);
        }
      }
    }
    for (; token < tokens; ++token) {
      for (c = 0; c < HEADS * RANK; ++c) CHECK(out[token * HEADS * RANK + c] == 0);
      CHECK(isinf(lse[token * HEADS]));
    }
  }
}

/* Fills a step: the parts as segments, one causal pass. */
static void fill_step(mla_step* step, const part* parts, int num_parts) {
  mla_segment segments[8];
  mla_kv_step kv_part = {.struct_size = sizeof kv_part};
  const mla_attention_step plain = {.struct_size = sizeof plain};
  int p;
  for (p = 0; p < num_parts; ++p) {
    segments[p].request = parts[p].of->request;
    segments[p].label = parts[p].of->label;
    segments[p].span = parts[p].span;
  }
  kv_part.segments = segments;
  kv_part.num_segments = num_parts;
  OK(mla_step_set_kv(step, NULL, &kv_part));
  OK(mla_step_set_attention(step, NULL, &plain));
}

static void admit_and_plan(mla_step* step, int32_t slot) {
  mla_admission answer = {.struct_size = sizeof answer};
  const mla_lease lease = slot_of(slot);
  OK(mla_step_runner_admit(runner, step, &answer));
  CHECK(answer.pages_short == 0);
  OK(mla_step_runner_plan(runner, step, &lease, NULL));
}

/* Writes the planned step's rows and checks what its one causal pass over "main" gives. */
static void write_and_check(const part* parts, int num_parts) {
  wanted rows[8];
  int p, tokens = 0;
  write_new_rows(NULL, parts, num_parts);
  for (p = 0; p < num_parts; ++p) {
    rows[p].keys = parts[p].of->rows;
    rows[p].num_keys = parts[p].of->num_rows;
    rows[p].num_queries = parts[p].span;
    rows[p].causal = 1;
    tokens += parts[p].span;
  }
  check_attends(NULL, 0, rows, num_parts, tokens);
}

static void serve(const part* parts, int num_parts) {
  fill_step(steps[0], parts, num_parts);
  admit_and_plan(steps[0], 0);
  write_and_check(parts, num_parts);
  OK(mla_step_runner_commit(runner));
}
