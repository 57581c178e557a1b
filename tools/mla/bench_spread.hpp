#pragma once

#include <algorithm>
#include <vector>

namespace mla::cli {

/// Middle and spread of what the rounds gave.
struct Spread {
  double median = 0;
  double low = 0;   // first quartile
  double high = 0;  // third quartile
};

inline Spread spread_of(std::vector<double> values) {
  std::ranges::sort(values);
  const auto at = [&values](double share) {  // between neighbours, linearly
    const double place = share * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
  };
  return {.median = at(0.5), .low = at(0.25), .high = at(0.75)};
}

}  // namespace mla::cli
