#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cases/attention_case.hpp"
#include "cases/check.hpp"
#include "cases/problem.hpp"
#include "device/test_device.hpp"
#include "mla/supports.hpp"

// What every backend must do, run over every kernel that this machine has. A comment at a test
// names the public thread in which users met the fault that it rules out.
namespace mla::contract {

using cases::AttentionCase;
using cases::CheckReport;

inline constexpr int64_t kAllRows = std::numeric_limits<int64_t>::max();

/// Where a kernel of this name runs: the GPU's have names of their own.
inline Device device_of(const std::string& kernel) {
  const bool on_host = kernel.starts_with("cpu_") || kernel == "reference";
  return {on_host ? DeviceKind::kCpu : DeviceKind::kCuda, 0};
}

/// Names of the kernels of devices, in order of preference: a GPU's only where there is one.
inline std::vector<std::string> kernels_of(std::initializer_list<DeviceKind> kinds) {
  std::vector<std::string> names;
  for (const DeviceKind kind : kinds) {
    for (const KernelVerdict& verdict : supports(AttentionCase{}.geometry, {kind, 0}).considered) {
      names.push_back(verdict.kernel);
    }
  }
  return names;
}

/// A suite whose parameter is a kernel. Kernels that this machine cannot run are skipped, with
/// their own words.
class KernelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const Support support = supports(AttentionCase{}.geometry, device(), {}, GetParam());
    if (!support) GTEST_SKIP() << support.reason;
  }

  static Device device() { return device_of(GetParam()); }
  /// The smallest latent that the kernel serves, so that many cases run in little time.
  static Geometry small_geometry(int32_t heads) {
    const auto of = [&](int32_t rank, int32_t rope, DType dtype) {
      return Geometry{.num_heads = heads,
                      .kv_lora_rank = rank,
                      .qk_rope_head_dim = rope,
                      .page_size = 16,
                      .dtype = dtype,
                      .kv_dtype = dtype};
    };
    for (const Geometry& geometry : {of(32, 8, DType::kFloat32), of(32, 8, DType::kBFloat16)}) {
      if (supports(geometry, device(), {}, GetParam())) return geometry;
    }
    return of(512, 64, DType::kBFloat16);
  }
  /// Runs the case on the parameter's kernel and expects the contract to hold for it.
  CheckReport expect_holds(AttentionCase c, int64_t max_rows = kAllRows) const {
    c.kernel = GetParam();
    c.device = device();
    // Where the kernel is not for the shape, the one that takes its place is tested.
    const std::optional<CacheStrides> strides = cases::Problem::config_of(c).strides;
    if (!supports(c.geometry, device(), strides, GetParam())) c.kernel.clear();
    CheckReport report;
    try {
      report = cases::check_case(c, {.max_rows = max_rows});
    } catch (const std::exception& error) {
      ADD_FAILURE() << c.name << ": refused: " << error.what();
      return report;
    }
    EXPECT_EQ(report.fault, "") << c.name << ", seed " << c.seed;
    if (!c.kernel.empty()) {
      EXPECT_EQ(report.kernel, GetParam());
    }
    return report;
  }
};

using test::read_back;

inline std::string kernel_name(const testing::TestParamInfo<std::string>& kernel) {
  return kernel.param;
}

#define MLA_CONTRACT_SUITE_OF(suite, ...)                                                          \
  class suite : public ::mla::contract::KernelTest {};                                             \
  INSTANTIATE_TEST_SUITE_P(, suite, testing::ValuesIn(::mla::contract::kernels_of({__VA_ARGS__})), \
                           ::mla::contract::kernel_name)

#define MLA_CONTRACT_SUITE(suite) \
  MLA_CONTRACT_SUITE_OF(suite, ::mla::DeviceKind::kCpu, ::mla::DeviceKind::kCuda)

}  // namespace mla::contract
