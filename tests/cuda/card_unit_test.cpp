#include <gtest/gtest.h>

#include "cuda/card.hpp"

namespace mla::cuda {
namespace {

TEST(CardUnit, DriversOfEitherKindSayTheirVersion) {
  EXPECT_EQ(driver_version_in("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May "
                              "12 19:39:15 UTC 2024"),
            "535.183.01");
  EXPECT_EQ(driver_version_in("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04 "
                              " Release Build  (builder@host)  Tue Nov 11"),
            "580.159.04");
  EXPECT_EQ(driver_version_in("NVRM version: NVIDIA UNIX aarch64 Kernel Module  570.86"), "570.86");
}

TEST(CardUnit, ALineOfAnotherFormHasNoDriverVersion) {
  EXPECT_EQ(driver_version_in(""), "");
  EXPECT_EQ(driver_version_in("NVRM version: unknown"), "");
  EXPECT_EQ(driver_version_in("NVRM version: 580 5a.1 ..."), "");
}

}  // namespace
}  // namespace mla::cuda
