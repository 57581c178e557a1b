#include <gtest/gtest.h>

#include "cuda/error.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

TEST(CudaErrorUnit, AFailedLaunchIsReportedWithItsKernel) {
  // No machine has such a device; where there is no driver the call fails for that.
  ASSERT_NE(cudaSetDevice(1 << 20), cudaSuccess);
  try {
    check_launch("scatter_rows_kernel");
    FAIL() << "the error was not seen";
  } catch (const CudaError& error) {
    EXPECT_EQ(error.parts().what, "scatter_rows_kernel");
    EXPECT_EQ(error.parts().where, "launch");
    EXPECT_EQ(error.parts().got.substr(0, 9), "cudaError");
    EXPECT_NE(error.code(), cudaSuccess);
  }
}

}  // namespace
}  // namespace mla::cuda
