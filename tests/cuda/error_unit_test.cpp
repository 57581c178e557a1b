#include <gtest/gtest.h>

#include "cuda/launch.hpp"
#include "mla/error.hpp"

namespace mla::cuda {
namespace {

void no_kernel(int) {}

TEST(CudaErrorUnit, AFailedLaunchIsReportedWithItsKernel) {
  try {  // where there is no driver it fails for that
    launch_kernel("scatter_rows_kernel", &no_kernel, {.count = 1, .threads = 32}, Stream{}, 0);
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
