#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace mla::layer {

/// Parses text that somebody else wrote. Throws InvalidArgument{what, where} on malformed JSON, on
/// a name that an object has twice, and on nesting deeper than any such file has.
nlohmann::json parse_json(std::string_view text, const std::string& what, const char* where);

/// A value for a message: its JSON, cut where it is long.
std::string shown(const nlohmann::json& value);

}  // namespace mla::layer
