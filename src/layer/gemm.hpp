#pragma once

#include "mla/executor.hpp"
#include "mla/tensor_view.hpp"

namespace mla::layer {

/// How bf16 products are formed. kNative takes the library's bf16 path where the processor has one
/// and kWidened's otherwise; kWidened widens to fp32 first, which gives the same result up to the
/// order of fp32 additions.
enum class Bf16Math : uint8_t { kNative, kWidened };

/// B matrix products: y[m, b, n] = sum over k of x[m, b, k] * w[b, n, k], accumulated in fp32.
/// x  [M, B, K], columns contiguous
/// w  [B, N, K], of x's dtype; columns contiguous, or else rows (stride 1 along N)
/// y  [M, B, N], columns contiguous; of x's dtype or fp32; overlaps neither
/// dtypes fp32 and bf16; everything on the CPU. The caller answers for shapes and dtypes. Blocks;
/// may allocate. Throws std::bad_alloc, std::runtime_error (the library failed).
void gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y, Executor& executor,
          Bf16Math math = Bf16Math::kNative);

/// Does this processor have the library's bf16 path?
bool has_native_bf16();

}  // namespace mla::layer
