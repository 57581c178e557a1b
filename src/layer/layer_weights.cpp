#include <string>

#include "mla/error.hpp"
#include "mla/layer.hpp"

namespace mla {

LayerWeights find_layer_weights(const Safetensors& file, const LayerConfig& config,
                                std::string_view prefix) {
  const auto find = [&](const char* module) {
    const std::string name = std::string(prefix) + module;
    if (file.find(name + ".bias") != nullptr) {
      throw_invalid({.what = name + ".bias",
                     .where = "find_layer_weights",
                     .expected = "no bias: the layer adds none",
                     .got = "one in " + file.name()});
    }
    return file.matrix(name + ".weight");
  };
  LayerWeights weights;
  if (config.q_lora_rank == 0) {
    weights.q_proj = find("q_proj");
  } else {
    weights.q_a_proj = find("q_a_proj");
    weights.q_a_layernorm = find("q_a_layernorm");
    weights.q_b_proj = find("q_b_proj");
  }
  weights.kv_a_proj_with_mqa = find("kv_a_proj_with_mqa");
  weights.kv_a_layernorm = find("kv_a_layernorm");
  weights.kv_b_proj = find("kv_b_proj");
  weights.o_proj = find("o_proj");
  return weights;
}

}  // namespace mla
