/* The engine side of libmla's C interface: attention over the streams of a KV resource, the steps
 * of an engine, and the runner that takes the resources through them. What attention_resource.hpp,
 * step.hpp and step_runner.hpp offer, with the same behaviour; docs/engine.md tells the life of a
 * step, docs/capi.md shows one in C. The conventions of mla.h and mla_cache.h hold, and one more:
 *
 * Shortage   Too few pages is an answer (mla_admission), not an error: the call returns MLA_OK. */
#pragma once

#include "mla/mla_cache.h"

/* NOLINTBEGIN(readability-identifier-naming,modernize-use-using): the names and forms of C */
#ifdef __cplusplus
extern "C" {
#endif

/* ---- Attention resource: a plan object for every label and pass of a step ---- */

typedef struct mla_attention_resource mla_attention_resource;

/* Fields as in mla_attention_config; the geometry is the pool's. */
typedef struct mla_attention_options {
  size_t struct_size;
  const char* key;   /* null: "attention" */
  int32_t num_heads; /* query heads of this rank, 1 to 1024 */
  float sm_scale;    /* see mla_plan_options; no default */
  int32_t lse_base;  /* mla_lse_base */
  int32_t capture;   /* 1: runs under a bucket will be captured; refused by the CPU */
  int64_t max_rows;  /* of one label's plan; buckets lie within. 0: as in mla_attention_config */
  int64_t max_tokens;
  int64_t max_listed_pages;
  int32_t fixed_split_tokens;
  int32_t forced_splits;
  const char* kernel;
  mla_executor* executor;
  /* At least mla_attention_resource_scratch_bytes, aligned to 64 bytes, shared by all plans: then
   * no two of them may run at once. Null and 0: each owns its own. */
  void* scratch;
  size_t scratch_bytes;
} mla_attention_options;

/* Tensors of one attention of T query tokens and H heads, and which it is. T as mla_attention_run
 * takes it: in a capture the bucket's tokens. */
typedef struct mla_attend_args {
  size_t struct_size;
  mla_tensor q_nope;         /* [T, H, kv_lora_rank], absorbed */
  mla_tensor q_pe;           /* [T, H, qk_rope_head_dim]; may be left out at rope width 0 */
  mla_tensor out;            /* [T, H, kv_lora_rank] */
  mla_tensor lse;            /* [T, H] fp32; may be left out */
  const char* label;         /* null: the cursor's, which is "main" after a plan */
  int32_t pass;              /* index into the step's passes */
  int32_t layer;             /* of the pool; 0 where the cursor's is taken */
  int32_t layer_from_cursor; /* 1: the cursor's layer, which is 0 after a plan */
  /* In place of the pool's layer, of the same strides; left out: the pool's. */
  mla_tensor ckv;
  mla_tensor kpe;
} mla_attend_args;

/* Exact bytes of scratch that serve every plan within the limits; its scratch is not read. */
MLA_API mla_status mla_attention_resource_scratch_bytes(const mla_kv_resource* kv,
                                                        const mla_attention_options* options,
                                                        size_t* bytes) MLA_NOEXCEPT;

/* Attends over the streams that `kv` plans, in its pool. A kernel is chosen here, and none is a
 * refusal. */
MLA_API mla_status mla_attention_resource_create(const mla_kv_resource* kv,
                                                 const mla_attention_options* options,
                                                 mla_attention_resource** attention) MLA_NOEXCEPT;
MLA_API void mla_attention_resource_destroy(mla_attention_resource* attention) MLA_NOEXCEPT;

/* The label and the layer that runs take by default, until the next plan. MLA_INVALID_STATE where
 * nothing is planned; MLA_INVALID_ARGUMENT where the plan has not that label, or the pool that
 * layer. */
MLA_API mla_status mla_attention_resource_set_cursor(mla_attention_resource* attention,
                                                     const char* label, int32_t layer) MLA_NOEXCEPT;

/* Attends with the step's plan of a label and pass; see mla_attention_run. MLA_INVALID_STATE where
 * nothing is planned, or a newer step is admitted; MLA_INVALID_ARGUMENT where the plan has not that
 * label and pass, or a tensor does not match. Allocates nothing. */
MLA_API mla_status mla_attention_resource_run(mla_attention_resource* attention,
                                              const mla_attend_args* args,
                                              void* stream) MLA_NOEXCEPT;

/* As mla_attention_qo_indptr_buf and mla_attention_kv_len_buf, of a label and pass. Of a
 * context-only pass kv_len is what was stored: where the appended rows start. */
MLA_API mla_status mla_attention_resource_qo_indptr_buf(const mla_attention_resource* attention,
                                                        const char* label, int32_t pass,
                                                        mla_tensor* buffer) MLA_NOEXCEPT;
MLA_API mla_status mla_attention_resource_kv_len_buf(const mla_attention_resource* attention,
                                                     const char* label, int32_t pass,
                                                     mla_tensor* buffer) MLA_NOEXCEPT;

/* Writes row qo_indptr[i + 1] - 1 of hidden to out[i] for each row of the plan (the bucket's under
 * a lease), zeros where a row has no queries. hidden [T, D], T as in mla_attend_args, and out
 * [rows, D], of one dtype. */
MLA_API mla_status mla_attention_resource_select_last_hidden(
    const mla_attention_resource* attention, const char* label, int32_t pass,
    const mla_tensor* hidden, const mla_tensor* out, void* stream) MLA_NOEXCEPT;

/* The kernel that serves the plans, for the resource's life; null for null. */
MLA_API const char* mla_attention_resource_kernel(const mla_attention_resource* attention)
    MLA_NOEXCEPT;
/* 0 where the reference serves the plans, and for null. */
MLA_API int32_t mla_attention_resource_uses_kernel(const mla_attention_resource* attention)
    MLA_NOEXCEPT;

/* ---- Step: what one step asks of each resource ---- */

/* An engine keeps one for each step in flight and fills it again. Names in it are kept for its
 * life. */
typedef struct mla_step mla_step;

typedef struct mla_segment {
  uint64_t request;
  const char* label;
  int32_t span; /* rows appended; 0 reads without extending */
} mla_segment;

typedef struct mla_fork {
  mla_kv_stream source;
  mla_kv_stream target; /* must not be open */
} mla_fork;

/* Several labels packed as one plan under a name of its own. */
typedef struct mla_combined_label {
  const char* name;
  const char* const* labels; /* [num_labels] */
  int64_t num_labels;
} mla_combined_label;

typedef struct mla_kv_step {
  size_t struct_size;
  const mla_segment* segments; /* each stream once */
  int64_t num_segments;
  const mla_fork* forks_before; /* made at plan, in this order; segments may name their targets */
  int64_t num_forks_before;
  const mla_fork* forks_after; /* made at commit, of streams as the step leaves them */
  int64_t num_forks_after;
  const mla_combined_label* combined;
  int64_t num_combined;
  const char* const* labels; /* planned even if no segment names them */
  int64_t num_labels;
} mla_kv_step;

/* Query rows of one stream in one pass. The i-th of a label belongs to the label's i-th row. */
typedef struct mla_query_segment {
  const char* label;
  int32_t num_queries;
  int32_t limit_appended; /* 1: of the rows that the step appends only num_appended are seen */
  int32_t num_appended;
} mla_query_segment;

typedef struct mla_attention_pass {
  int32_t causal;                    /* as in mla_plan_options */
  int32_t context_only;              /* 1: sees all that was stored, none of what is appended */
  const mla_query_segment* segments; /* null: as many queries as the step appends rows */
  int64_t num_segments;
} mla_attention_pass;

typedef struct mla_attention_step {
  size_t struct_size;
  const mla_attention_pass* passes; /* none: one causal pass over every label */
  int64_t num_passes;
} mla_attention_step;

MLA_API mla_status mla_step_create(mla_step** step) MLA_NOEXCEPT;
MLA_API void mla_step_destroy(mla_step* step) MLA_NOEXCEPT;

/* Set the part of one resource, in place of the one before. A refused part leaves that. */
MLA_API mla_status mla_step_set_kv(mla_step* step, const char* key,
                                   const mla_kv_step* part) MLA_NOEXCEPT;
MLA_API mla_status mla_step_set_attention(mla_step* step, const char* key,
                                          const mla_attention_step* part) MLA_NOEXCEPT;

/* ---- Step runner ----
 *   admit, plan, (the model runs), commit;   or abandon after either of the first two
 *   meanwhile, on another thread if wanted: pre_admit, pre_plan of the next step, into another slot
 * The next admit and plan of that step for that lease then find the work done. Calls in another
 * order give MLA_INVALID_STATE. Every refused call changes nothing. */

typedef struct mla_step_runner mla_step_runner;

typedef struct mla_step_runner_config {
  size_t struct_size;
  mla_kv_resource* const* kv_resources;
  int64_t num_kv_resources;
  /* May be none: an engine may also plan an mla_attention by the arrays of its label plans. */
  mla_attention_resource* const* attention_resources;
  int64_t num_attention_resources;
} mla_step_runner_config;

/* How many pages one segment lacks. */
typedef struct mla_shortage {
  uint64_t request;
  const char* label;
  int64_t pages;
} mla_shortage;

/* The answer of admit and pre_admit. The list stays until the runner's next answer. */
typedef struct mla_admission {
  size_t struct_size;
  int64_t pages_short; /* 0: admitted */
  const mla_shortage* shortages;
  int64_t num_shortages;
} mla_admission;

/* Where a step is planned into: one of the alternating copies of all that a plan writes and, with
 * both bucket sizes above 0, the captured graph that replays it. */
typedef struct mla_lease {
  size_t struct_size;
  int32_t slot;     /* >= 0 */
  const char* walk; /* the engine's name for the graph's path; null: "" */
  int64_t bucket_rows;
  int64_t bucket_tokens;
} mla_lease;

/* The largest step that captured graphs serve. */
typedef struct mla_graph_shape {
  int64_t num_rows;
  int64_t num_tokens;
  int64_t num_listed_pages; /* of one label's plan */
} mla_graph_shape;

/* Resources may have one runner at a time, and an attention resource is run beside its KV resource;
 * each has a key of its own. */
MLA_API mla_status mla_step_runner_create(const mla_step_runner_config* config,
                                          mla_step_runner** runner) MLA_NOEXCEPT;
/* Abandons the step in flight and lets go of the resources, which keep their streams. */
MLA_API void mla_step_runner_destroy(mla_step_runner* runner) MLA_NOEXCEPT;

/* Reserves what the step needs, or answers how many pages are short and for whom. */
MLA_API mla_status mla_step_runner_admit(mla_step_runner* runner, const mla_step* step,
                                         mla_admission* admission) MLA_NOEXCEPT;
/* Plans the admitted step in every resource. lease null: slot 0, no bucket. Where a resource
 * refuses, the step is abandoned, an early one with it. */
MLA_API mla_status mla_step_runner_plan(mla_step_runner* runner, const mla_step* step,
                                        const mla_lease* lease, void* stream) MLA_NOEXCEPT;
/* Ends the planned step: its rows are stored. */
MLA_API mla_status mla_step_runner_commit(mla_step_runner* runner) MLA_NOEXCEPT;
/* Ends the admitted or planned step without it, and drops an early one. */
MLA_API mla_status mla_step_runner_abandon(mla_step_runner* runner) MLA_NOEXCEPT;

/* As admit, for the step after the one in flight. */
MLA_API mla_status mla_step_runner_pre_admit(mla_step_runner* runner, const mla_step* step,
                                             mla_admission* admission) MLA_NOEXCEPT;
/* Plans the pre-admitted step into another slot or bucket than that of the plan in use, which stays
 * as it is. Where a resource refuses, the early step is dropped. */
MLA_API mla_status mla_step_runner_pre_plan(mla_step_runner* runner, const mla_step* step,
                                            const mla_lease* lease, void* stream) MLA_NOEXCEPT;
/* Drops the early step, if any. */
MLA_API mla_status mla_step_runner_clear_preplan(mla_step_runner* runner) MLA_NOEXCEPT;
/* One label of the early plan of a KV resource, by its key. */
MLA_API mla_status mla_step_runner_early_label_plan(const mla_step_runner* runner,
                                                    const char* kv_key, const char* label,
                                                    mla_label_plan* plan) MLA_NOEXCEPT;

/* Before every replay, on its stream, of a graph that the engine launches by itself, unless it
 * plans and replays on one stream: orders the replay behind the plan's copies. */
MLA_API mla_status mla_step_runner_order_replay(mla_step_runner* runner, void* stream) MLA_NOEXCEPT;
/* Sizes every graph buffer at the largest of the shapes; once. A larger one later is refused. */
MLA_API mla_status mla_step_runner_size_graph_buffers(mla_step_runner* runner,
                                                      const mla_graph_shape* shapes,
                                                      int64_t num_shapes) MLA_NOEXCEPT;
/* 1: the engine must alternate two slots even if it never pre-plans. 0 for null. */
MLA_API int32_t mla_step_runner_force_double_buffer(const mla_step_runner* runner) MLA_NOEXCEPT;

#ifdef __cplusplus
}
#endif
/* NOLINTEND(readability-identifier-naming,modernize-use-using) */
