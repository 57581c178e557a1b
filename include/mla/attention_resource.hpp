#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/attention.hpp"
#include "mla/export.hpp"
#include "mla/pool.hpp"
#include "mla/resource.hpp"

namespace mla {

/// Query rows of one stream in one pass. The i-th entry of a label belongs to the i-th row of that
/// label in the KV resource's plan.
struct QuerySegment {
  std::string_view label = "main";
  int32_t num_queries = 0;
  /// How many of the rows that the step appends are seen, the first ones; none: all of them.
  std::optional<int32_t> num_appended{};

  bool operator==(const QuerySegment&) const = default;
};

/// One attention over the step's streams.
struct AttentionPass {
  bool causal = true;
  /// The queries attend to what was stored before the step, all of it, whatever `causal` says, and
  /// to none of the rows that the step appends. Needs `segments`.
  bool context_only = false;
  /// Query counts. Empty: of every label, as many queries as the step appends rows. Otherwise the
  /// pass is planned for the labels named here, and each must have as many entries as rows.
  std::vector<QuerySegment> segments{};
};

/// What a step asks of the attention: one pass, or several over the same streams at different
/// lengths (a draft chain: pass i has one query a row and sees i + 1 of the appended rows). Every
/// label that the KV resource plans must be in at least one pass.
struct MLA_API AttentionStep : ResourceStep {
  static constexpr const char* kKind = "AttentionStep";
  AttentionStep() : ResourceStep(kKind) {}

  std::vector<AttentionPass> passes = std::vector<AttentionPass>(1);
};

struct AttentionOptions {
  std::string key = "attention";
  Geometry geometry{};  ///< num_heads: query heads of this rank; the rest must be the pool's
  /// Softmax scale of the original head width; no default, see PlanOptions::sm_scale.
  float sm_scale = std::numeric_limits<float>::quiet_NaN();
  LseBase lse_base = LseBase::kNatural;
  Limits limits{};  ///< of one label's plan; buckets must lie within them
  SplitPolicy splits{};
  bool capture = false;                  ///< runs under a bucket will be captured
  std::string kernel{};                  ///< see AttentionConfig
  std::shared_ptr<Executor> executor{};  ///< see AttentionConfig
  /// Scratch of AttentionResource::scratch_bytes(pool, options), 64-byte aligned, on the pool's
  /// device, shared by all plans: then no two of them may run at once. Empty: each owns its own.
  std::span<std::byte> scratch{};
};

/// The plans of one step: a PagedAttention for every label and pass.
struct MLA_API AttentionPlan : ResourcePlan {
  static constexpr const char* kKind = "AttentionPlan";
  AttentionPlan() : ResourcePlan(kKind) {}

  struct Entry {
    std::string_view label;
    int32_t pass = 0;
    PagedAttention* attention = nullptr;
  };
  std::vector<Entry> entries;
  uint64_t id = 0;          ///< different for every plan; an early one keeps it when promoted
  uint64_t kv_plan_id = 0;  ///< the KV plan that it was made from
};

/// Tensors of one attention (T query tokens, H heads), as in RunArgs, and which it is.
struct AttendArgs {
  ConstTensor<3> q_nope{};                  ///< [T, H, kv_lora_rank], absorbed
  ConstTensor<3> q_pe{};                    ///< [T, H, qk_rope_head_dim]; ignored at rope width 0
  Tensor<3> out{};                          ///< [T, H, kv_lora_rank]
  TensorView<float, 2> lse{};               ///< [T, H] fp32; null data where it is not wanted
  std::optional<std::string_view> label{};  ///< none: the cursor's
  std::optional<int32_t> layer{};           ///< of the pool; none: the cursor's
  std::optional<LatentViews> cache{};       ///< in place of the pool's layer, of the same strides
  int32_t pass = 0;
};

/// Paged MLA attention as a resource: plans every label that the KV resource planned this step and
/// runs the plans, once a layer.
///
/// Plan objects are kept for the resource's life: eager ones one for each (slot, label, pass),
/// under a bucket one for each (bucket, slot, label, pass), whose buffers keep their addresses. The
/// first plan of each makes it, which allocates on the device.
///
/// A step may be planned early, into another slot or bucket than that of the plan in use, which
/// stays as it is. The next ordinary plan promotes it, without work, if the lease, the passes and
/// the KV resource's plan are the very same; otherwise it is dropped and the step planned afresh.
class MLA_API AttentionResource final : public Resource {
 public:
  /// `pool` is lent and must outlive the resource; `kv_key` is the key of the resource that plans
  /// its pages and publishes a KvPlan.
  /// Throws InvalidArgument: sm_scale or num_heads missing, a geometry that is not the pool's, no
  /// kernel for it, capture on the CPU, scratch too small (the message gives both sizes).
  AttentionResource(const LatentPool& pool, std::string kv_key, const AttentionOptions& options);
  ~AttentionResource() override;

