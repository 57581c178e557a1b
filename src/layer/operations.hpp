#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "layer/rope.hpp"
#include "mla/export.hpp"
#include "mla/layer.hpp"
#include "mla/tensor_view.hpp"

namespace mla::layer {

/// An RMSNorm: z / sqrt(mean(z^2) + eps) * weights.
struct Norm {
  const float* weights = nullptr;  ///< [width] on the device, times the latent's scale
  int64_t width = 0;
  double eps = 0;
};

/// Where the latent rows of a step go: [num_rows, kv_lora_rank + qk_rope_head_dim] without gaps.
struct LatentRows {
  void* data = nullptr;
  int64_t num_rows = 0;
  DType dtype = DType::kBFloat16;
  const int64_t* slots = nullptr;  ///< [T] on the device; null: token t goes to row t
};

/// What a layer asks of its device. The caller answers for shapes, dtypes and devices; all tensors
/// have contiguous columns (w of gemm: or rows). Every call queues its work on the stream, or does
/// it on the CPU; on CUDA it allocates nothing, waits for nothing and can be captured. Calls on one
/// object must not overlap.
class Operations {
 public:
  virtual ~Operations() = default;

  /// Device memory that the object keeps.
  virtual size_t bytes() const { return 0; }

  /// B matrix products: y[m, b, n] = sum over k of x[m, b, k] * w[b, n, k], accumulated in fp32.
  /// x  [M, B, K];  w  [B, N, K], of x's dtype;  y  [M, B, N], of x's dtype or fp32
  virtual void gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y,
                    Stream stream) = 0;

  /// to = norm(latents), row by row. latents [T, width] fp32 and `to` without gaps.
  virtual void norm_rows(const ConstTensor<2>& latents, const Norm& norm, const Tensor<2>& to,
                         Stream stream) = 0;

  /// The rope parts of all heads turned to their token's position. q and `to` [T, H, rope width] of
  /// one dtype, q at any strides of tokens and heads, `to` without gaps; positions [T].
  virtual void turn_queries(const ConstTensor<3>& q, const int32_t* positions, const Rope& rope,
                            const Tensor<3>& to, Stream stream) = 0;

  /// Latents [T, norm.width + rope.width] fp32 without gaps to cache rows: the first part normed,
  /// the second turned. Tokens whose slot is outside of the rows are skipped; of several with one
  /// slot the last stays on the CPU, any on an accelerator.
  virtual void store_latents(const ConstTensor<2>& latents, const int32_t* positions,
                             const Norm& norm, const Rope& rope, const LatentRows& to,
                             Stream stream) = 0;
};

/// Those of a device, for one caller at a time. Does what a first call would have to, so that that
/// may be a capture. Throws InvalidArgument (a device that is not there or without its library of
/// matrix products), CudaError. Exported for the command `mla`.
MLA_API std::unique_ptr<Operations> make_operations(const LayerOptions& options);

}  // namespace mla::layer
