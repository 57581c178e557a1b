#include "mla/step.hpp"

#include "engine/text.hpp"

namespace mla {

ResourceStep::~ResourceStep() = default;
ResourcePlan::~ResourcePlan() = default;

void detail::throw_missing(const char* where, std::string_view key, const char* kind,
                           const char* got) {
  throw_invalid({.what = engine::quoted(key),
                 .where = where,
                 .expected = std::string("a ") + kind,
                 .got = got == nullptr ? "nothing under this key" : std::string("a ") + got});
}

void PlanResults::set(std::string_view key, const ResourcePlan& plan) {
  for (Entry& entry : entries_) {
    if (entry.key != key) continue;
    entry.plan = &plan;
    return;
  }
  entries_.push_back({std::string(key), &plan});
}

// Keys stay, so that filling it again does not allocate.
void PlanResults::clear() {
  for (Entry& entry : entries_) entry.plan = nullptr;
}

const ResourcePlan* PlanResults::find(std::string_view key) const {
  for (const Entry& entry : entries_) {
    if (entry.key == key) return entry.plan;
  }
  return nullptr;
}

}  // namespace mla