  /// The geometry that a pool has for `num_heads` query heads.
  static Geometry geometry_of(const LatentPool& pool, int32_t num_heads);
  /// Exact bytes of scratch that serve every plan within options.limits.
  static size_t scratch_bytes(const LatentPool& pool, const AttentionOptions& options);

  const std::string& key() const noexcept override;
  std::vector<std::string> depends_on() const override;
  bool supports_preplan() const noexcept override { return true; }
  /// False: a plan and the runs before it are ordered by the library.
  bool force_double_buffer() const noexcept override { return false; }

  /// Declares a new step: runs with the plan of the last one are refused from here on.
  AdmitResult admit(const Step& step) override;
  /// Ends the step: its plan can no longer be run.
  void abandon() override;
  /// Throws InvalidArgument (no KvPlan under kv_key, one of another page size, segments that do not
  /// pair with its rows, a label in no pass, more than the limits or the bucket; a pre-plan into
  /// the slot and bucket of the plan in use): the previous plan stays usable. InvalidState (a
  /// second pre-plan), and what PagedAttention throws when it is made and planned.
  const AttentionPlan& plan(const Step& step, const PlanContext& context) override;
  void clear_preplan() override;
  void order_replay(Stream stream) override;
  void check_lease(const SlotLease& lease) const override;
  /// Buckets may then have at most this shape. Without the call: options.limits.
  void size_graph_buffers(const GraphShape& largest) override;

  /// Sets the label and the layer that run takes by default. Every plan resets them to "main", 0.
  /// Throws InvalidState (nothing planned), InvalidArgument (a label that the current plan has in
  /// no pass, a layer that the pool has not): the cursor then stays.
  void set_cursor(std::string_view label, int32_t layer);
  /// Attends with the current plan of a label and pass; see PagedAttention::run.
  /// Throws InvalidState (nothing planned, a plan older than the last declared step),
  /// InvalidArgument (label and pass are not in the plan, layer, tensors).
  void run(const AttendArgs& args, Stream stream = {});

  /// Buffers of the current plan on the device; see PagedAttention. For a context-only pass
  /// kv_len is what was stored: where the row's queries and the appended rows start.
  TensorView<const int32_t, 1> qo_indptr_buf(std::string_view label = "main",
                                             int32_t pass = 0) const;
  TensorView<const int32_t, 1> kv_len_buf(std::string_view label = "main", int32_t pass = 0) const;

  /// Writes to out[i] row qo_indptr[i + 1] - 1 of `hidden` for each row i of the plan, the
  /// bucket's under a lease; zeros for a row without queries. On the device; can be captured under
  /// a bucket. hidden [T, D], T as in PagedAttention::run; out [rows, D]: one dtype, last dimension
  /// contiguous, not overlapping.
  /// Throws InvalidState (nothing planned; a stream in a capture and a plan under no bucket),
  /// InvalidArgument (label and pass are not in the plan, tensors).
  void select_last_hidden(const ConstTensor<2>& hidden, const Tensor<2>& out,
                          std::string_view label = "main", int32_t pass = 0,
                          Stream stream = {}) const;

  /// Name of the kernel that serves the plans.
  const std::string& kernel() const noexcept;
  /// False where the reference serves the plans.
  bool uses_kernel() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
