#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>

namespace mla::cli {

/// Checks of number options, for CLI::Option::transform; the parser's own clamp what is beyond 64
/// bits, take 010 for 8 and let NaN through. The text handed on is the plain decimal number.

/// A whole decimal number from `least` to `most`.
CLI::Validator whole_number(uint64_t least, uint64_t most);

/// A decimal number, also as 1e-3, from `least` to `most`; never NaN.
CLI::Validator real_number(double least, double most);

}  // namespace mla::cli
