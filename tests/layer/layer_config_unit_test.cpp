#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "mla/error.hpp"
#include "mla/layer_config.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// The attention's part of DeepSeek-V3's config.json.
Json deepseek_v3() {
  return Json::parse(R"({"model_type": "deepseek_v3", "hidden_size": 7168,
      "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
      "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
      "attention_bias": false, "rms_norm_eps": 1e-5, "max_position_embeddings": 163840,
      "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32,
      "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 4096}, "quantization_config": {"fmt": "e4m3"}})");
}

LayerConfig parse(const Json& json) { return parse_layer_config(json.dump()); }

std::string refused_key(const Json& json) {
  try {
    parse(json);
  } catch (const InvalidArgument& error) {
    return error.parts().what;
  }
  return "accepted";
}

Json with(const char* key, const Json& value) {
  Json json = deepseek_v3();
  if (std::string_view(key) == "rope_parameters") json.erase("rope_scaling");
  json[key] = value;
  return json;
}

TEST(LayerConfigUnit, DeepseekV3IsReadWithItsOldRopeKeys) {
  const LayerConfig config = parse(deepseek_v3());
  EXPECT_EQ(config.model_type, "deepseek_v3");
  EXPECT_EQ(config.hidden_size, 7168);
  EXPECT_EQ(config.num_attention_heads, 128);
  EXPECT_EQ(config.q_lora_rank, 1536);
  EXPECT_EQ(config.kv_lora_rank, 512);
  EXPECT_EQ(config.qk_head_dim(), 192);
  EXPECT_EQ(config.v_head_dim, 128);
  EXPECT_EQ(config.rope.layout, RopeLayout::kInterleaved);
  ASSERT_TRUE(config.rope.yarn.has_value());
  EXPECT_EQ(config.rope.yarn->factor, 40);
  const double growth = 0.1 * std::log(40.0) + 1;
  EXPECT_NEAR(config.sm_scale, growth * growth / std::sqrt(192.0), 1e-8);
  EXPECT_EQ(rope_magnitude(config.rope), 1);
}

TEST(LayerConfigUnit, LatentNormsTakeTheirOwnEps) {
  EXPECT_EQ(parse(deepseek_v3()).latent_norm_eps, 1e-6);  // rms_norm_eps is 1e-5
}

TEST(LayerConfigUnit, NewRopeKeysMeanTheSameAsOldOnes) {
  Json json = deepseek_v3();
  json["rope_parameters"] = json["rope_scaling"];
  json["rope_parameters"]["rope_type"] = "yarn";
  json["rope_parameters"]["rope_theta"] = 10000;
  json.erase("rope_scaling");
  json.erase("rope_theta");
  const LayerConfig config = parse(json);
  EXPECT_EQ(config.sm_scale, parse(deepseek_v3()).sm_scale);
  EXPECT_EQ(rope_frequencies(config.rope, 64), rope_frequencies(parse(deepseek_v3()).rope, 64));
}

TEST(LayerConfigUnit, BothSpellingsOfRopeAtOnceAreRefused) {
  Json json = deepseek_v3();
  json["rope_parameters"] = {{"rope_type", "default"}};
  EXPECT_EQ(refused_key(json), "rope_scaling");
}

TEST(LayerConfigUnit, MissingOrNullQLoraRankMeansOneFullProjection) {
  EXPECT_EQ(parse(with("q_lora_rank", nullptr)).q_lora_rank, 0);
  Json json = deepseek_v3();
  json.erase("q_lora_rank");
  EXPECT_EQ(parse(json).q_lora_rank, 0);
}

