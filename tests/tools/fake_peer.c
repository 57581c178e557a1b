// A peer for tests: plain loops over host memory, done when it is called. FAKE_PEER_ERROR is added
// to every output; with FAKE_PEER_INCOMPLETE it has no mla_peer_run.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "mla/peer.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct Plan {
  MlaPeerBatch batch;
  int32_t* indices;  // copies: those of the batch are lent to mla_peer_plan alone
} Plan;

EXPORT const char* mla_peer_name(void) { return "fake 1.0"; }

static const int32_t* keep(int32_t** to, const int32_t* from, int64_t count) {
  int32_t* kept = *to;
  memcpy(kept, from, (size_t)count * sizeof(int32_t));
  *to += count;
  return kept;
}

EXPORT void* mla_peer_plan(const MlaPeerBatch* batch, void* cuda_stream) {
  (void)cuda_stream;
  if (batch->num_heads > 8) return NULL;
  Plan* plan = malloc(sizeof(Plan));
  const int64_t rows = batch->num_rows, pages = batch->kv_indptr[rows];
  int32_t* next = plan->indices = malloc((size_t)(3 * rows + 2 + pages) * sizeof(int32_t));
  plan->batch = *batch;
  plan->batch.qo_indptr = keep(&next, batch->qo_indptr, rows + 1);
  plan->batch.kv_indptr = keep(&next, batch->kv_indptr, rows + 1);
  plan->batch.kv_indices = keep(&next, batch->kv_indices, pages);
  plan->batch.kv_len = keep(&next, batch->kv_len, rows);
  return plan;
}

EXPORT void mla_peer_release(void* plan) {
  free(((Plan*)plan)->indices);
  free(plan);
}

#ifndef FAKE_PEER_INCOMPLETE

static const float kError = (float)(FAKE_PEER_ERROR);

static float widen(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

static uint16_t narrow(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof(wide));
  return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

// One row of the output from the first `num_keys` keys of a request's pages.
static void attend(const MlaPeerBatch* b, const int32_t* pages, int32_t num_keys, const uint16_t* q,
                   const uint16_t* cache, uint16_t* out) {
  const int32_t width = b->kv_lora_rank + b->qk_rope_head_dim;
  float* sums = calloc((size_t)b->kv_lora_rank, sizeof(float));
  float total = 0;
  for (int32_t key = 0; key < num_keys; ++key) {
    const int64_t page = pages[key / b->page_size];
    const uint16_t* row = cache + (page * b->page_size + key % b->page_size) * width;
    float score = 0;
    for (int32_t c = 0; c < width; ++c) score += widen(q[c]) * widen(row[c]);
    const float weight = expf(score * b->sm_scale);
    for (int32_t c = 0; c < b->kv_lora_rank; ++c) sums[c] += weight * widen(row[c]);
    total += weight;
  }
  for (int32_t c = 0; c < b->kv_lora_rank; ++c) {
    out[c] = narrow(sums[c] / total + kError);
  }
  free(sums);
}

EXPORT int mla_peer_run(void* plan, const MlaPeerTensors* tensors, void* cuda_stream) {
  (void)cuda_stream;
  const MlaPeerBatch* b = &((const Plan*)plan)->batch;
  for (int32_t row = 0; row < b->num_rows; ++row) {
    for (int64_t token = b->qo_indptr[row]; token < b->qo_indptr[row + 1]; ++token) {
      const int64_t hidden = b->causal ? b->qo_indptr[row + 1] - 1 - token : 0;
      for (int64_t head = 0; head < b->num_heads; ++head) {
        const int64_t at = token * b->num_heads + head;
        attend(b, b->kv_indices + b->kv_indptr[row], (int32_t)(b->kv_len[row] - hidden),
               (const uint16_t*)tensors->q + at * (b->kv_lora_rank + b->qk_rope_head_dim),
               tensors->cache, (uint16_t*)tensors->out + at * b->kv_lora_rank);
      }
    }
  }
  return 0;
}

#endif
