#include "mla/step_runner.hpp"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "engine/text.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

using engine::quoted;

constexpr const char* kCreate = "StepRunner";

[[noreturn]] void refuse(std::string what, std::string expected, std::string got) {
  throw_invalid({.what = std::move(what),
                 .where = kCreate,
                 .expected = std::move(expected),
                 .got = std::move(got)});
}

void check_keys(std::span<Resource* const> resources) {
  for (size_t i = 0; i < resources.size(); ++i) {
    if (resources[i] == nullptr) {
      refuse("resources[" + std::to_string(i) + "]", "a resource", "null");
    }
    for (size_t j = 0; j < i; ++j) {
      if (resources[j]->key() != resources[i]->key()) continue;
      refuse("key of resources[" + std::to_string(i) + "]",
             "one that no other has, unlike resources[" + std::to_string(j) + "]",
             quoted(resources[i]->key()));
    }
  }
}

struct Node {
  Resource* resource = nullptr;
  std::vector<Resource*> dependencies;
};

std::vector<Node> resolve(std::span<Resource* const> resources) {
  std::vector<Node> nodes;
  for (Resource* resource : resources) {
    Node node{.resource = resource, .dependencies = {}};
    for (const std::string& key : resource->depends_on()) {
      const auto found = std::find_if(resources.begin(), resources.end(),
                                      [&](const Resource* other) { return other->key() == key; });
      if (found == resources.end()) {
        refuse("dependency of " + quoted(resource->key()), "the key of one of the resources",
               quoted(key));
      }
      if (resource->supports_preplan() && !(*found)->supports_preplan()) {
        refuse("dependency of " + quoted(resource->key()) + ", which pre-plans",
               "a resource that pre-plans too", quoted(key));
      }
      node.dependencies.push_back(*found);
    }
    nodes.push_back(std::move(node));
  }
  return nodes;
}

// Each resource after all that it depends on; otherwise as they were given.
std::vector<Resource*> sort(std::vector<Node> nodes) {
  std::vector<Resource*> order;
  const auto placed = [&](const Resource* resource) {
    return std::find(order.begin(), order.end(), resource) != order.end();
  };
  while (!nodes.empty()) {
    const auto ready = std::find_if(nodes.begin(), nodes.end(), [&](const Node& node) {
      return std::all_of(node.dependencies.begin(), node.dependencies.end(), placed);
    });
    if (ready == nodes.end()) {
      std::string keys;
      for (const Node& node : nodes) {
        keys += (keys.empty() ? "" : ", ") + quoted(node.resource->key());
      }
      refuse("dependencies", "no cycle", "one among, or before, " + keys);
    }
    order.push_back(ready->resource);
    nodes.erase(ready);
  }
  return order;
}

enum class Phase { kIdle, kAdmitted, kPlanned };
enum class EarlyPhase { kNone, kAdmitted, kPlanned };

constexpr const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::kAdmitted:
      return "an admitted one";
    case Phase::kPlanned:
      return "a planned one";
    case Phase::kIdle:
      break;
  }
  return "none";
}

constexpr const char* name_of(EarlyPhase phase) {
  switch (phase) {
    case EarlyPhase::kAdmitted:
      return "a pre-admitted one";
    case EarlyPhase::kPlanned:
      return "a pre-planned one";
    case EarlyPhase::kNone:
      break;
  }
  return "none";
}

}  // namespace

struct StepRunner::Impl {
  std::vector<Resource*> order;
  Phase phase = Phase::kIdle;
  EarlyPhase early = EarlyPhase::kNone;
  SlotLease lease{};  // of the planned step
  PlanResults results, early_results;
  std::optional<GraphShape> graph_shape;

  void require(bool holds, const char* where, const char* expected) const {
    if (holds) return;
    throw_state({.what = "step", .where = where, .expected = expected, .got = name_of(phase)});
  }
  void require_early(bool holds, const char* where, const char* expected) const {
    if (holds) return;
    throw_state(
        {.what = "early step", .where = where, .expected = expected, .got = name_of(early)});
  }

