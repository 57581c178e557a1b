#include "mla/layer_config.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "layer/json.hpp"
#include "layer/rope.hpp"
#include "mla/error.hpp"
#include "mla/geometry.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;

constexpr const char* kWhere = "parse_layer_config";
constexpr int64_t kMaxWidth = 1 << 20;  // of hidden states and q latents, columns
constexpr int64_t kMaxHeadDim = 8192;

struct ModelType {
  std::string_view name;
  double rope_theta;      // where the configuration gives none
  bool scales_latents;    // unless mla_scale_q_lora, mla_scale_kv_lora say no
  bool only_interleaved;  // rope_interleave cannot be false
};
constexpr ModelType kModelTypes[] = {
    {"deepseek_v2", 1e4, false, true},  {"deepseek_v3", 1e4, false, false},
    {"kimi_k2", 1e4, false, false},     {"glm4_moe_lite", 1e4, false, false},
    {"longcat_flash", 1e7, true, true}, {"kimi_linear", 1e4, false, false},
};

// Keys that ask, where they are neither null nor false, for attention of another kind.
constexpr const char* kUnsupported[] = {
    "attention_bias", "qkv_bias",        "sliding_window",         "use_sliding_window",
    "index_topk",     "index_n_heads",   "attn_logit_softcapping", "use_qk_norm",
    "qk_layernorm",   "attention_sinks", "llama_4_scaling",        "attention_chunk_size",
};

// All keys that RoPE's parameters may have; another one would ask for something that is not done.
constexpr std::string_view kRopeKeys[] = {"rope_type",        "type",
                                          "rope_theta",       "factor",
                                          "beta_fast",        "beta_slow",
                                          "mscale",           "mscale_all_dim",
                                          "attention_factor", "original_max_position_embeddings",
                                          "truncate",         "partial_rotary_factor"};

[[noreturn]] void refuse(const std::string& key, const std::string& expected,
                         const std::string& got) {
  throw_invalid({.what = key, .where = kWhere, .expected = expected, .got = got});
}

// Reads members of one JSON object; null counts as absent.
class Reader {
 public:
  Reader(const Json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {
    if (!object.is_object()) refuse(prefix_ + "configuration", "an object", layer::shown(object));
  }

  const Json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  std::string name(const char* key) const { return prefix_ + key; }

  void refuse_keys_beside(std::span<const std::string_view> known) const {
    for (const auto& [key, value] : object_.items()) {
      if (value.is_null() || std::ranges::find(known, key) != known.end()) continue;
      refuse(prefix_ + key, "no such key", layer::shown(value));
    }
  }

  int32_t whole(const char* key, int64_t low, int64_t high,
                std::optional<int32_t> absent = {}) const {
    const Json* value = find(key);
    if (value == nullptr) {
      if (absent) return *absent;
      refuse(name(key), "a whole number", "none");
    }
    const bool fits = value->is_number_integer() && *value >= low && *value <= high;
    if (!fits) {
      refuse(name(key), std::to_string(low) + " to " + std::to_string(high), layer::shown(*value));
    }
    return value->get<int32_t>();
  }

  // A finite number >= low.
  std::optional<double> number(const char* key, double low) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>()) || value->get<double>() < low) {
      refuse(name(key), "a number of at least " + std::to_string(low), layer::shown(*value));
    }
    return value->get<double>();
  }

  bool truth(const char* key, bool absent) const {
    const Json* value = find(key);
    if (value == nullptr) return absent;
    if (!value->is_boolean()) refuse(name(key), "true or false", layer::shown(*value));
    return value->get<bool>();
  }

  std::optional<std::string> text(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) refuse(name(key), "a string", layer::shown(*value));
    return value->get<std::string>();
  }

 private:
  const Json& object_;
  std::string prefix_;
};

const ModelType& find_model_type(const Reader& model) {
  const std::string name = model.text("model_type").value_or("");
  std::string known;
  for (const ModelType& type : kModelTypes) {
    if (type.name == name) return type;
    known += (known.empty() ? "" : ", ") + std::string(type.name);
  }
  refuse("model_type", "one of " + known, name.empty() ? "none" : name);
}

