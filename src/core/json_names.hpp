#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace mla {

/// Watches a JSON parser, as its callback, for an object that has a name twice: the parser itself
/// keeps the last value without a word.
class JsonNames {
 public:
  /// The name that `event` repeats in its object, or null. To be told every event of the parser.
  const std::string* repeated(nlohmann::json::parse_event_t event, const nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) open_objects_.emplace_back();
    if (event == Event::object_end) open_objects_.pop_back();
    if (event != Event::key) return nullptr;
    const auto& name = value.get_ref<const std::string&>();
    return open_objects_.back().insert(name).second ? nullptr : &name;
  }

 private:
  std::vector<std::set<std::string>> open_objects_;  // the names seen in each
};

}  // namespace mla