  void check_parts(const Step& step, const char* where) const {
    for (size_t i = 0; i < step.size(); ++i) {
      const bool known = std::any_of(order.begin(), order.end(), [&](const Resource* resource) {
        return resource->key() == step.key(i);
      });
      if (known) continue;
      throw_invalid({.what = "part of the step",
                     .where = where,
                     .expected = "the key of one of the resources",
                     .got = quoted(step.key(i))});
    }
  }

  void abandon_first(size_t count) {
    while (count > 0) order[--count]->abandon();
  }
  // Of an admission that the resource after the first `count` refused. What those did with an early
  // step is theirs to know, so that it is dropped.
  void undo_admission(size_t count) {
    if (count > 0 && early != EarlyPhase::kNone) drop_early();
    abandon_first(count);
  }
  void drop_early() {
    for (size_t i = order.size(); i > 0; --i) order[i - 1]->clear_preplan();
    early = EarlyPhase::kNone;
  }
};

StepRunner::StepRunner(std::span<Resource* const> resources) : impl_(std::make_unique<Impl>()) {
  check_keys(resources);
  impl_->order = sort(resolve(resources));
}
StepRunner::StepRunner(std::initializer_list<Resource*> resources)
    : StepRunner(std::span(resources.begin(), resources.size())) {}
StepRunner::~StepRunner() = default;
StepRunner::StepRunner(StepRunner&&) noexcept = default;
StepRunner& StepRunner::operator=(StepRunner&&) noexcept = default;

std::span<Resource* const> StepRunner::order() const noexcept { return impl_->order; }

AdmitResult StepRunner::admit(const Step& step) {
  Impl& impl = *impl_;
  impl.require(impl.phase == Phase::kIdle, "StepRunner::admit", "none");
  impl.check_parts(step, "StepRunner::admit");
  for (size_t i = 0; i < impl.order.size(); ++i) {
    AdmitResult result;
    try {
      result = impl.order[i]->admit(step);
    } catch (...) {
      impl.undo_admission(i);
      throw;
    }
    if (!result) {
      impl.undo_admission(i);
      return result;
    }
  }
  impl.phase = Phase::kAdmitted;
  return {};
}

const PlanResults& StepRunner::plan(const Step& step, const SlotLease& lease, Stream stream) {
  Impl& impl = *impl_;
  impl.require(impl.phase == Phase::kAdmitted, "StepRunner::plan", "an admitted one");
  impl.results.clear();
  try {
    for (const Resource* resource : impl.order) resource->check_lease(lease);
    for (Resource* resource : impl.order) {
      const PlanContext context{
          .lease = lease, .results = impl.results, .is_preplan = false, .stream = stream};
      impl.results.set(resource->key(), resource->plan(step, context));
    }
  } catch (...) {
    abandon();
    throw;
  }
  impl.phase = Phase::kPlanned;
  impl.lease = lease;
  impl.early = EarlyPhase::kNone;  // promoted, or dropped by the resources
  return impl.results;
}

void StepRunner::commit() {
  Impl& impl = *impl_;
  impl.require(impl.phase == Phase::kPlanned, "StepRunner::commit", "a planned one");
  for (Resource* resource : impl.order) resource->commit();
  impl.phase = Phase::kIdle;
}

void StepRunner::abandon() {
  Impl& impl = *impl_;
  impl.require(impl.phase != Phase::kIdle, "StepRunner::abandon", "an admitted or planned one");
  impl.drop_early();
  impl.abandon_first(impl.order.size());
  impl.results.clear();
  impl.phase = Phase::kIdle;
}

