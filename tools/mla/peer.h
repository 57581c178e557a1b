/* What a library must export so that `mla bench --device cuda --peer FILE.so` measures it beside
 * this one: four functions with C linkage. A FILE.so is a thin wrapper around a kernel of another
 * project; libmla neither links nor ships any.
 *
 * Of each cell the benchmark asks for a plan, holds one run against the output of libmla, captures
 * runs over caches that are together several times the level-2 cache, and replays them in turns
 * with libmla's own. Everything is called from one thread, whose current device is the first GPU.
 * The library is never unloaded. */
#ifndef MLA_PEER_H
#define MLA_PEER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One batch of paged MLA attention, bf16. Row i of the batch has query tokens qo_indptr[i] to
 * qo_indptr[i + 1] - 1 and kv_len[i] cached tokens, on the pages kv_indices[kv_indptr[i]] to
 * kv_indices[kv_indptr[i + 1] - 1] in their order. Where causal is not 0, query j of n of a row
 * sees its first kv_len - n + j + 1 tokens; else all. */
typedef struct MlaPeerBatch {
  int32_t num_rows, num_heads, kv_lora_rank, qk_rope_head_dim, page_size, causal;
  int64_t num_tokens, num_pages; /* query tokens in all; pages of the cache */
  float sm_scale;                /* multiplies the scores before the softmax */
  const int32_t *qo_indptr, *kv_indptr, *kv_indices, *kv_len; /* host memory, valid during
                                                                 mla_peer_plan */
} MlaPeerBatch;

/* bf16, contiguous, device memory. */
typedef struct MlaPeerTensors {
  const void* q;     /* [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim] */
  const void* cache; /* [num_pages, page_size, kv_lora_rank + qk_rope_head_dim] */
  void* out;         /* [num_tokens, num_heads, kv_lora_rank] */
  float* lse;        /* num_tokens * num_heads values, in the peer's own layout and base */
} MlaPeerTensors;

/* What results call it: name and version. Valid for ever. */
const char* mla_peer_name(void);

/* Everything that a batch needs before its runs; NULL: does not serve this batch. Work may be
 * queued on the stream (a cudaStream_t). Its host time is measured over several calls for one
 * batch, so memory is better kept from one plan to the next; one plan is alive at a time. */
void* mla_peer_plan(const MlaPeerBatch* batch, void* cuda_stream);

/* Queues the attention on the stream; 0 on success. The stream may be in capture: no allocation and
 * no waiting. A plan is run any number of times, with other tensors each time. */
int mla_peer_run(void* plan, const MlaPeerTensors* tensors, void* cuda_stream);

/* The work that uses the plan is done. */
void mla_peer_release(void* plan);

#ifdef __cplusplus
}
#endif

#endif /* MLA_PEER_H */
