#include "step.hpp"

#include <tvm/ffi/container/array.h>

#include <vector>

#include "config.hpp"
#include "export.hpp"
#include "mla/attention_resource.hpp"
#include "resources.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

namespace {

using Names = ffi::Array<ffi::String>;

/// Keeps the names with the step, and gives the views that its parts hold.
std::vector<std::string_view> keep(OwnedStep& step, const Names& names) {
  std::vector<std::string_view> views;
  views.reserve(names.size());
  for (const ffi::String& name : names) views.emplace_back(step.names.emplace_back(name));
  return views;
}

/// source request, source label, target request, target label; labels by their number.
std::vector<Fork> forks_from(const Fields& fields, const std::vector<std::string_view>& labels) {
  std::vector<Fork> forks;
  for (size_t i = 0; i < fields.size(); i += 4) {
    forks.push_back({.source = {static_cast<RequestId>(fields[i]), labels[fields[i + 1]]},
                     .target = {static_cast<RequestId>(fields[i + 2]), labels[fields[i + 3]]}});
  }
  return forks;
}

StepBox step_make() { return StepBox::make({}); }

/// segments: columns of requests, labels and spans. combined: for each name its number, how many
/// labels, and those.
void step_add_kv(const StepBox& step, const ffi::String& key, const Names& names,
                 ffi::TensorView requests, ffi::TensorView labels, ffi::TensorView spans,
                 const Fields& forks_before, const Fields& forks_after, const Fields& combined,
                 const Fields& planned) {
  constexpr const char* kWhere = "KvStep";
  auto& part = (*step).step.part<KvStep>(std::string(key));
  const std::vector<std::string_view> known = keep(*step, names);
  const auto request = host_span_of<int64_t>(requests, {"requests", kWhere});
  const auto label = host_span_of<int32_t>(labels, {"labels", kWhere});
  const auto span = host_span_of<int32_t>(spans, {"spans", kWhere});
  for (size_t i = 0; i < request.size(); ++i) {
    part.segments.push_back(
        {.request = static_cast<RequestId>(request[i]), .label = known[label[i]], .span = span[i]});
  }
  part.forks_before = forks_from(forks_before, known);
  part.forks_after = forks_from(forks_after, known);
  for (size_t i = 0; i < combined.size();) {
    CombinedLabel& group = part.combined.emplace_back();
    group.name = known[combined[i]];
    const auto end = i + 2 + static_cast<size_t>(combined[i + 1]);
    for (i += 2; i < end; ++i) group.labels.push_back(known[combined[i]]);
  }
  for (const int64_t number : planned) part.labels.push_back(known[number]);
}

/// passes: for each causal, context_only, how many segments, and label, queries and appended rows
/// (-1: all) of those.
void step_add_attention(const StepBox& step, const ffi::String& key, const Names& names,
                        const Fields& passes) {
  constexpr const char* kWhere = "AttentionStep";
  auto& part = (*step).step.part<AttentionStep>(std::string(key));
  const std::vector<std::string_view> known = keep(*step, names);
  part.passes.clear();
  for (size_t i = 0; i < passes.size();) {
    AttentionPass& pass = part.passes.emplace_back();
    pass.causal = passes[i] != 0;
    pass.context_only = passes[i + 1] != 0;
    const auto end = i + 3 + 3 * static_cast<size_t>(passes[i + 2]);
    for (i += 3; i < end; i += 3) {
      QuerySegment& segment = pass.segments.emplace_back();
      segment.label = known[passes[i]];
      segment.num_queries = narrow(passes[i + 1], {"num_queries", kWhere});
      if (passes[i + 2] >= 0) {
        segment.num_appended = narrow(passes[i + 2], {"num_appended", kWhere});
      }
    }
  }
}

/// slot, then of the bucket walk, rows and tokens where there is one.
SlotLease lease_from(int64_t slot, const ffi::Optional<ffi::String>& walk, int64_t num_rows,
                     int64_t num_tokens) {
  SlotLease lease{.slot = narrow(slot, {"lease.slot", "StepRunner"})};
  if (walk.has_value()) {
    lease.bucket = GraphBucket{.walk = std::string(*walk),
                               .shape = {.num_rows = num_rows, .num_tokens = num_tokens}};
  }
  return lease;
}

template <class T>
Resource* as(const ffi::ObjectRef& object) {
  const auto* box = object.as<BoxObj<T>>();
  return box == nullptr ? nullptr : &const_cast<BoxObj<T>*>(box)->value;
}

RunnerBox runner_make(const ffi::Array<ffi::ObjectRef>& resources) {
  std::vector<Resource*> order;
  std::vector<ffi::ObjectRef> lenders;
  for (const ffi::ObjectRef& object : resources) {
    Resource* resource = as<KvResource>(object);
    if (resource == nullptr) resource = as<AttentionResource>(object);
    if (resource == nullptr) {
      throw_invalid({"resources", "StepRunner", "KvResource and AttentionResource objects",
                     object->GetTypeKey()});
    }
    order.push_back(resource);
    lenders.push_back(object);
  }
  return RunnerBox::make(std::move(lenders), std::span<Resource* const>(order));
}

Answer runner_admit(const RunnerBox& runner, const StepBox& step) {
  return answer_of((*runner).admit((*step).step));
}

void runner_plan(const RunnerBox& runner, const StepBox& step, int64_t slot,
                 const ffi::Optional<ffi::String>& walk, int64_t num_rows, int64_t num_tokens,
                 int64_t stream) {
  (*runner).plan((*step).step, lease_from(slot, walk, num_rows, num_tokens), stream_from(stream));
}

Answer runner_pre_admit(const RunnerBox& runner, const StepBox& step) {
  return answer_of((*runner).pre_admit((*step).step));
}

void runner_pre_plan(const RunnerBox& runner, const StepBox& step, int64_t slot,
                     const ffi::Optional<ffi::String>& walk, int64_t num_rows, int64_t num_tokens,
                     int64_t stream) {
  (*runner).pre_plan((*step).step, lease_from(slot, walk, num_rows, num_tokens),
                     stream_from(stream));
}

void runner_commit(const RunnerBox& runner) { (*runner).commit(); }
void runner_abandon(const RunnerBox& runner) { (*runner).abandon(); }
void runner_clear_preplan(const RunnerBox& runner) { (*runner).clear_preplan(); }

void runner_order_replay(const RunnerBox& runner, int64_t stream) {
  (*runner).order_replay(stream_from(stream));
}

/// shapes: rows, tokens and listed pages of each.
void runner_size_graph_buffers(const RunnerBox& runner, const Fields& shapes) {
  std::vector<GraphShape> sizes;
  for (size_t i = 0; i < shapes.size(); i += 3) {
    sizes.push_back({shapes[i], shapes[i + 1], shapes[i + 2]});
  }
  (*runner).size_graph_buffers(sizes);
}

}  // namespace

MLA_PY_EXPORT(step_make)
MLA_PY_EXPORT(step_add_kv)
MLA_PY_EXPORT(step_add_attention)
MLA_PY_EXPORT(runner_make)
MLA_PY_EXPORT(runner_admit)
MLA_PY_EXPORT(runner_plan)
MLA_PY_EXPORT(runner_pre_admit)
MLA_PY_EXPORT(runner_pre_plan)
MLA_PY_EXPORT(runner_commit)
MLA_PY_EXPORT(runner_abandon)
MLA_PY_EXPORT(runner_clear_preplan)
MLA_PY_EXPORT(runner_order_replay)
MLA_PY_EXPORT(runner_size_graph_buffers)

}  // namespace mla::py
