#include "mla/replay_stats.hpp"

#include <algorithm>
#include <cmath>

namespace mla::cli {

double ReplayStats::prefix_hit_rate() const {
  const int64_t prompt_tokens = prefill_tokens + hit_tokens;
  return prompt_tokens > 0 ? static_cast<double>(hit_tokens) / static_cast<double>(prompt_tokens)
                           : 0;
}

double ReplayStats::step_percentile_s(double share) const {
  if (step_s.empty()) return 0;
  std::vector<double> sorted = step_s;
  // The smallest value that at least `share` of all are not above.
  const auto rank =
      static_cast<size_t>(std::max(1.0, std::ceil(share * static_cast<double>(sorted.size()))));
  const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(rank - 1);
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

}  // namespace mla::cli
