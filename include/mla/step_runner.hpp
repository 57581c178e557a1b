#pragma once

#include <memory>
#include <span>
#include <vector>

#include "mla/export.hpp"
#include "mla/resource.hpp"
#include "mla/step.hpp"

namespace mla {

/// Drives a set of resources through the steps of an engine, in the order of their dependencies.
///
///   StepRunner runner({&kv, &attention});
///   if (AdmitResult r = runner.admit(step); !r) { /* make room, try again */ }
///   runner.plan(step, lease);
///   ... the model runs; meanwhile, on another thread if wanted:
///       if (runner.pre_admit(next)) runner.pre_plan(next, other_lease);
///   runner.commit();
///   runner.admit(next); runner.plan(next, other_lease);   // finds the work done
///
/// A step goes admit, plan, commit; or abandon after either of the first two. Calls in another
/// order throw InvalidState. What may overlap: pre_admit, pre_plan and clear_preplan of one thread
/// with the run of the step in flight on another; nothing else.
class MLA_API StepRunner {
 public:
  /// The resources are lent and must outlive the runner.
  /// Throws InvalidArgument naming the keys: null, a key twice, a dependency that is not there, a
  /// cycle, a resource that pre-plans over one that does not.
  explicit StepRunner(std::span<Resource* const> resources);
  StepRunner(std::initializer_list<Resource*> resources);
  ~StepRunner();
  StepRunner(StepRunner&&) noexcept;
  StepRunner& operator=(StepRunner&&) noexcept;

  /// The resources in the order in which they are admitted and planned.
  std::span<Resource* const> order() const noexcept;

  /// Admits the step in every resource. Where one refuses, those before it are abandoned, a step
  /// admitted early with them, and its answer is returned: how many pages are short, and for whom.
  /// Where the first refuses, nothing has changed.
  /// Throws InvalidArgument (a part for a key that no resource has; what the resources refuse, and
  /// then nothing is admitted), InvalidState.
  AdmitResult admit(const Step& step);
  /// Plans the admitted step, the same that admit got, in every resource, and publishes each plan
  /// to those after it. Every resource checks the lease before the first one plans. Results are
  /// valid until the next plan. Where a resource throws, the step is abandoned, an early one with
  /// it.
  const PlanResults& plan(const Step& step, const SlotLease& lease = {}, Stream stream = {});
  /// Ends the planned step; it is in every resource.
  void commit();
  /// Ends the admitted or planned step without it, and drops a step planned early.
  void abandon();

  /// Reserves the next step on top of the one in flight. A refusal changes nothing.
  /// Throws InvalidState (one is pre-admitted already, an admitted step is not planned yet).
  AdmitResult pre_admit(const Step& step);
  /// Plans the pre-admitted step in every resource that pre-plans; the plan in use stays as it is.
  /// Where a resource throws, the early step is dropped everywhere.
  /// Throws InvalidState (not pre-admitted, planned early already).
  const PlanResults& pre_plan(const Step& step, const SlotLease& lease, Stream stream = {});
  /// Drops the step that was admitted or planned early, if any.
  void clear_preplan();

  /// The lease of the planned step in flight; null where nothing is planned.
  const SlotLease* planned_lease() const noexcept;
  /// Plans of the step in flight. Throws InvalidState (nothing planned).
  const PlanResults& results() const;
  /// Plans of the step that was planned early. Throws InvalidState (none is).
  const PlanResults& early_results() const;

  /// Resource::order_replay of every resource.
  void order_replay(Stream stream);

  /// Whether the engine must alternate two slots even if it never pre-plans.
  bool force_double_buffer() const noexcept;
  /// Sizes every resource's graph buffers at the largest of the shapes; once. A later call within
  /// those does nothing. Throws InvalidArgument (no or negative shapes), InvalidState (a larger
  /// shape than the buffers have: graphs may hold their addresses).
  void size_graph_buffers(std::span<const GraphShape> shapes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
