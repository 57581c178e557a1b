#pragma once

#include <string>
#include <string_view>

namespace mla::engine {

/// A name as messages show it.
inline std::string quoted(std::string_view name) {
  std::string text = "\"";
  text += name;
  text += '"';
  return text;
}

}  // namespace mla::engine
