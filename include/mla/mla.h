/* The C interface of libmla (C99), for engines in C, Rust, Go or Python: what attention.hpp,
 * supports.hpp, merge.hpp and executor.hpp offer, with the same behaviour. mla_cache.h goes on with
 * the paged pool and who holds its pages, mla_engine.h with the steps of an engine; docs/capi.md
 * has the rules and an example.
 *
 * Errors     Every call that can fail returns a status; mla_last_error() has the text. A call that
 *            failed changed nothing, and no C++ exception leaves the library.
 * Structs    Those that may grow start with struct_size = sizeof of the struct as the caller was
 *            compiled. Zero the rest (`mla_x x = {.struct_size = sizeof x}` does) and set what is
 *            wanted: zero is the default of every field, unless its comment says otherwise. What a
 *            newer header added and this library does not know is refused unless it is zero.
 * Ownership  What is passed in stays the caller's. Memory behind mla_attention_config.scratch must
 *            outlive the object, tensors need only outlive the call (on the CPU). Handles are freed
 *            by their destroy call, which takes null. A pointer to anything but a living handle of
 *            the right type is refused where that can be told. Texts are the library's.
 * Blocking   On the CPU a call returns when its work is done. A stream is ignored there.
 * Threads    Different objects may be used at once from different threads, calls on one object may
 *            not overlap. The last error is each thread's own.
 * Shapes     T query tokens and B requests of a batch, H query heads. Strides count elements. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "mla/export.hpp" /* one macro, no C++ */

