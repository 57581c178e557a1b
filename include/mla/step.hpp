#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mla/attention.hpp"
#include "mla/device.hpp"
#include "mla/error.hpp"
#include "mla/export.hpp"

namespace mla {

/// What a step asks of one resource. Each resource has a kind of its own, derived from this.
struct MLA_API ResourceStep {
  explicit ResourceStep(const char* kind_name) : kind(kind_name) {}
  ResourceStep(const ResourceStep&) = default;
  ResourceStep& operator=(const ResourceStep&) = default;
  virtual ~ResourceStep();

  const char* kind;  ///< its type's name, for messages
};

/// What a resource made of a step: immutable, opaque to the runner, read by the resources that
/// depend on it. The resource owns it and says how long it is valid.
struct MLA_API ResourcePlan {
  explicit ResourcePlan(const char* kind_name) : kind(kind_name) {}
  ResourcePlan(const ResourcePlan&) = default;
  ResourcePlan& operator=(const ResourcePlan&) = default;
  virtual ~ResourcePlan();

  const char* kind;
};

namespace detail {
[[noreturn]] MLA_API void throw_missing(const char* where, std::string_view key, const char* kind,
                                        const char* got);
}  // namespace detail

/// One step of an engine: for each resource, by its key, what it is asked to do. An engine keeps
/// one Step for every step in flight and fills it anew each time, so that it stops allocating.
class MLA_API Step {
 public:
  /// The part of the resource `key`; an empty one where there is none yet.
  /// Throws InvalidArgument (a part of another kind is there).
  template <class Part>
  Part& part(std::string_view key) {
    for (Entry& entry : entries_) {
      if (entry.key == key) return const_cast<Part&>(cast<Part>(entry, "Step::part"));
    }
    entries_.push_back({std::string(key), std::make_unique<Part>()});
    return static_cast<Part&>(*entries_.back().part);
  }
  /// Throws InvalidArgument naming the key: there is none, or it is of another kind.
  template <class Part>
  const Part& get(std::string_view key) const {
    for (const Entry& entry : entries_) {
      if (entry.key == key) return cast<Part>(entry, "Step::get");
    }
    detail::throw_missing("Step::get", key, Part::kKind, nullptr);
  }

  size_t size() const noexcept { return entries_.size(); }
  const std::string& key(size_t i) const { return entries_[i].key; }

 private:
  struct Entry {
    std::string key;
    std::unique_ptr<ResourceStep> part;
  };

  template <class Part>
  static const Part& cast(const Entry& entry, const char* where) {
    const auto* part = dynamic_cast<const Part*>(entry.part.get());
    if (part == nullptr) detail::throw_missing(where, entry.key, Part::kKind, entry.part->kind);
    return *part;
  }

  std::vector<Entry> entries_;
};

/// The plans of one step by resource key. A runner fills it in the order of the dependencies.
class MLA_API PlanResults {
 public:
  /// Replaces the plan of the same key. The plan is lent.
  void set(std::string_view key, const ResourcePlan& plan);
  /// Throws InvalidArgument naming the key: not planned (yet), or of another kind.
  template <class Plan>
  const Plan& get(std::string_view key) const {
    const ResourcePlan* found = find(key);
    const auto* plan = dynamic_cast<const Plan*>(found);
    if (plan == nullptr) {
      detail::throw_missing("PlanResults::get", key, Plan::kKind,
                            found == nullptr ? nullptr : found->kind);
    }
    return *plan;
  }
  bool contains(std::string_view key) const { return find(key) != nullptr; }
  void clear();

 private:
  struct Entry {
    std::string key;
    const ResourcePlan* plan;
  };
  const ResourcePlan* find(std::string_view key) const;

  std::vector<Entry> entries_;
};

/// A bucket of captured graphs: one path through the engine's model, at one padded shape.
struct GraphBucket {
  std::string walk{};  ///< the engine's name for the path: prefill, decode, verify
  Bucket shape{};

  bool operator==(const GraphBucket&) const = default;
};

/// Where a step is planned into: one of the alternating copies (slot) of everything that a plan
/// writes, and the bucket whose graph will replay it. Without a bucket the step runs eagerly.
struct SlotLease {
  int32_t slot = 0;
  std::optional<GraphBucket> bucket{};

  bool operator==(const SlotLease&) const = default;
};

/// The largest step that captured graphs will serve.
struct GraphShape {
  int64_t num_rows = 0;
  int64_t num_tokens = 0;
  int64_t num_listed_pages = 0;  ///< page ids of one label's plan
};

/// What a resource gets besides the step when it plans.
struct PlanContext {
  const SlotLease& lease;
  const PlanResults& results;  ///< plans of the resources that it depends on
  bool is_preplan = false;     ///< the step before this one still runs
  Stream stream{};
};

}  // namespace mla
