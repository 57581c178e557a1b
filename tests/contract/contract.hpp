#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cases/attention_case.hpp"
#include "cases/check.hpp"
#include "mla/supports.hpp"

// What every backend must do, run over every kernel that this machine has. A comment at a test
// names the public thread in which users met the fault that it rules out.
namespace mla::contract {

using cases::AttentionCase;
using cases::CheckReport;

inline constexpr int64_t kAllRows = std::numeric_limits<int64_t>::max();

/// Names of the kernels of the CPU table, in order of preference.
inline std::vector<std::string> cpu_kernels() {
  std::vector<std::string> names;
  for (const KernelVerdict& verdict : supports(AttentionCase{}.geometry).considered) {
    names.push_back(verdict.kernel);
  }
  return names;
}

/// A suite whose parameter is a kernel. Kernels that this machine cannot run are skipped, with
/// their own words.
class KernelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const Support support = supports(AttentionCase{}.geometry, {}, {}, GetParam());
    if (!support) GTEST_SKIP() << support.reason;
  }

  /// Runs the case on the parameter's kernel and expects the contract to hold for it.
  CheckReport expect_holds(AttentionCase c, int64_t max_rows = kAllRows) const {
    c.kernel = GetParam();
    CheckReport report;
    try {
      report = cases::check_case(c, {.max_rows = max_rows});
    } catch (const std::exception& error) {
      ADD_FAILURE() << c.name << ": refused: " << error.what();
      return report;
    }
    EXPECT_EQ(report.fault, "") << c.name << ", seed " << c.seed;
    EXPECT_EQ(report.kernel, GetParam());
    return report;
  }
};

inline std::string kernel_name(const testing::TestParamInfo<std::string>& kernel) {
  return kernel.param;
}

#define MLA_CONTRACT_SUITE(suite)                                                      \
  class suite : public ::mla::contract::KernelTest {};                                 \
  INSTANTIATE_TEST_SUITE_P(, suite, testing::ValuesIn(::mla::contract::cpu_kernels()), \
                           ::mla::contract::kernel_name)

}  // namespace mla::contract
