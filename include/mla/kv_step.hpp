#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/export.hpp"
#include "mla/kv_resource.hpp"
#include "mla/step.hpp"

namespace mla {

/// Makes `target` a stream with the content of `source`; pages are shared until one of them
/// appends.
struct Fork {
  KvStream source{};
  KvStream target{};
};

/// Several labels packed as one plan: all rows of the first label, then all of the second, ...
struct CombinedLabel {
  std::string_view name;
  std::vector<std::string_view> labels;
};

/// What a step does to the KV streams. Labels are lent: they must outlive the calls that get the
/// step.
struct MLA_API KvStep : ResourceStep {
  static constexpr const char* kKind = "KvStep";
  KvStep() : ResourceStep(kKind) {}

  std::vector<Segment> segments;        ///< what each stream reads and appends
  std::vector<Fork> forks_before;       ///< made at plan; their targets may have segments
  std::vector<Fork> forks_after;        ///< made at commit, of streams as the step leaves them
  std::vector<CombinedLabel> combined;  ///< labels without an entry have a plan of their own
};

/// The KV resource's plan of a step.
struct MLA_API KvPlan : ResourcePlan {
  static constexpr const char* kKind = "KvPlan";
  KvPlan() : ResourcePlan(kKind) {}

  std::span<const LabelPlan> labels;
  /// Different for every plan that is made; a plan made early keeps it when it is promoted.
  uint64_t id = 0;
};

}  // namespace mla
