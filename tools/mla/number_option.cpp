#include "mla/number_option.hpp"

#include <fmt/core.h>

#include <charconv>
#include <string>
#include <system_error>

namespace mla::cli {
namespace {

// The whole text as a number; false where it is none, or is beyond the type.
template <class Number>
bool parse(const std::string& text, Number& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

template <class Number>
CLI::Validator number_between(Number least, Number most, const char* kind) {
  return {[=](std::string& text) {
            Number value = 0;
            // Written so that NaN is not between the two.
            if (!parse(text, value) || !(least <= value && value <= most)) {
              return fmt::format("expected {} from {} to {}, got {}", kind, least, most, text);
            }
            text = fmt::format("{}", value);
            return std::string();
          },
          fmt::format("{} - {}", least, most)};
}

}  // namespace

CLI::Validator whole_number(uint64_t least, uint64_t most) {
  return number_between(least, most, "a whole number");
}

CLI::Validator real_number(double least, double most) {
  return number_between(least, most, "a number");
}

}  // namespace mla::cli
