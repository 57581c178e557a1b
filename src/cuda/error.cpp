#include "cuda/error.hpp"

#include <string>

#include "mla/error.hpp"

namespace mla::cuda {

void check(cudaError_t result, const char* call, const char* where) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw CudaError(
      {.what = call,
       .where = where,
       .expected = "cudaSuccess",
       .got = std::string(cudaGetErrorName(result)) + ": " + cudaGetErrorString(result)},
      result);
}

}  // namespace mla::cuda
