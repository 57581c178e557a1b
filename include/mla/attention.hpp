#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "mla/batch.hpp"
#include "mla/executor.hpp"
#include "mla/export.hpp"
#include "mla/geometry.hpp"
#include "mla/merge.hpp"

namespace mla {

/// The most that one plan may hold. Index buffers and scratch are sized from it at creation.
struct Limits {
  int64_t max_rows = 1024;             ///< requests, at most 2^20
  int64_t max_tokens = 16384;          ///< query tokens, at most 2^31 - 1
  int64_t max_listed_pages = 1 << 20;  ///< entries of kv_indices, at most 2^31 - 1
};

/// The fixed shape that a captured graph serves: plans may have fewer rows and tokens, outputs of
/// the bucket's other tokens are written as empty.
struct Bucket {
  int64_t num_rows = 0;    ///< at least 1
  int64_t num_tokens = 0;  ///< at least 1

  bool operator==(const Bucket&) const = default;
};

/// How a request's keys are cut into parts. At most one of the two may be set; with neither the
/// planner decides from the whole batch.
struct SplitPolicy {
  /// > 0: parts of this many tokens, counted from the request's first key, so that a request's
  /// bits do not depend on the rest of the batch. At most kMaxSplits parts for a request whose rows
  /// (queries x heads) fit in one tile, at most kMaxSplits over its tiles for a larger one; where
  /// there would be more, the parts are of the next multiple of this size that fits.
  int32_t fixed_tokens = 0;
  /// > 0: this many parts for every row (fewer where there are fewer keys), at most kMaxSplits.
  int32_t forced_count = 0;
};

struct AttentionConfig {
  Geometry geometry{};
  int64_t num_pages = 0;  ///< pages of the pool; a plan may list 0 .. num_pages - 1
  Device device{};
  std::optional<CacheStrides> strides{};  ///< of the caches that run will get; none: one pool layer
  Limits limits{};
  std::optional<Bucket> bucket{};  ///< a lease: rows and tokens fixed for the object's life
  bool capture = false;            ///< runs will be captured; refused by the CPU
  SplitPolicy splits{};
  std::string kernel{};                  ///< a kernel of the device's table; empty: the first fit
  std::shared_ptr<Executor> executor{};  ///< CPU only; none: Executor::shared()
  /// Scratch of at least scratch_bytes(config), 64-byte aligned, on the device; its contents never
  /// matter and it must outlive the object. Empty: the object owns its scratch.
  std::span<std::byte> scratch{};
};

struct PlanOptions {
  /// Multiplies q.k before the softmax; of the ORIGINAL head width (192^-0.5 for DeepSeek, times
  /// the YaRN factor squared). Never derived from the latent width, so it has no default: NaN, 0,
  /// negative and infinite values are refused.
  float sm_scale = std::numeric_limits<float>::quiet_NaN();
  /// Query j of n, of a request with m keys, sees keys 0 .. m - n + j; otherwise all m.
  bool causal = true;
  LseBase lse_base = LseBase::kNatural;
};

/// Tensors of one run (T query tokens, H heads); the last dimension of each is contiguous (lse: any
/// strides), other strides free; out and lse overlap no other. Where T is 0 nothing is looked at.
struct RunArgs {
  ConstTensor<3> q_nope{};     ///< [T, H, kv_lora_rank], absorbed
  ConstTensor<3> q_pe{};       ///< [T, H, qk_rope_head_dim]; ignored at rope width 0
  LatentViews cache{};         ///< one layer; strides as declared at creation
  Tensor<3> out{};             ///< [T, H, kv_lora_rank]
  TensorView<float, 2> lse{};  ///< [T, H] fp32; null data where it is not wanted
};

/// What the current plan holds.
struct PlanInfo {
  int64_t num_rows = 0;
  int64_t num_tokens = 0;
  int64_t num_tiles = 0;
  int64_t num_splits = 0;    ///< the most parts that one row's keys are cut into
  size_t partial_bytes = 0;  ///< scratch that this plan's partial results take
};

/// The plan/run object of paged MLA attention:
///   scores = (q_nope . ckv + q_pe . kpe) * sm_scale;  out = softmax(scores) @ ckv
/// over each request's own keys, with fp32 accumulation. A row that sees no key gets zeros and LSE
/// -inf. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
///
/// One object serves one stream of plans; two objects are independent and may run at once. Calls
/// on one object must not overlap.
///
/// Streams that plan, run and order_replay are given must live until the next plan has returned, or
/// as long as the object where there is none: that plan is put behind what they have queued.
class MLA_API PagedAttention {
 public:
  /// Chooses the kernel and takes all memory that plans within the limits need.
  /// Throws InvalidArgument (a value out of range, no kernel for the shape, capture on the CPU,
  /// scratch smaller than scratch_bytes(config): the message gives both; limits whose memory is not
  /// to be had), CudaError.
  explicit PagedAttention(const AttentionConfig& config);
  ~PagedAttention();
  PagedAttention(PagedAttention&&) noexcept;
  PagedAttention& operator=(PagedAttention&&) noexcept;

  /// Exact bytes of scratch for every plan within config.limits (or its bucket); config.scratch is
  /// not read. Throws InvalidArgument as the constructor.
  static size_t scratch_bytes(const AttentionConfig& config);

  /// Checks every index array, computes the schedule and stages it. Host arrays only; they may be
  /// changed once it returns. Throws InvalidArgument naming the argument and the entry; the
  /// previous plan then stays usable. InvalidState: the stream is in a capture, or that of the
  /// latest run is and the plan is on another. CudaError. Does not allocate after the first plans
  /// of a size (std::bad_alloc until then). Waits only where the copies of four earlier plans are
  /// all in flight: until the first of them is done.
  void plan(const Batch& batch, const PlanOptions& options, Stream stream = {});

  /// Attends with the current plan; any number of times. T must be the plan's tokens or, under a
  /// lease, the bucket's; in a capture it must be the bucket's, since later plans of up to as many
  /// are replayed into the same tensors. Writes every row of out (and lse) and no other byte.
  /// Checks of constant cost; allocates nothing. On the CPU it returns when the output is there.
  /// Throws InvalidState (no plan; a stream in a capture where the object was created without
  /// `capture`; on another stream while that of the run before it is in a capture),
  /// InvalidArgument (a tensor does not match the plan), CudaError (launch).
  void run(const RunArgs& args, Stream stream = {});

  /// To be called for the stream of a replay before every replay of a graph that captured runs of
  /// this object: orders it behind the last plan's copy, and later plans behind it. Our graph
  /// runner does; an engine that launches its graphs by itself must, or else plan and replay on one
  /// stream. Costs nothing where they are on one stream; does nothing on the CPU. Throws CudaError,
  /// InvalidState as run.
  void order_replay(Stream stream);

  /// Name of the kernel that serves this object, as in supports().
  const std::string& kernel() const noexcept;
  /// Throws InvalidState before the first plan.
  PlanInfo info() const;
  /// The current plan's [rows + 1] query offsets and [rows] key counts on the device, int32. Under
  /// a lease they have the bucket's rows and fixed addresses. Throws InvalidState before a plan.
  TensorView<const int32_t, 1> qo_indptr_buf() const;
  TensorView<const int32_t, 1> kv_len_buf() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
