#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cases/attention_case.hpp"
#include "cases/problem.hpp"
#include "mla/attention.hpp"
#include "mla/executor.hpp"

namespace mla::cases {

struct CheckOptions {
  /// Rows (token x head) that are compared with the reference; where there are more, so many are
  /// chosen at random with the first and the last. All rows are looked at for NaN and emptiness.
  int64_t max_rows = std::numeric_limits<int64_t>::max();
  int num_runs = 2;                      ///< the same plan must give the same bits every time
  std::shared_ptr<Executor> executor{};  ///< none: the shared one
};

struct CheckReport {
  std::string kernel;
  bool rounds_probabilities = false;  ///< as in supports()
  PlanInfo plan;
  size_t scratch_bytes = 0;
  int64_t checked_rows = 0;
  double max_abs_error = 0;     ///< of the output
  double max_lse_error = 0;     ///< of the natural LSE
  double worst_share = 0;       ///< largest error / bound, of output and LSE
  std::string fault;            ///< the first thing that is wrong; empty where all is well
  std::vector<float> out, lse;  ///< [T * H * rank] widened to fp32; [T * H], as they came

  explicit operator bool() const { return fault.empty(); }
};

/// Runs a case and holds it against the reference and the contract: every row within its bound,
/// rows without keys exactly zero and -inf, no NaN, no byte written but the rows', no input
/// changed, lent scratch of exactly the queried size with garbage in it, equal bits from run to
/// run. Throws what PagedAttention throws (a refused case), InvalidArgument as check_consistent.
CheckReport check_case(const AttentionCase& attention_case, const CheckOptions& options = {});

/// The same for a problem whose memory the caller has changed since.
CheckReport check_problem(Problem& problem, const CheckOptions& options = {});

}  // namespace mla::cases