void refuse_unsupported(const Reader& model, int32_t num_heads) {
  for (const char* key : kUnsupported) {
    const Json* value = model.find(key);
    if (value != nullptr && *value != false) {
      refuse(key, "none: the layer does not do that", layer::shown(*value));
    }
  }
  const int32_t num_kv_heads = model.whole("num_key_value_heads", 1, kMaxHeads, num_heads);
  if (num_kv_heads != num_heads) {
    refuse("num_key_value_heads", std::to_string(num_heads) + " = num_attention_heads",
           std::to_string(num_kv_heads));
  }
  const Json* layer_types = model.find("layer_types");
  if (layer_types == nullptr) return;
  for (const Json& type : *layer_types) {
    if (type != "full_attention") {
      refuse("layer_types", "full_attention in every layer", layer::shown(type));
    }
  }
}

YarnConfig read_yarn(const Reader& rope, const Reader& model) {
  YarnConfig yarn;
  yarn.original_max_position_embeddings =
      rope.whole("original_max_position_embeddings", 1, INT32_MAX);
  if (const auto factor = rope.number("factor", 1)) {
    yarn.factor = *factor;
  } else {
    yarn.factor = model.whole("max_position_embeddings", 1, INT32_MAX) /
                  yarn.original_max_position_embeddings;
  }
  // As in the published code a 0 counts as not given.
  const auto given = [&](const char* key, double absent) {
    const double value = rope.number(key, 0).value_or(0);
    return value == 0 ? absent : value;
  };
  yarn.beta_fast = given("beta_fast", yarn.beta_fast);
  yarn.beta_slow = given("beta_slow", yarn.beta_slow);
  yarn.mscale = given("mscale", 0);
  yarn.mscale_all_dim = given("mscale_all_dim", 0);
  yarn.truncate = rope.truth("truncate", true);
  yarn.attention_factor = rope.number("attention_factor", 0);
  return yarn;
}

void refuse_partial_rotation(const Reader& reader) {
  const double part = reader.number("partial_rotary_factor", 0).value_or(1);
  if (part != 1) refuse(reader.name("partial_rotary_factor"), "1", std::to_string(part));
}

void read_rope_type(const Reader& rope, const Reader& model, RopeConfig& config) {
  const auto old_name = rope.text("type");
  const auto new_name = rope.text("rope_type");
  const std::string type = new_name.value_or(old_name.value_or("default"));
  if (old_name && new_name && *old_name != *new_name) {
    refuse(rope.name("type"), *new_name + " = rope_type", *old_name);
  }
  refuse_partial_rotation(rope);
  if (type == "yarn") {
    config.yarn = read_yarn(rope, model);
  } else if (type != "default") {
    refuse(rope.name(old_name && !new_name ? "type" : "rope_type"), "default or yarn", type);
  }
}

RopeConfig read_rope(const Reader& model, const ModelType& type, int32_t width) {
  RopeConfig config;
  const bool nope = model.truth("mla_use_nope", false);
  if (type.name == "kimi_linear" && !nope) {
    refuse("mla_use_nope", "true for kimi_linear", model.find("mla_use_nope") ? "false" : "none");
  }
  if (nope || width == 0) {
    config.layout = RopeLayout::kNone;
    return config;
  }
  const bool interleaved = model.truth("rope_interleave", true);
  if (!interleaved && type.only_interleaved) {
    refuse("rope_interleave", "true for " + std::string(type.name), "false");
  }
  config.layout = interleaved ? RopeLayout::kInterleaved : RopeLayout::kHalf;
  config.theta = model.number("rope_theta", 0).value_or(type.rope_theta);
  refuse_partial_rotation(model);
  const bool is_new = model.find("rope_parameters") != nullptr;
  const char* key = is_new ? "rope_parameters" : "rope_scaling";
  if (is_new && model.find("rope_scaling") != nullptr) {
    refuse("rope_scaling", "none beside rope_parameters", "both");
  }
  if (const Json* object = model.find(key)) {
    const Reader rope(*object, std::string(key) + ".");
    rope.refuse_keys_beside(kRopeKeys);
    config.theta = rope.number("rope_theta", 0).value_or(config.theta);
    read_rope_type(rope, model, config);
  }
  if (config.theta <= 1) refuse("rope_theta", "above 1", std::to_string(config.theta));
  return config;
}

// 1 / sqrt(width of q and k), times the square of YaRN's growth over all dimensions.
float softmax_scale(const LayerConfig& config) {
  double scale = 1 / std::sqrt(static_cast<double>(config.qk_head_dim()));
  if (config.rope.yarn && config.rope.yarn->mscale_all_dim != 0) {
    const double growth =
        layer::yarn_growth(config.rope.yarn->factor, config.rope.yarn->mscale_all_dim);
    scale *= growth * growth;
  }
  return static_cast<float>(scale);
}