/* NOLINTBEGIN(readability-identifier-naming,modernize-use-using): the names and forms of C */
#ifdef __cplusplus
extern "C" {
#define MLA_NOEXCEPT noexcept
#else
#define MLA_NOEXCEPT
#endif

/* Raised by every change that breaks a program compiled against an earlier header. */
#define MLA_ABI_VERSION 2

#define MLA_MAX_RANK 4

typedef enum mla_status {
  MLA_OK = 0,
  MLA_INVALID_ARGUMENT = 1, /* a value that the call does not accept */
  MLA_INVALID_STATE = 2,    /* the object does not allow the call now: run before plan */
  MLA_OUT_OF_MEMORY = 3,
  MLA_INTERNAL_ERROR = 4, /* a fault of the library: please report it with its text */
  MLA_DEVICE_ERROR = 5    /* a call of the accelerator's runtime failed: the text names it */
} mla_status;

/* Element types. The first three are what queries, caches and outputs may be. */
typedef enum mla_dtype {
  MLA_FLOAT32 = 0,
  MLA_BFLOAT16 = 1,
  MLA_FLOAT16 = 2,
  MLA_INT32 = 3,
  MLA_INT64 = 4
} mla_dtype;

typedef enum mla_device_kind { MLA_CPU = 0, MLA_CUDA = 1 } mla_device_kind;

/* The logarithm that an LSE is in. */
typedef enum mla_lse_base { MLA_LSE_NATURAL = 0, MLA_LSE_BASE_2 = 1 } mla_lse_base;

typedef struct mla_device {
  int32_t kind; /* mla_device_kind */
  int32_t index;
} mla_device;

/* A tensor that the caller owns. The library writes to `data` of out and lse alone. All zero: no
 * tensor, where one may be left out. */
typedef struct mla_tensor {
  void* data;
  mla_device device;
  int32_t dtype; /* mla_dtype */
  int32_t rank;
  int64_t shape[MLA_MAX_RANK];
  int64_t stride[MLA_MAX_RANK]; /* elements */
} mla_tensor;

/* "major.minor.patch" of the library that is linked, and its MLA_ABI_VERSION: a program may go on
 * where it equals that of the header it was compiled with. */
MLA_API const char* mla_version(void) MLA_NOEXCEPT;
MLA_API int32_t mla_abi_version(void) MLA_NOEXCEPT;

/* This thread's last failure, "where: what: expected E, got G", or "" where there was none. Stays
 * until the thread's next failure; a success does not clear it. */
MLA_API const char* mla_last_error(void) MLA_NOEXCEPT;

/* Row-major strides for a shape of 1 to MLA_MAX_RANK extents, on the first CPU device. A rank or
 * dtype out of range gives a tensor that every call refuses. */
MLA_API mla_tensor mla_contiguous_tensor(void* data, int32_t dtype, int32_t rank,
                                         const int64_t* shape) MLA_NOEXCEPT;

/* ---- Threads of the CPU backend ---- */

typedef struct mla_executor mla_executor;

/* num_threads 0: the processors that this process may use. Objects created with an executor keep
 * its threads alive, so it may be destroyed before them. */
MLA_API mla_status mla_executor_create(int32_t num_threads, mla_executor** executor) MLA_NOEXCEPT;
MLA_API void mla_executor_destroy(mla_executor* executor) MLA_NOEXCEPT;
/* 0 for a null executor. */
MLA_API int32_t mla_executor_num_threads(const mla_executor* executor) MLA_NOEXCEPT;

/* ---- Which kernel serves a shape ---- */

typedef struct mla_geometry {
  size_t struct_size;
  int32_t num_heads;        /* query heads of this rank, 1 to 1024 */
  int32_t kv_lora_rank;     /* columns of ckv, the value width, >= 1 */
  int32_t qk_rope_head_dim; /* columns of kpe, >= 0; rank + rope at most 8192 */
  int32_t page_size;        /* tokens of a page, >= 1 */
  int32_t dtype;            /* mla_dtype of q and out */
  int32_t kv_dtype;         /* of the cache; equal to dtype */
} mla_geometry;

/* Strides of the cache in elements; the last dimension is contiguous. */
typedef struct mla_cache_strides {
  int64_t ckv_page;
  int64_t ckv_row;
  int64_t kpe_page;
  int64_t kpe_row;
} mla_cache_strides;

typedef struct mla_kernel_verdict {
  const char* kernel;
  const char* refusal; /* "" where it accepts */
} mla_kernel_verdict;

/* The texts and the list stay until this thread's next mla_supports. */
typedef struct mla_support {
  size_t struct_size;
  int32_t supported;                    /* 1 or 0 */
  int32_t capturable;                   /* 1: its launches may be captured in a graph */
  const char* kernel;                   /* "" where none can */
  const char* reason;                   /* why this kernel, or why none */
  const mla_kernel_verdict* considered; /* the device's table, in order of preference */
  int64_t num_considered;
} mla_support;

/* Which kernel will serve `geometry`, before anything is launched. strides null: one pool layer.
 * kernel null or "": any, else this one is asked alone. A shape that nothing serves is an answer
 * (supported = 0 and a reason), not an error. */
MLA_API mla_status mla_supports(const mla_geometry* geometry, mla_device device,
                                const mla_cache_strides* strides, const char* kernel,
                                mla_support* support) MLA_NOEXCEPT;

/* ---- Attention ----
 *   scores = (q_nope . ckv + q_pe . kpe) * sm_scale;  out = softmax(scores) @ ckv
 * over each request's own keys, accumulated in fp32. A row that sees no key gets zeros and LSE
 * -inf. */

typedef struct mla_attention mla_attention;

typedef struct mla_attention_config {
  size_t struct_size;
  const mla_geometry* geometry;
  int64_t num_pages; /* pages of the pool; a plan may list 0 .. num_pages - 1 */
  mla_device device;
  const mla_cache_strides* strides; /* of the caches that run will get; null: one pool layer */
  /* The most that one plan may hold; 0: 1024, 16384 and 2^20. */
  int64_t max_rows;
  int64_t max_tokens;
  int64_t max_listed_pages;
  /* Both 0, or both above: a lease. Rows and tokens are fixed for the object's life, plans may have
   * fewer, and run writes every row of the bucket. */
  int64_t bucket_rows;
  int64_t bucket_tokens;
  /* At most one above 0, else the planner decides. fixed: parts of this many tokens counted from
   * the first key, so that a request's bits do not depend on the rest of the batch. forced: this
   * many parts for every row, at most 256. */
  int32_t fixed_split_tokens;
  int32_t forced_splits;
  int32_t capture;        /* 1: runs will be captured in a graph; refused by the CPU */
  const char* kernel;     /* one of the device's table; null or "": the first that fits */
  mla_executor* executor; /* CPU only; null: one for the process, a thread for each processor */
  /* At least mla_attention_scratch_bytes, aligned to 64 bytes, on the device; its contents never
   * matter. Null and 0: the object owns its scratch. */
  void* scratch;
  size_t scratch_bytes;
} mla_attention_config;

/* The requests of one step, as host arrays that are free again when plan returns. */
typedef struct mla_batch {
  size_t struct_size;
  int64_t num_rows;                /* B */
  const int32_t* qo_indptr;        /* [B + 1], first query token of each request, from 0 */
  const int32_t* kv_indptr;        /* [B + 1], offsets into kv_indices (pages), from 0 */
  const int32_t* kv_indices;       /* [num_kv_indices], page ids in token order */
  int64_t num_kv_indices;          /* at least kv_indptr[B] */
  const int32_t* kv_len;           /* [B] tokens a request may see; or else */
  const int32_t* kv_last_page_len; /* [B] tokens in its last page, 1 to page_size */
} mla_batch;

typedef struct mla_plan_options {
  size_t struct_size;
  float sm_scale;   /* of the ORIGINAL head width (192^-0.5 for DeepSeek); no default */
  int32_t causal;   /* 1: query j of n, of a request with m keys, sees keys 0 .. m - n + j */
  int32_t lse_base; /* mla_lse_base */
} mla_plan_options;

/* Of one layer. The last dimension of each is contiguous (lse: any strides). */
typedef struct mla_run_args {
  size_t struct_size;
  mla_tensor q_nope; /* [T, H, kv_lora_rank], absorbed */
  mla_tensor q_pe;   /* [T, H, qk_rope_head_dim]; may be left out at rope width 0 */
  mla_tensor ckv;    /* [num_pages, page_size, kv_lora_rank] */
  mla_tensor kpe;    /* [num_pages, page_size, qk_rope_head_dim]; may be left out at rope width 0 */
  mla_tensor out;    /* [T, H, kv_lora_rank] */
  mla_tensor lse;    /* [T, H] fp32; may be left out */
} mla_run_args;

typedef struct mla_plan_info {
  size_t struct_size;
  int64_t num_rows;
  int64_t num_tokens;
  int64_t num_tiles;
  int64_t num_splits;   /* the most parts that one row's keys are cut into */
  size_t partial_bytes; /* scratch that this plan's partial results take */
} mla_plan_info;

/* The parts [.., kv_lora_rank] and [.., rest] of one pool layer [num_pages, page_size, latent]. */
MLA_API mla_status mla_split_latent(const mla_tensor* layer, int64_t kv_lora_rank, mla_tensor* ckv,
                                    mla_tensor* kpe) MLA_NOEXCEPT;

/* Exact bytes of scratch for every plan within the config's limits; its scratch is not read. */
MLA_API mla_status mla_attention_scratch_bytes(const mla_attention_config* config,
                                               size_t* bytes) MLA_NOEXCEPT;

/* Chooses the kernel and takes all memory that plans within the limits need. */
MLA_API mla_status mla_attention_create(const mla_attention_config* config,
                                        mla_attention** attention) MLA_NOEXCEPT;
MLA_API void mla_attention_destroy(mla_attention* attention) MLA_NOEXCEPT;

/* Checks the index arrays, computes the schedule and stages it. After a failure the previous plan
 * stays in force. */
MLA_API mla_status mla_attention_plan(mla_attention* attention, const mla_batch* batch,
                                      const mla_plan_options* options, void* stream) MLA_NOEXCEPT;

/* Attends with the current plan, any number of times. T must be the plan's tokens or, under a
 * lease, the bucket's; in a capture it must be the bucket's, since later plans of up to as many are
 * replayed into the same tensors. Writes every row of out and lse and no other byte. Allocates
 * nothing. */
MLA_API mla_status mla_attention_run(mla_attention* attention, const mla_run_args* args,
                                     void* stream) MLA_NOEXCEPT;

/* What the current plan holds. */
MLA_API mla_status mla_attention_info(const mla_attention* attention,
                                      mla_plan_info* info) MLA_NOEXCEPT;

/* The kernel that serves the object, for as long as it lives; null for a null object. */
MLA_API const char* mla_attention_kernel(const mla_attention* attention) MLA_NOEXCEPT;

/* The current plan's [rows + 1] query offsets and [rows] key counts on the device, as int32
 * tensors that may only be read. At fixed addresses under a lease. */
MLA_API mla_status mla_attention_qo_indptr_buf(const mla_attention* attention,
                                               mla_tensor* buffer) MLA_NOEXCEPT;
MLA_API mla_status mla_attention_kv_len_buf(const mla_attention* attention,
                                            mla_tensor* buffer) MLA_NOEXCEPT;

/* ---- Merge ---- */

/* Attention over one part of the keys: normalised output and log-sum-exp of the scores. */
typedef struct mla_partial_state {
  mla_tensor out;   /* [T, H, D] */
  mla_tensor lse;   /* [T, H] fp32 */
  int32_t lse_base; /* mla_lse_base */
} mla_partial_state;

/* Merges partial results over disjoint parts of the keys into what one pass over all would give. A
 * state with lse -inf is the identity, whatever its out holds.
 * states    [num_states], 1 or more, all of out's shape and of base `base`
 * out       [T, H, D]; may be the very tensor of one of the states
 * lse       [T, H] fp32, may be the very tensor of a state; null where it is not wanted
 * executor  shares out the rows on the CPU; null: the calling thread does all
 * All on out's device. On an accelerator (at most 256 states there) the merge is queued on `stream`
 * and may be captured. */
MLA_API mla_status mla_merge_states(const mla_partial_state* states, int64_t num_states,
                                    const mla_tensor* out, const mla_tensor* lse, int32_t base,
                                    mla_executor* executor, void* stream) MLA_NOEXCEPT;

#ifdef __cplusplus
}
#endif
/* NOLINTEND(readability-identifier-naming,modernize-use-using) */
