#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mla/export.hpp"
#include "mla/step.hpp"

namespace mla {

using RequestId = uint64_t;

/// How many pages one segment lacks.
struct Shortage {
  RequestId request = 0;
  std::string label{};
  int64_t pages = 0;
};

/// The answer of admit. Pages are given to the segments in their order; those for which they did
/// not suffice are listed.
struct AdmitResult {
  int64_t pages_short = 0;  ///< 0: admitted
  std::vector<Shortage> shortages{};

  explicit operator bool() const { return pages_short == 0; }
};

/// Something that an engine's steps need and that is planned on the host before a step runs: the
/// KV pages, the attention over them, or what an engine adds. A StepRunner drives resources:
///
///   step N            admit, plan, (the model runs), commit; or abandon
///   step N+1, early   pre_admit, plan with is_preplan; both while step N still runs
///
/// The step's next admit and ordinary plan then find the work done. A step that was planned early
/// and does not come after all is dropped by clear_preplan, or by the next plan of another step.
///
/// Calls on one resource must not overlap, with one exception: pre_admit, a pre-plan and
/// clear_preplan may run on one thread while another thread runs step N, that is, calls what the
/// resource offers for use between plan and commit.
class MLA_API Resource {
 public:
  virtual ~Resource();

  /// Its name among a runner's resources, in steps and in plan results.
  virtual const std::string& key() const noexcept = 0;
  /// Keys of the resources that must be admitted and planned before it.
  virtual std::vector<std::string> depends_on() const { return {}; }
  virtual bool supports_preplan() const noexcept { return false; }
  /// Whether an engine that never pre-plans must still alternate slots: true where a plan writes
  /// memory that the run of the plan before it may still read.
  virtual bool force_double_buffer() const noexcept { return false; }

  /// Throws InvalidArgument where the resource could plan no step into this slot and bucket. A
  /// runner asks every resource before the first one plans, so that nothing is sized for a lease
  /// that another refuses.
  virtual void check_lease(const SlotLease& /*lease*/) const {}
  /// Reserves what the step needs, or says what is short and changes nothing.
  virtual AdmitResult admit(const Step& step);
  /// Ends an admitted or planned step without it.
  virtual void abandon() {}
  /// Plans the admitted step. The result is valid until the next ordinary plan.
  virtual const ResourcePlan& plan(const Step& step, const PlanContext& context) = 0;
  /// Ends the planned step: it was run.
  virtual void commit() {}

  /// As admit, for the step after the one in flight and on top of what that holds.
  virtual AdmitResult pre_admit(const Step& step);
  /// Drops what pre_admit and a pre-plan made. Does nothing where there is none.
  virtual void clear_preplan() {}

  /// To be called for the stream of a replay before every replay of a graph that captured a run of
  /// this step; see PagedAttention::order_replay.
  virtual void order_replay(Stream /*stream*/) {}
  /// Told once, before the first capture: no lease will be larger.
  virtual void size_graph_buffers(const GraphShape& /*largest*/) {}
};

}  // namespace mla