AdmitResult StepRunner::pre_admit(const Step& step) {
  Impl& impl = *impl_;
  impl.require(impl.phase != Phase::kAdmitted, "StepRunner::pre_admit", "a planned one, or none");
  impl.require_early(impl.early == EarlyPhase::kNone, "StepRunner::pre_admit", "none");
  impl.check_parts(step, "StepRunner::pre_admit");
  for (Resource* resource : impl.order) {
    AdmitResult result;
    try {
      result = resource->pre_admit(step);
    } catch (...) {
      impl.drop_early();
      throw;
    }
    if (!result) {
      impl.drop_early();
      return result;
    }
  }
  impl.early = EarlyPhase::kAdmitted;
  return {};
}

const PlanResults& StepRunner::pre_plan(const Step& step, const SlotLease& lease, Stream stream) {
  Impl& impl = *impl_;
  impl.require_early(impl.early == EarlyPhase::kAdmitted, "StepRunner::pre_plan",
                     "a pre-admitted one");
  impl.early_results.clear();
  try {
    for (const Resource* resource : impl.order) resource->check_lease(lease);
    for (Resource* resource : impl.order) {
      if (!resource->supports_preplan()) continue;
      const PlanContext context{
          .lease = lease, .results = impl.early_results, .is_preplan = true, .stream = stream};
      impl.early_results.set(resource->key(), resource->plan(step, context));
    }
  } catch (...) {
    impl.drop_early();
    throw;
  }
  impl.early = EarlyPhase::kPlanned;
  return impl.early_results;
}

void StepRunner::clear_preplan() { impl_->drop_early(); }

const SlotLease* StepRunner::planned_lease() const noexcept {
  return impl_->phase == Phase::kPlanned ? &impl_->lease : nullptr;
}

const PlanResults& StepRunner::results() const {
  impl_->require(impl_->phase == Phase::kPlanned, "StepRunner::results", "a planned one");
  return impl_->results;
}

const PlanResults& StepRunner::early_results() const {
  impl_->require_early(impl_->early == EarlyPhase::kPlanned, "StepRunner::early_results",
                       "a pre-planned one");
  return impl_->early_results;
}

void StepRunner::order_replay(Stream stream) {
  for (Resource* resource : impl_->order) resource->order_replay(stream);
}

bool StepRunner::force_double_buffer() const noexcept {
  return std::any_of(impl_->order.begin(), impl_->order.end(),
                     [](const Resource* resource) { return resource->force_double_buffer(); });
}

void StepRunner::size_graph_buffers(std::span<const GraphShape> shapes) {
  constexpr const char* kWhere = "StepRunner::size_graph_buffers";
  GraphShape largest;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto take = [&](const char* field, int64_t value, int64_t& most) {
      if (value < 0) {
        throw_invalid({.what = "shapes[" + std::to_string(i) + "]." + field,
                       .where = kWhere,
                       .expected = "at least 0",
                       .got = std::to_string(value)});
      }
      most = std::max(most, value);
    };
    take("num_rows", shapes[i].num_rows, largest.num_rows);
    take("num_tokens", shapes[i].num_tokens, largest.num_tokens);
    take("num_listed_pages", shapes[i].num_listed_pages, largest.num_listed_pages);
  }
  if (shapes.empty()) {
    throw_invalid({.what = "shapes", .where = kWhere, .expected = "one or more", .got = "none"});
  }
  std::optional<GraphShape>& sized = impl_->graph_shape;
  if (!sized) {
    for (Resource* resource : impl_->order) resource->size_graph_buffers(largest);
    sized = largest;
    return;
  }
  const auto within = [&](const char* field, int64_t wanted, int64_t have) {
    if (wanted <= have) return;
    throw_state({.what = field,
                 .where = kWhere,
                 .expected = "at most " + std::to_string(have) +
                             ", the size that was taken: graphs may hold the buffers' addresses",
                 .got = std::to_string(wanted)});
  };
  within("num_rows", largest.num_rows, sized->num_rows);
  within("num_tokens", largest.num_tokens, sized->num_tokens);
  within("num_listed_pages", largest.num_listed_pages, sized->num_listed_pages);
}

}  // namespace mla
