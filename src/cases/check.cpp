#include "cases/check.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "cases/error_bound.hpp"
#include "cases/random.hpp"
#include "mla/reference.hpp"
#include "mla/supports.hpp"

namespace mla::cases {
namespace {

std::string place_text(int64_t token, int64_t head) {
  return "token " + std::to_string(token) + ", head " + std::to_string(head);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

// Keys that query `token` sees; 0 for the tokens of a bucket that no request has.
int64_t visible_keys(const AttentionCase& c, std::span<const int32_t> qo_indptr, int64_t token) {
  const auto next = std::upper_bound(qo_indptr.begin(), qo_indptr.end(), token);
  if (next == qo_indptr.end()) return 0;
  const auto row = static_cast<size_t>(next - qo_indptr.begin() - 1);
  const int64_t keys = c.kv_lens[row];
  if (!c.causal) return keys;
  return std::max<int64_t>(0, keys - c.q_lens[row] + (token - qo_indptr[row]) + 1);
}

// Compares one problem's outputs, row by row.
class RowChecker {
 public:
  RowChecker(const Problem& problem, CheckReport& report)
      : case_(problem.attention_case()),
        batch_(problem.batch()),
        args_(problem.host_args()),
        report_(report),
        rank_(case_.geometry.kv_lora_rank),
        probability_rounding_(
            probability_rounding(case_.geometry.dtype, report.rounds_probabilities)),
        expected_(static_cast<size_t>(rank_)) {}

  int64_t num_rows() const { return args_.out.shape[0] * args_.out.shape[1]; }

  // What can be said of every row without the reference.
  void check_form(int64_t row) {
    const int64_t token = row / case_.geometry.num_heads;
    const bool is_empty = visible_keys(case_, batch_.qo_indptr, token) == 0;
    const float* out = report_.out.data() + row * rank_;
    const bool fits = is_empty
                          ? std::all_of(out, out + rank_, [](float x) { return x == 0; })
                          : std::all_of(out, out + rank_, [](float x) { return std::isfinite(x); });
    if (!fits) fail(row, is_empty ? "sees no key, but out is not 0" : "out is not finite");
    if (!case_.lse) return;
    const float lse = report_.lse[static_cast<size_t>(row)];
    if (is_empty && !(std::isinf(lse) && lse < 0)) {
      fail(row, "sees no key, but lse is " + std::to_string(lse));
    }
    if (!is_empty && !std::isfinite(lse)) fail(row, "lse is " + std::to_string(lse));
  }

  void check_values(int64_t row) {
    const int64_t token = row / case_.geometry.num_heads;
    const int64_t head = row % case_.geometry.num_heads;
    ++report_.checked_rows;
    if (visible_keys(case_, batch_.qo_indptr, token) == 0) return;  // check_form says it all
    const ReferenceRow reference =
        reference_row(case_.geometry, batch_, case_.sm_scale, case_.causal, args_.q_nope,
                      args_.q_pe, args_.cache, token, head, expected_);
    const ErrorBound bound = error_bound(case_.geometry, reference, probability_rounding_);
    const float* out = report_.out.data() + row * rank_;
    for (int64_t c = 0; c < rank_; ++c) {
      const double expected = expected_[static_cast<size_t>(c)];
      const double error = std::abs(out[c] - expected);
      report_.max_abs_error = std::max(report_.max_abs_error, error);
      hold(row, "out column " + std::to_string(c), error,
           value_bound(bound, case_.geometry.dtype, expected));
    }
    if (!case_.lse) return;
    double lse = report_.lse[static_cast<size_t>(row)];
    if (*case_.lse == LseBase::kTwo) lse *= std::numbers::ln2;
    const double error = std::abs(lse - reference.lse);
    report_.max_lse_error = std::max(report_.max_lse_error, error);
    hold(row, "lse", error, bound.lse);
  }

 private:
  void hold(int64_t row, const std::string& what, double error, double bound) {
    const double share = error / bound;
    if (share > report_.worst_share) report_.worst_share = share;
    if (error <= bound) return;  // false for NaN
    fail(row, what + " is off by " + std::to_string(error) + ", bound " + std::to_string(bound));
  }

  void fail(int64_t row, const std::string& text) {
    if (!report_.fault.empty()) return;
    const int64_t heads = case_.geometry.num_heads;
    report_.fault = place_text(row / heads, row % heads) + ": " + text;
  }

  const AttentionCase& case_;
  Batch batch_;
  RunArgs args_;
  CheckReport& report_;
  int64_t rank_;
  double probability_rounding_;
  std::vector<double> expected_;
};

void check_rows(const Problem& problem, int64_t max_rows, CheckReport& report) {
  RowChecker checker(problem, report);
  const int64_t num_rows = checker.num_rows();
  for (int64_t row = 0; row < num_rows; ++row) checker.check_form(row);
  if (num_rows <= max_rows) {
    for (int64_t row = 0; row < num_rows; ++row) checker.check_values(row);
    return;
  }
  const uint64_t key = row_key(problem.attention_case().seed, ~uint64_t{0}, 2);
  for (int64_t i = 0; i < max_rows; ++i) {
    int64_t row = i == 0 ? 0 : num_rows - 1;
    if (i > 1) {
      const uint64_t bits = random_bits(key, static_cast<uint32_t>(i));
      row = static_cast<int64_t>((bits * static_cast<uint64_t>(num_rows)) >> 32);
    }
    checker.check_values(row);
  }
}

}  // namespace

CheckReport check_case(const AttentionCase& attention_case, const CheckOptions& options) {
  check_consistent(attention_case);
  AttentionConfig config = Problem::config_of(attention_case);
  config.executor = options.executor;
  PagedAttention::scratch_bytes(config);  // refuses before any memory is taken
  Problem problem(attention_case);
  return check_problem(problem, options);
}

CheckReport check_problem(Problem& problem, const CheckOptions& options) {
  const AttentionCase& c = problem.attention_case();
  AttentionConfig config = problem.config();
  config.executor = options.executor;
  CheckReport report;
  report.scratch_bytes = PagedAttention::scratch_bytes(config);
  Buffer scratch(report.scratch_bytes, 0, c.device);
  const auto spoil = [&](Poison poison) {
    // Sparse scratch is far larger than what a plan uses; its zeros are as good as garbage.
    if (scratch.is_sparse()) return;
    fill_poison(poison, DType::kFloat32, scratch.data(), static_cast<int64_t>(scratch.size() / 4));
    scratch.upload();
  };
  config.scratch = {scratch.device_data(), scratch.size()};
  PagedAttention attention(config);
  report.kernel = attention.kernel();
  report.rounds_probabilities =
      supports(c.geometry, c.device, config.strides, report.kernel).rounds_probabilities;
  attention.plan(problem.batch(), Problem::options_of(c));
  report.plan = attention.info();
  for (int run = 0; run < options.num_runs; ++run) {
    problem.spoil_outputs();
    spoil(run == 0 ? Poison::kNan : Poison::kInf);
    problem.run(attention);
    std::vector<float> out = problem.packed_out();
    std::vector<float> lse = problem.packed_lse();
    if (run == 0) {
      report.out = std::move(out);
      report.lse = std::move(lse);
    } else if (!same_bits(out, report.out) || !same_bits(lse, report.lse)) {
      report.fault = "run " + std::to_string(run) + " gave other bits than run 0";
    }
  }
  if (const std::string stray = problem.find_stray_write(); !stray.empty()) {
    report.fault = "run wrote to " + stray;
  }
  scratch.download();
  if (!scratch.guards_intact()) report.fault = "run wrote beside the lent scratch";
  if (report.fault.empty()) check_rows(problem, options.max_rows, report);
  return report;
}

}  // namespace mla::cases
