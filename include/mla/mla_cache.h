/* The paged cache in libmla's C interface: the pool, and the KV resource that hands out its pages.
 * What pool.hpp, kv_step.hpp and kv_resource.hpp offer, with the same behaviour; docs/cache.md
 * explains it.
 *
 * The conventions of mla.h hold, and these:
 *
 * Ownership  A handle keeps alive what it was made from (a runner its resources, those their pool),
 *            so handles may be destroyed in any order. What a call hands out (arrays, texts, views)
 *            is the library's; each says how long it stays. Names and arrays that are passed in
 *            are free again when the call returns.
 * Names      A null label or key stands for its default: "main", "kv", "attention".
 * Threads    Calls on one object, and on objects made from one pool, may not overlap, but for
 *            those that docs/engine.md lists under "Which calls may overlap". */
#pragma once

#include "mla/mla.h"

/* NOLINTBEGIN(readability-identifier-naming,modernize-use-using): the names and forms of C */
#ifdef __cplusplus
extern "C" {
#endif

/* ---- Pool: [layers, pages, page_size, kv_lora_rank + qk_rope_head_dim] ----
 * A slot is page * page_size + offset in the page. One page more than was asked for, the last, is
 * the sink: an engine may write padded rows there, and nothing reads it. */

typedef struct mla_pool mla_pool;

typedef struct mla_pool_config {
  size_t struct_size;
  int32_t num_layers;       /* 0: 1 */
  int32_t page_size;        /* tokens of a page, >= 1 */
  int64_t num_pages;        /* usable pages, 1 to 2^31 - 2 */
  int32_t kv_lora_rank;     /* columns of ckv, >= 1 */
  int32_t qk_rope_head_dim; /* columns of kpe, >= 0; rank + rope at most 8192 */
  int32_t dtype;            /* mla_dtype: fp32, bf16 or fp16 */
  mla_device device;
  /* At least mla_pool_bytes, aligned to 64 bytes, on the device; it must outlive the pool and all
   * that is made from it. Null and 0: the pool owns its memory, and unwritten pages cost none. */
  void* memory;
  size_t memory_bytes;
} mla_pool_config;

typedef struct mla_page_copy {
  int32_t from;
  int32_t to;
} mla_page_copy;

/* Exact bytes of a pool, the sink included; config's memory is not read. */
MLA_API mla_status mla_pool_bytes(const mla_pool_config* config, size_t* bytes) MLA_NOEXCEPT;

MLA_API mla_status mla_pool_create(const mla_pool_config* config, mla_pool** pool) MLA_NOEXCEPT;
MLA_API void mla_pool_destroy(mla_pool* pool) MLA_NOEXCEPT;

/* Pages of every layer view, the sink included, which is page total - 1: what
 * mla_attention_config.num_pages counts. 0 for a null pool. */
MLA_API int64_t mla_pool_total_pages(const mla_pool* pool) MLA_NOEXCEPT;

/* One layer, [total_pages, page_size, latent]; mla_split_latent gives its parts. Stays for the
 * pool's life. */
MLA_API mla_status mla_pool_layer(const mla_pool* pool, int32_t layer,
                                  mla_tensor* view) MLA_NOEXCEPT;

/* Scatters row i to slots[i]; -1 skips the row. No other byte changes, and none where a row is
 * refused. Blocks until done on the CPU.
 * slots  [num_slots], -1 .. total_pages * page_size - 1
 * ckv    [num_slots, kv_lora_rank] of the pool's dtype and device, any row stride
 * kpe    [num_slots, qk_rope_head_dim]; null at rope width 0 */
MLA_API mla_status mla_pool_append(mla_pool* pool, int32_t layer, const int64_t* slots,
                                   int64_t num_slots, const mla_tensor* ckv, const mla_tensor* kpe,
                                   void* stream) MLA_NOEXCEPT;

/* The same with slots [n] int64 on the pool's device, which a captured append reads anew at each
 * replay. They are not checked: one outside the pool is skipped, as -1 is. */
MLA_API mla_status mla_pool_append_at(mla_pool* pool, int32_t layer, const mla_tensor* slots,
                                      const mla_tensor* ckv, const mla_tensor* kpe,
                                      void* stream) MLA_NOEXCEPT;

/* Reads slots[i] into row i of rows [num_slots, latent]; -1 leaves the row as it is. */
MLA_API mla_status mla_pool_gather(const mla_pool* pool, int32_t layer, const int64_t* slots,
                                   int64_t num_slots, const mla_tensor* rows,
                                   void* stream) MLA_NOEXCEPT;

/* Copies whole pages in every layer, one after the other. */
MLA_API mla_status mla_pool_copy_pages(mla_pool* pool, const mla_page_copy* copies,
                                       int64_t num_copies, void* stream) MLA_NOEXCEPT;

/* ---- KV resource: who holds which pages, and what a step appends where ----
 * Its steps are admitted, planned and committed by a runner (mla_engine.h). Streams that the step
 * in flight names may not be forked, trimmed or removed before its end: MLA_INVALID_STATE. A change
 * of a stream of a step that was planned early drops that step, which is then planned afresh. A
 * stream that is not open, or one that must not be, is MLA_INVALID_ARGUMENT. */

typedef struct mla_kv_resource mla_kv_resource;

typedef struct mla_kv_options {
  size_t struct_size;
  const char* key; /* among a runner's resources; null: "kv" */
  /* 1: mla_kv_resource_check runs after every call that changes something, which then fails where a
   * fault of the library is found. 0: only in builds with assertions. */
  int32_t check_every_call;
} mla_kv_options;

/* One cache stream: a request may have several, told apart by their label. */
typedef struct mla_kv_stream {
  uint64_t request;
  const char* label;
} mla_kv_stream;

/* Names a full page together with everything before it: equal keys, equal rows. */
typedef struct mla_page_key {
  uint64_t high;
  uint64_t low;
} mla_page_key;

/* Where the usable pages are. */
typedef struct mla_page_counts {
  size_t struct_size;
  int64_t free;
  int64_t owned;    /* held by one stream */
  int64_t shared;   /* held by several, or by streams and the prefix index */
  int64_t cached;   /* held by the prefix index alone: taken back when pages run out */
  int64_t reserved; /* given to an admitted or pre-admitted step, not yet filled */
} mla_page_counts;

/* One stream's part of a plan. */
typedef struct mla_kv_view {
  size_t struct_size;
  uint64_t request;
  const char* label;
  const int32_t* pages; /* [num_pages], those that hold `length` tokens, in token order */
  int64_t num_pages;
  int64_t start;      /* tokens stored before the step: position of its first new row */
  int64_t to_compute; /* rows that the step appends */
  int64_t length;     /* start + to_compute */
} mla_kv_view;

/* One label's part of a plan: B rows, T new rows, in packed order. Host arrays, as in mla_batch;
 * valid until the next plan (of an early step: until it is promoted or dropped). */
typedef struct mla_label_plan {
  size_t struct_size;
  const char* label;
  int64_t num_rows;                /* B */
  int64_t num_new_rows;            /* T */
  const int32_t* qo_indptr;        /* [B + 1] */
  const int32_t* kv_indptr;        /* [B + 1] */
  const int32_t* kv_indices;       /* [num_kv_indices] */
  int64_t num_kv_indices;          /* kv_indptr[B] */
  const int32_t* kv_len;           /* [B], new rows included */
  const int32_t* kv_last_page_len; /* [B], 0 for a stream without tokens */
  const int64_t* slots;            /* [num_slots], where each new row lands; -1 past T */
  int64_t num_slots;               /* T, or the bucket's tokens */
  const void* views;               /* for mla_label_plan_view */
} mla_label_plan;

/* options null: all defaults. The resource alone decides over the pool's pages: a second one, while
 * it lives, is refused with MLA_INVALID_STATE. */
MLA_API mla_status mla_kv_resource_create(mla_pool* pool, const mla_kv_options* options,
                                          mla_kv_resource** kv) MLA_NOEXCEPT;
MLA_API void mla_kv_resource_destroy(mla_kv_resource* kv) MLA_NOEXCEPT;

/* The key of the page after `previous` (null: the first page) whose content `ids` name: the token
 * ids in it. Not a cryptographic hash. */
MLA_API mla_status mla_chain_page_key(const mla_page_key* previous, const uint64_t* ids,
                                      int64_t num_ids, mla_page_key* key) MLA_NOEXCEPT;

/* Makes an empty stream and attaches the longest known prefix of its first num_tokens tokens, at
 * most num_tokens - 1 of them: the last row of a known prompt is still computed.
 * page_keys   [num_page_keys], of the stream's pages from the first on; may reach past num_tokens
 * num_stored  gets the tokens that are stored already; may be null */
MLA_API mla_status mla_kv_resource_open(mla_kv_resource* kv, mla_kv_stream stream,
                                        int64_t num_tokens, const mla_page_key* page_keys,
                                        int64_t num_page_keys, int64_t* num_stored) MLA_NOEXCEPT;
/* Adds the keys of the pages after those whose keys are known. */
MLA_API mla_status mla_kv_resource_add_page_keys(mla_kv_resource* kv, mla_kv_stream stream,
                                                 const mla_page_key* page_keys,
                                                 int64_t num_page_keys) MLA_NOEXCEPT;
/* Makes `target` a stream with the content of `source`; pages are shared until one appends. */
MLA_API mla_status mla_kv_resource_fork(mla_kv_resource* kv, mla_kv_stream source,
                                        mla_kv_stream target) MLA_NOEXCEPT;
/* Takes back the last num_tokens tokens; more than is stored is an error. */
MLA_API mla_status mla_kv_resource_trim(mla_kv_resource* kv, mla_kv_stream stream,
                                        int64_t num_tokens) MLA_NOEXCEPT;
/* Ends every stream of the request. */
MLA_API mla_status mla_kv_resource_remove(mla_kv_resource* kv, uint64_t request) MLA_NOEXCEPT;
/* Empties the prefix index. */
MLA_API mla_status mla_kv_resource_drop_prefixes(mla_kv_resource* kv) MLA_NOEXCEPT;

/* *is_open becomes 1 or 0. */
MLA_API mla_status mla_kv_resource_contains(const mla_kv_resource* kv, mla_kv_stream stream,
                                            int32_t* is_open) MLA_NOEXCEPT;
/* Tokens stored, without those of the current step. */
MLA_API mla_status mla_kv_resource_length(const mla_kv_resource* kv, mla_kv_stream stream,
                                          int64_t* num_tokens) MLA_NOEXCEPT;
/* Pages held, the reserved ones included. Valid until the next call that changes something. */
MLA_API mla_status mla_kv_resource_pages(const mla_kv_resource* kv, mla_kv_stream stream,
                                         const int32_t** pages, int64_t* num_pages) MLA_NOEXCEPT;

/* Usable pages; those held by nobody; those held by the prefix index alone. 0 for null. */
MLA_API int64_t mla_kv_resource_num_pages(const mla_kv_resource* kv) MLA_NOEXCEPT;
MLA_API int64_t mla_kv_resource_free_pages(const mla_kv_resource* kv) MLA_NOEXCEPT;
MLA_API int64_t mla_kv_resource_cached_pages(const mla_kv_resource* kv) MLA_NOEXCEPT;

/* Proves that every page is free, owned, shared, cached or reserved and that each reference count
 * equals its holders; else MLA_INVALID_STATE naming the page. Cost grows with the pool. counts may
 * be null. */
MLA_API mla_status mla_kv_resource_check(const mla_kv_resource* kv,
                                         mla_page_counts* counts) MLA_NOEXCEPT;

/* One label of the plan in use; MLA_INVALID_STATE where there is none. */
MLA_API mla_status mla_kv_resource_label_plan(const mla_kv_resource* kv, const char* label,
                                              mla_label_plan* plan) MLA_NOEXCEPT;
/* Row `row` of a label plan that is valid, 0 .. num_rows - 1. */
MLA_API mla_status mla_label_plan_view(const mla_label_plan* plan, int64_t row,
                                       mla_kv_view* view) MLA_NOEXCEPT;

/* Scatters the label's new rows, in packed order, to their slots in one layer. Between the step's
 * plan and its end, else MLA_INVALID_STATE; blocks until done on the CPU.
 * ckv, kpe  [n, ...] as mla_pool_append takes them; n is T, or the bucket's tokens; in a capture it
 *           must be the bucket's, since later plans of up to as many are replayed */
MLA_API mla_status mla_kv_resource_write(mla_kv_resource* kv, int32_t layer, const char* label,
                                         const mla_tensor* ckv, const mla_tensor* kpe,
                                         void* stream) MLA_NOEXCEPT;
/* Where the label's new rows go, [the bucket's tokens] int64 on the pool's device and -1 past T:
 * for those who scatter rows themselves. Each bucket, slot and label has one address, whose
 * contents follow later plans; what is queued on `stream` after the call may read them, and a
 * replay after mla_step_runner_order_replay. On the CPU they are the label plan's, valid as long.
 * Where nothing is planned, or without a bucket on another device, MLA_INVALID_STATE. */
MLA_API mla_status mla_kv_resource_slots_buf(mla_kv_resource* kv, const char* label,
                                             mla_tensor* buffer, void* stream) MLA_NOEXCEPT;

#ifdef __cplusplus
}
#endif
/* NOLINTEND(readability-identifier-naming,modernize-use-using) */
