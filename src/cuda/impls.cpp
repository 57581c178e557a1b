#include "cuda/impls.hpp"

#include "cuda/general/simt.hpp"
#include "cuda/general/tensor_core.hpp"
#include "cuda/sm90/attention/launch.hpp"

namespace mla::cuda {
namespace {

// In order of preference; the last takes every shape.
constexpr const AttentionImpl* kImpls[] = {
    &sm90::kDenseImpl,
    &general::kTensorCoreImpl,
    &general::kSimtImpl,
};

}  // namespace

std::span<const AttentionImpl* const> impls() { return kImpls; }

}  // namespace mla::cuda
