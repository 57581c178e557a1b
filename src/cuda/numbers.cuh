#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "mla/dtype.hpp"

// The element types of tensors, in kernels.
namespace mla::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }

/// Rounds to nearest even.
template <class T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

/// Element `at` of memory whose type is known at run time only.
__device__ inline float load_as_float(const void* values, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(values)[at]);
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(values)[at]);
    default:
      return static_cast<const float*>(values)[at];
  }
}

__device__ inline void store_float(float value, void* values, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(values)[at] = from_float<__nv_bfloat16>(value);
      break;
    case DType::kFloat16:
      static_cast<__half*>(values)[at] = from_float<__half>(value);
      break;
    default:
      static_cast<float*>(values)[at] = value;
  }
}

}  // namespace mla::cuda
