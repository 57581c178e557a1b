#pragma once

#include <memory>

#include "layer/operations.hpp"

namespace mla::layer {

/// On the CPU: each call is shared by the crew and returns when it is done.
class HostOperations final : public Operations {
 public:
  explicit HostOperations(std::shared_ptr<Executor> executor);

  void gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y,
            Stream stream) override;
  void norm_rows(const ConstTensor<2>& latents, const Norm& norm, const Tensor<2>& to,
                 Stream stream) override;
  void turn_queries(const ConstTensor<3>& q, const int32_t* positions, const Rope& rope,
                    const Tensor<3>& to, Stream stream) override;
  void store_latents(const ConstTensor<2>& latents, const int32_t* positions, const Norm& norm,
                     const Rope& rope, const LatentRows& to, Stream stream) override;

 private:
  /// Calls fn(worker, workers) on as many workers as `count` rows keep busy.
  template <class Fn>
  void share(int64_t count, const Fn& fn);

  std::shared_ptr<Executor> executor_;
};

}  // namespace mla::layer