double latent_scale(const Reader& model, const char* key, const ModelType& type, int32_t hidden,
                    int32_t rank) {
  if (rank == 0 || !model.truth(key, type.scales_latents)) return 1;
  return std::sqrt(static_cast<double>(hidden) / rank);
}

[[noreturn]] void refuse_field(const char* field, const std::string& expected,
                               const std::string& got) {
  throw_invalid({.what = field, .where = "check_layer_config", .expected = expected, .got = got});
}

}  // namespace

LayerConfig parse_layer_config(std::string_view config_json) {
  const Json json = layer::parse_json(config_json, "configuration", kWhere);
  const Reader model(json, "");
  const ModelType& type = find_model_type(model);
  LayerConfig config;
  config.model_type = type.name;
  config.hidden_size = model.whole("hidden_size", 1, kMaxWidth);
  config.num_attention_heads = model.whole("num_attention_heads", 1, kMaxHeads);
  config.q_lora_rank = model.whole("q_lora_rank", 1, kMaxWidth, 0);
  config.kv_lora_rank = model.whole("kv_lora_rank", 1, kMaxLatentWidth);
  config.qk_nope_head_dim = model.whole("qk_nope_head_dim", 1, kMaxHeadDim);
  config.qk_rope_head_dim = model.whole("qk_rope_head_dim", 0, kMaxHeadDim, 0);
  config.v_head_dim = model.whole("v_head_dim", 1, kMaxHeadDim);
  refuse_unsupported(model, config.num_attention_heads);
  config.rope = read_rope(model, type, config.qk_rope_head_dim);
  config.q_lora_scale =
      latent_scale(model, "mla_scale_q_lora", type, config.hidden_size, config.q_lora_rank);
  config.kv_lora_scale =
      latent_scale(model, "mla_scale_kv_lora", type, config.hidden_size, config.kv_lora_rank);
  config.sm_scale = softmax_scale(config);
  check_layer_config(config);
  return config;
}

void check_layer_config(const LayerConfig& config) {
  const auto check = [](const char* field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    refuse_field(field, std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
  };
  check("hidden_size", config.hidden_size, 1, kMaxWidth);
  check("num_attention_heads", config.num_attention_heads, 1, kMaxHeads);
  check("q_lora_rank", config.q_lora_rank, 0, kMaxWidth);
  check("kv_lora_rank", config.kv_lora_rank, 1, kMaxLatentWidth);
  check("qk_nope_head_dim", config.qk_nope_head_dim, 1, kMaxHeadDim);
  check("qk_rope_head_dim", config.qk_rope_head_dim, 0, kMaxLatentWidth - config.kv_lora_rank);
  check("v_head_dim", config.v_head_dim, 1, kMaxHeadDim);
  check("rope.layout", static_cast<int64_t>(config.rope.layout), 0,
        static_cast<int64_t>(RopeLayout::kHalf));
  if (config.rope.layout != RopeLayout::kNone && config.qk_rope_head_dim % 2 != 0) {
    refuse_field("qk_rope_head_dim", "an even width", std::to_string(config.qk_rope_head_dim));
  }

  const auto check_positive = [](const char* field, double value, double above = 0) {
    if (std::isfinite(value) && value > above) return;
    refuse_field(field, "finite and above " + std::to_string(above), std::to_string(value));
  };
  check_positive("sm_scale", config.sm_scale);
  check_positive("latent_norm_eps", config.latent_norm_eps);
  check_positive("q_lora_scale", config.q_lora_scale);
  check_positive("kv_lora_scale", config.kv_lora_scale);
  if (config.rope.layout == RopeLayout::kNone) return;
  check_positive("rope.theta", config.rope.theta, 1);
  if (!config.rope.yarn) return;
  check_positive("rope.yarn.factor", config.rope.yarn->factor);
  check_positive("rope.yarn.original_max_position_embeddings",
                 config.rope.yarn->original_max_position_embeddings);
  check_positive("rope.yarn.beta_fast", config.rope.yarn->beta_fast);
  check_positive("rope.yarn.beta_slow", config.rope.yarn->beta_slow);
  check_positive("the factor of cos and sin", rope_magnitude(config.rope));
}

}  // namespace mla
