#include "layer/json.hpp"

#include "core/json_names.hpp"
#include "mla/error.hpp"

namespace mla::layer {
namespace {

constexpr size_t kMaxShown = 80;  // characters
constexpr int kMaxDepth = 16;     // a config.json has 4 levels, a safetensors header 3

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& what, const char* where) {
  using Json = nlohmann::json;
  JsonNames names;
  const auto look = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) {
      throw_invalid({.what = what,
                     .where = where,
                     .expected = "JSON of at most " + std::to_string(kMaxDepth) + " levels",
                     .got = "more"});
    }
    if (const std::string* name = names.repeated(event, value)) {
      throw_invalid({.what = what,
                     .where = where,
                     .expected = "each name once in an object",
                     .got = *name + " twice"});
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), look);
  } catch (const Json::exception& error) {
    throw_invalid({.what = what, .where = where, .expected = "JSON", .got = error.what()});
  }
}

std::string shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true);  // ASCII: cutting splits no character
  if (text.size() > kMaxShown) text.replace(kMaxShown, std::string::npos, "...");
  return text;
}

}  // namespace mla::layer