TEST(LayerConfigUnit, ModelsOfTheFamilyAreAccepted) {
  for (const char* type : {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"}) {
    EXPECT_EQ(parse(with("model_type", type)).model_type, type);
    EXPECT_EQ(parse(with("model_type", type)).kv_lora_scale, 1);
  }
}

TEST(LayerConfigUnit, LongcatScalesItsLatentsUnlessToldNot) {
  Json json = with("model_type", "longcat_flash");
  EXPECT_DOUBLE_EQ(parse(json).q_lora_scale, std::sqrt(7168.0 / 1536));
  EXPECT_DOUBLE_EQ(parse(json).kv_lora_scale, std::sqrt(7168.0 / 512));
  json["mla_scale_q_lora"] = false;
  EXPECT_EQ(parse(json).q_lora_scale, 1);
  EXPECT_DOUBLE_EQ(parse(json).kv_lora_scale, std::sqrt(7168.0 / 512));
  json["mla_scale_kv_lora"] = 3.7;
  EXPECT_EQ(refused_key(json), "mla_scale_kv_lora");
}

TEST(LayerConfigUnit, ModelsWithoutPositionEncodingDoNotTurn) {
  EXPECT_EQ(parse(with("qk_rope_head_dim", 0)).rope.layout, RopeLayout::kNone);
  Json json = with("model_type", "kimi_linear");
  EXPECT_EQ(refused_key(json), "mla_use_nope");
  json["mla_use_nope"] = true;
  EXPECT_EQ(parse(json).rope.layout, RopeLayout::kNone);
  EXPECT_EQ(parse(json).qk_head_dim(), 192);
}

TEST(LayerConfigUnit, HalfLayoutIsReadAndRefusedWhereTheModelHasNone) {
  Json json = with("rope_interleave", false);
  EXPECT_EQ(parse(json).rope.layout, RopeLayout::kHalf);
  json["model_type"] = "longcat_flash";
  EXPECT_EQ(refused_key(json), "rope_interleave");
}

TEST(LayerConfigUnit, WhatTheLayerDoesNotDoIsRefusedByName) {
  EXPECT_EQ(refused_key(with("model_type", "llama")), "model_type");
  EXPECT_EQ(refused_key(with("model_type", nullptr)), "model_type");
  EXPECT_EQ(refused_key(with("attention_bias", true)), "attention_bias");
  EXPECT_EQ(refused_key(with("sliding_window", 4096)), "sliding_window");
  EXPECT_EQ(refused_key(with("index_topk", 2048)), "index_topk");
  EXPECT_EQ(refused_key(with("num_key_value_heads", 8)), "num_key_value_heads");
  EXPECT_EQ(refused_key(with("layer_types", {"full_attention", "sliding_attention"})),
            "layer_types");
  EXPECT_EQ(refused_key(with("rope_scaling", {{"type", "linear"}, {"factor", 4}})),
            "rope_scaling.type");
  EXPECT_EQ(refused_key(with("rope_parameters", {{"rope_type", "llama3"}})),
            "rope_parameters.rope_type");
  EXPECT_EQ(refused_key(with("rope_parameters", {{"partial_rotary_factor", 0.5}})),
            "rope_parameters.partial_rotary_factor");
  EXPECT_EQ(refused_key(with("partial_rotary_factor", 0.5)), "partial_rotary_factor");
  EXPECT_EQ(refused_key(with("rope_scaling", {{"type", "default"}, {"long_factor", 2}})),
            "rope_scaling.long_factor");
  // Parameters for each kind of layer, which some models have.
  EXPECT_EQ(refused_key(with("rope_parameters", {{"full_attention", {{"rope_type", "yarn"}}}})),
            "rope_parameters.full_attention");
  EXPECT_EQ(refused_key(with("attention_bias", false)), "accepted");
  EXPECT_EQ(refused_key(with("sliding_window", nullptr)), "accepted");
}

TEST(LayerConfigUnit, ValuesOutOfRangeOrOfAnotherKindAreRefusedByName) {
  for (const char* key : {"hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
                          "qk_nope_head_dim", "v_head_dim"}) {
    for (const Json& value : {Json(0), Json(-1), Json(1.5), Json("7"), Json(int64_t{1} << 40)}) {
      EXPECT_EQ(refused_key(with(key, value)), key) << value;
    }
  }
  EXPECT_EQ(refused_key(with("qk_rope_head_dim", 63)), "qk_rope_head_dim");
  EXPECT_EQ(refused_key(with("qk_rope_head_dim", 7681)), "qk_rope_head_dim");  // 8193 with the rank
  EXPECT_EQ(refused_key(with("rope_theta", 1)), "rope_theta");
  EXPECT_EQ(refused_key(with("rope_theta", "1e4")), "rope_theta");
  EXPECT_EQ(refused_key(with("rope_scaling", "yarn")), "rope_scaling.configuration");
  EXPECT_EQ(refused_key(with("rope_scaling", {{"type", "yarn"}, {"factor", 40}})),
            "rope_scaling.original_max_position_embeddings");
  Json json = deepseek_v3();
  json.erase("kv_lora_rank");
  EXPECT_EQ(refused_key(json), "kv_lora_rank");
  LayerConfig config = parse_layer_config(deepseek_v3().dump());
  config.rope.layout = static_cast<RopeLayout>(9);
  EXPECT_THROW(check_layer_config(config), InvalidArgument);
}

TEST(LayerConfigUnit, TextThatIsNoObjectIsRefused) {
  for (const char* text : {"", "[]", "1", "{", "{\"hidden_size\":1,\"hidden_size\":2}"}) {
    EXPECT_THROW(parse_layer_config(text), InvalidArgument) << text;
  }
}

TEST(RopeUnit, FrequenciesFallFromOneByTheta) {
  const auto frequencies = rope_frequencies({.theta = 10000, .yarn = {}}, 64);
  ASSERT_EQ(frequencies.size(), 32U);
  EXPECT_EQ(frequencies[0], 1);
  EXPECT_NEAR(frequencies[16], 0.01, 1e-12);
}

TEST(RopeUnit, FrequenciesAreNumbersWhateverYarnsBetas) {
  constexpr double kLeast = std::numeric_limits<double>::denorm_min();
  constexpr double kMost = std::numeric_limits<double>::max();
  for (const double theta : {1 + 1e-15, 10000.0, kMost}) {
    for (const double fast : {kLeast, 32.0, kMost}) {
      for (const double slow : {kLeast, 1.0, kMost}) {
        RopeConfig rope = parse(deepseek_v3()).rope;
        rope.theta = theta;
        rope.yarn->beta_fast = fast;
        rope.yarn->beta_slow = slow;
        for (const double frequency : rope_frequencies(rope, 64)) {
          EXPECT_TRUE(frequency >= 0 && frequency <= 1) << theta << " " << fast << " " << slow;
        }
      }
    }
  }
}

// DeepSeek-V3: pairs that turn 32 times or more in 4,096 tokens stay, those that turn once or less
// are slowed 40 times, those between are mixed.
TEST(RopeUnit, YarnKeepsFastPairsAndSlowsTheOthers) {
  const RopeConfig yarn = parse(deepseek_v3()).rope;
  const auto plain = rope_frequencies({.theta = yarn.theta, .yarn = {}}, 64);
  const auto slowed = rope_frequencies(yarn, 64);
  for (size_t i = 0; i < plain.size(); ++i) {
    const double turns = 4096 * plain[i] / (2 * M_PI);
    const double ratio = slowed[i] / plain[i];
    if (turns > 32) {
      EXPECT_NEAR(ratio, 1, 1e-12) << i;
    } else if (turns > 1) {
      EXPECT_TRUE(ratio > 1.0 / 40 && ratio < 1) << i << " " << ratio;
    } else if (turns < 0.5) {  // between, the ramp's end is rounded outwards
      EXPECT_NEAR(ratio, 1.0 / 40, 1e-12) << i;
    }
  }
}

TEST(RopeUnit, MagnitudeComesFromTheFactorsOrIsGiven) {
  RopeConfig rope;
  EXPECT_EQ(rope_magnitude(rope), 1);
  rope.yarn =
      YarnConfig{.factor = 8, .original_max_position_embeddings = 64, .attention_factor = {}};
  EXPECT_DOUBLE_EQ(rope_magnitude(rope), 0.1 * std::log(8.0) + 1);
  rope.yarn->mscale = 1;
  rope.yarn->mscale_all_dim = 0.6;
  EXPECT_DOUBLE_EQ(rope_magnitude(rope), (0.1 * std::log(8.0) + 1) / (0.06 * std::log(8.0) + 1));
  rope.yarn->attention_factor = 1.25;
  EXPECT_EQ(rope_magnitude(rope), 1.25);
}

}  // namespace
}  // namespace mla
