#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mla/export.hpp"

namespace mla {

/// Which two columns of the rope part turn together (R columns, i < R / 2).
enum class RopeLayout : uint8_t {
  kNone = 0,         ///< no rotation: models without position encoding
  kInterleaved = 1,  ///< (2i, 2i + 1)
  kHalf = 2,         ///< (i, i + R / 2)
};

/// YaRN context extension (arXiv 2309.00071), with the key names of config.json.
struct YarnConfig {
  double factor = 1;
  double original_max_position_embeddings = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;                    ///< the ramp's ends are rounded outwards to whole pairs
  std::optional<double> attention_factor;  ///< of cos and sin; none: from the two below
  double mscale = 0;                       ///< 0: not given
  double mscale_all_dim = 0;
};

struct RopeConfig {
  RopeLayout layout = RopeLayout::kInterleaved;
  double theta = 10000;
  std::optional<YarnConfig> yarn;
};

/// Geometry of one MLA layer, as the model's own configuration gives it.
struct LayerConfig {
  std::string model_type;
  int32_t hidden_size = 0;
  int32_t num_attention_heads = 0;  ///< of the whole layer
  int32_t q_lora_rank = 0;          ///< 0: one full q projection
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;  ///< may be 0
  int32_t v_head_dim = 0;
  double latent_norm_eps = 1e-6;  ///< of the two latents' RMSNorm, whatever rms_norm_eps says
  double q_lora_scale = 1;        ///< multiplies the normed q latent
  double kv_lora_scale = 1;       ///< multiplies the normed kv latent, which is cached so
  RopeConfig rope;
  float sm_scale = 0;  ///< what PlanOptions::sm_scale must be

  int32_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
};

/// Reads a model's config.json: model_type deepseek_v2, deepseek_v3, kimi_k2, glm4_moe_lite,
/// longcat_flash, or kimi_linear (its MLA layers, which have no position encoding). RoPE stands
/// under `rope_parameters`, or under `rope_scaling` and `rope_theta`. Keys that do not concern the
/// attention are ignored.
///
/// Throws InvalidArgument naming the key: malformed, missing, out of range, or asking for what the
/// layer does not do (attention_bias, sliding windows, sparse attention, other RoPE types ...).
MLA_API LayerConfig parse_layer_config(std::string_view config_json);

/// Throws InvalidArgument naming the field: a width out of range, an odd rope part, a scale that is
/// not finite and positive.
MLA_API void check_layer_config(const LayerConfig& config);

/// Angle per position of each of the qk_rope_head_dim / 2 pairs, in radians, with YaRN's
/// correction.
MLA_API std::vector<double> rope_frequencies(const RopeConfig& rope, int32_t qk_rope_head_dim);

/// What YaRN multiplies cos and sin by; 1 without YaRN.
MLA_API double rope_magnitude(const RopeConfig& rope);

}  // namespace mla
