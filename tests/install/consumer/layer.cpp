// Uses mla::layer as an engine would link it: a small layer of made-up weights, one token.
#include "mla/layer.hpp"

#include <cstdio>
#include <vector>

int main() {
  const mla::LayerConfig config = mla::parse_layer_config(
      R"({"model_type": "deepseek_v3", "hidden_size": 8, "num_attention_heads": 2,
          "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4})");
  const std::vector<float> ones(256, 1.0F);
  const auto matrix = [&](int64_t rows, int64_t columns) -> mla::ConstTensor<2> {
    return mla::contiguous_view(static_cast<const void*>(ones.data()),
                                std::array<int64_t, 2>{rows, columns}, mla::DType::kFloat32);
  };
  mla::LayerWeights weights;
  weights.q_proj = matrix(12, 8);
  weights.kv_a_proj_with_mqa = matrix(6, 8);
  weights.kv_a_layernorm = matrix(1, 4);
  weights.kv_b_proj = matrix(16, 4);
  weights.o_proj = matrix(8, 8);
  mla::LayerOptions options;
  options.dtype = mla::DType::kFloat32;
  const mla::Layer layer(config, weights, options);
  mla::LayerWorkspace workspace(config, options, 1);

  // A row attends to itself alone, so that its latents are what is attended: all ones, normed.
  const int32_t position = 0;
  const mla::LayerActivations a = layer.project(
      matrix(1, 8), mla::contiguous_view(&position, std::array<int64_t, 1>{1}), workspace);
  std::vector<float> latents(8, static_cast<const float*>(a.ckv.data)[0]);
  std::vector<float> out(8);
  layer.output(mla::contiguous_view(static_cast<const void*>(latents.data()),
                                    std::array<int64_t, 3>{1, 2, 4}, mla::DType::kFloat32),
               mla::contiguous_view(static_cast<void*>(out.data()), std::array<int64_t, 2>{1, 8},
                                    mla::DType::kFloat32),
               workspace);
  std::printf("layer: %g\n", out[0]);  // 8 values of 4 latents of 1
  return out[0] > 31.9F && out[0] < 32.1F ? 0 : 1;
}
