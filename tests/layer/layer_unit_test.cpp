#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "layer/golden.hpp"
#include "mla/error.hpp"
#include "mla/layer.hpp"

namespace mla::cases {
namespace {

constexpr int32_t kPageSize = 16;

// A layer of a file with a pool, an attention and a workspace, run in one pass in fp32.
class LayerUnit : public testing::Test {
 protected:
  LayerUnit() {
    positions_.resize(static_cast<size_t>(tokens_));
    std::iota(positions_.begin(), positions_.end(), 0);
    slots_.assign(positions_.begin(), positions_.end());
    pages_.resize(static_cast<size_t>(num_pages_));
    std::iota(pages_.begin(), pages_.end(), 0);
    const int32_t qo_indptr[] = {0, static_cast<int32_t>(tokens_)};
    const int32_t kv_indptr[] = {0, static_cast<int32_t>(num_pages_)};
    const int32_t kv_len[] = {static_cast<int32_t>(tokens_)};
    attention_.plan({qo_indptr, kv_indptr, pages_, kv_len, {}},
                    {.sm_scale = file_.config.sm_scale});
  }

  AttentionConfig attention_config() const {
    AttentionConfig config;
    config.geometry = layer_.geometry(kPageSize);
    config.num_pages = pool_.total_pages();
    return config;
  }
  TensorView<const float, 2> hidden() const {
    return contiguous_view(file_.hidden.data(), std::array{tokens_, width_});
  }
  TensorView<const int32_t, 1> positions() const {
    return contiguous_view(positions_.data(), std::array{tokens_});
  }
  LayerStep step(std::vector<float>& out) {
    out.assign(file_.expected.size(), 0);
    return {.hidden = hidden(),
            .positions = positions(),
            .slots = contiguous_view(std::as_const(slots_).data(), std::array{tokens_}),
            .pool = &pool_,
            .layer_idx = 0,
            .attention = &attention_,
            .out = contiguous_view(out.data(), std::array{tokens_, width_})};
  }
  std::string refused(const LayerStep& step) {
    try {
      layer_.forward(step, workspace_);
    } catch (const InvalidArgument& error) {
      return error.parts().what;
    }
    return "accepted";
  }

  LayerFile file_ = open_golden("deepseek_v3_small");
  LayerOptions options_{.heads = {}, .dtype = DType::kFloat32, .device = {}, .executor = {}};
  int64_t tokens_ = file_.num_tokens;
  int64_t width_ = file_.config.hidden_size;
  int64_t num_pages_ = (tokens_ + kPageSize - 1) / kPageSize;
  Layer layer_{file_.config, file_.weights, options_};
  LayerWorkspace workspace_{file_.config, options_, tokens_};
  LatentPool pool_{{.num_layers = 1,
                    .num_pages = num_pages_,
                    .page_size = kPageSize,
                    .kv_lora_rank = file_.config.kv_lora_rank,
                    .qk_rope_head_dim = file_.config.qk_rope_head_dim,
                    .dtype = DType::kFloat32,
                    .device = {},
                    .memory = {}}};
  PagedAttention attention_{attention_config()};
  std::vector<int32_t> positions_, pages_;
  std::vector<int64_t> slots_;
};

TEST_F(LayerUnit, ForwardIsItsStagesInOrder) {
  std::vector<float> whole, staged(file_.expected.size());
  layer_.forward(step(whole), workspace_);
  EXPECT_LE(max_rel_error(file_, whole), 2e-4);

  const LayerActivations a = layer_.project(hidden(), positions(), workspace_);
  pool_.append(0, slots_, a.ckv, a.kpe);
  attention_.run({.q_nope = a.q_nope, .q_pe = a.q_pe, .cache = pool_.views(0), .out = a.attended});
  layer_.output(a.attended, contiguous_view(staged.data(), std::array{tokens_, width_}),
                workspace_);
  EXPECT_EQ(staged, whole);
}

// As the rows of a bucket that no request has: one is dropped, two meet in the sink.
TEST_F(LayerUnit, RowsGoWhereTheirSlotsSayAndNowhereElse) {
  std::vector<float> out;
  const int64_t sink = pool_.sink_page() * int64_t{kPageSize};
  slots_[7] = -1;
  slots_[8] = slots_[20] = sink;
  layer_.forward(step(out), workspace_);
  const LayerActivations a = layer_.project(hidden(), positions(), workspace_);
  const int64_t latent = a.ckv.stride[0];
  const auto* rows = static_cast<const float*>(a.ckv.data);
  const auto* pool = static_cast<const float*>(pool_.layer(0).data);
  for (int64_t t = 0; t < tokens_; ++t) {
    const bool is_there = std::equal(rows + t * latent, rows + (t + 1) * latent, pool + t * latent);
    EXPECT_EQ(is_there, t != 7 && t != 8 && t != 20) << t;
  }
  EXPECT_TRUE(std::equal(rows + 20 * latent, rows + 21 * latent, pool + sink * latent));
  for (const int64_t untouched : {int64_t{7}, int64_t{8}, int64_t{20}, sink + 1}) {
    EXPECT_EQ(pool[untouched * latent], 0) << untouched;
  }
}

TEST_F(LayerUnit, SameStepGivesTheSameBits) {
  std::vector<float> first, second;
  layer_.forward(step(first), workspace_);
  layer_.forward(step(second), workspace_);
  EXPECT_EQ(first, second);
}

TEST_F(LayerUnit, CallsOnTwoThreadsDoNotMix) {
  const LayerActivations alone = layer_.project(hidden(), positions(), workspace_);
  const auto count = static_cast<size_t>(tokens_ * layer_.num_heads() * file_.config.kv_lora_rank);
  const auto* queries = static_cast<const float*>(alone.q_nope.data);
  const std::vector<float> wanted(queries, queries + count);
  const auto project_often = [&] {
    LayerWorkspace workspace(file_.config, options_, tokens_);
    for (int i = 0; i < 20; ++i) {
      const LayerActivations a = layer_.project(hidden(), positions(), workspace);
      EXPECT_TRUE(
          std::equal(wanted.begin(), wanted.end(), static_cast<const float*>(a.q_nope.data)));
    }
  };
  std::thread other(project_often);
  project_often();
  other.join();
}

TEST_F(LayerUnit, HiddenAndOutputMayBeSlicesOfLargerRows) {
  std::vector<float> plain;
  layer_.forward(step(plain), workspace_);
  const int64_t stride = width_ + 5;
  std::vector<float> wide_hidden(static_cast<size_t>(tokens_ * stride), NAN);
  std::vector<float> wide_out(wide_hidden);
  for (int64_t t = 0; t < tokens_; ++t) {
    std::copy_n(file_.hidden.begin() + t * width_, width_, wide_hidden.begin() + t * stride);
  }
  LayerStep sliced = step(plain);
  layer_.forward(sliced, workspace_);
  sliced.hidden = TensorView<const float, 2>{wide_hidden.data(), {tokens_, width_}, {stride, 1}};
  sliced.out = TensorView<float, 2>{wide_out.data(), {tokens_, width_}, {stride, 1}};
  layer_.forward(sliced, workspace_);
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t c = 0; c < width_; ++c) {
      ASSERT_EQ(wide_out[static_cast<size_t>(t * stride + c)],
                plain[static_cast<size_t>(t * width_ + c)]);
    }
    ASSERT_TRUE(std::isnan(wide_out[static_cast<size_t>(t * stride + width_)]));
  }
}

TEST_F(LayerUnit, NoTokensIsAStepThatDoesNothing) {
  std::vector<float> out;
  const int32_t none[] = {0};
  attention_.plan({none, none, {}, {}, {}}, {.sm_scale = file_.config.sm_scale});
  LayerStep empty = step(out);
  empty.hidden.shape[0] = empty.out.shape[0] = 0;
  empty.positions.shape[0] = empty.slots.shape[0] = 0;
  EXPECT_EQ(refused(empty), "accepted");
}

TEST_F(LayerUnit, Fp16AndFp32WeightsGiveWhatTheirValuesGive) {
  std::vector<float> plain, widened;
  layer_.forward(step(plain), workspace_);
  // The same numbers in fp32: bf16 values are exact there.
  const ConstTensor<2> o_proj = file_.weights.o_proj;
  std::vector<float> values(static_cast<size_t>(o_proj.shape[0] * o_proj.shape[1]));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<const BFloat16*>(o_proj.data)[i]);
  }
  LayerWeights weights = file_.weights;
  weights.o_proj = TensorView<const float, 2>(
      contiguous_view(static_cast<const float*>(values.data()), o_proj.shape));
  Layer(file_.config, weights, options_).forward(step(widened), workspace_);
  EXPECT_EQ(widened, plain);

  // In fp16 each weight keeps 11 bits, more than the 8 that it has, unless it is below 2^-14.
  std::vector<Float16> halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) halves[i] = Float16(values[i]);
  weights.o_proj = TensorView<const Float16, 2>(
      contiguous_view(static_cast<const Float16*>(halves.data()), o_proj.shape));
  Layer(file_.config, weights, options_).forward(step(widened), workspace_);
  EXPECT_LE(max_rel_error(file_, widened), 2e-4);
}

TEST_F(LayerUnit, Fp32OutputIsOpenToABf16Layer) {
  const LayerOptions options{.heads = {}, .dtype = DType::kBFloat16, .device = {}, .executor = {}};
  const Layer layer(file_.config, file_.weights, options);
  LayerWorkspace workspace(file_.config, options, 1);
  std::vector<BFloat16> attended(
      static_cast<size_t>(layer.num_heads()) * static_cast<size_t>(file_.config.kv_lora_rank),
      BFloat16(0.7F));
  const ConstTensor<3> latents = TensorView<const BFloat16, 3>(
      contiguous_view(static_cast<const BFloat16*>(attended.data()),
                      std::array<int64_t, 3>{1, layer.num_heads(), file_.config.kv_lora_rank}));
  std::vector<float> wide(static_cast<size_t>(width_));
  std::vector<BFloat16> narrow(wide.size());
  layer.output(latents, contiguous_view(wide.data(), std::array{int64_t{1}, width_}), workspace);
  layer.output(latents, contiguous_view(narrow.data(), std::array{int64_t{1}, width_}), workspace);
  for (size_t i = 0; i < wide.size(); ++i) {
    EXPECT_EQ(BFloat16(wide[i]).bits, narrow[i].bits);
  }
}

TEST_F(LayerUnit, WrongStepsAreRefusedByNameBeforeTheCacheIsWritten) {
  std::vector<float> out;
  LayerStep wrong = step(out);
  wrong.pool = nullptr;
  EXPECT_EQ(refused(wrong), "pool");
  wrong = step(out);
  wrong.attention = nullptr;
  EXPECT_EQ(refused(wrong), "attention");
  wrong = step(out);
  wrong.hidden.shape[1] -= 1;
  EXPECT_EQ(refused(wrong), "hidden.shape");
  wrong = step(out);
  wrong.hidden.dtype = DType::kBFloat16;
  EXPECT_EQ(refused(wrong), "hidden.dtype");
  wrong = step(out);
  wrong.hidden.data = nullptr;
  EXPECT_EQ(refused(wrong), "hidden.data");
  wrong = step(out);
  wrong.hidden.stride[1] = 2;
  EXPECT_EQ(refused(wrong), "hidden.stride[1]");
  wrong = step(out);
  wrong.out.stride[0] = 1;
  EXPECT_EQ(refused(wrong), "out.stride[0]");
  wrong = step(out);
  wrong.out.stride[0] = int64_t{1} << 61;
  EXPECT_EQ(refused(wrong), "out.stride[0]");
  wrong = step(out);
  wrong.out.device.kind = DeviceKind::kCuda;
  EXPECT_EQ(refused(wrong), "out.device");
  wrong = step(out);
  wrong.out.shape[0] += 1;
  EXPECT_EQ(refused(wrong), "out.shape");
  wrong = step(out);
  wrong.positions.shape[0] = 3;
  EXPECT_EQ(refused(wrong), "positions.shape");
  wrong = step(out);
  wrong.slots.device.kind = DeviceKind::kCuda;
  EXPECT_EQ(refused(wrong), "slots.device");
  wrong = step(out);
  wrong.layer_idx = 1;
  EXPECT_EQ(refused(wrong), "layer");
  wrong = step(out);
  positions_[2] = -1;
  EXPECT_EQ(refused(wrong), "positions[2]");
  positions_[2] = 2;
  for (const int64_t slot : {int64_t{-2}, pool_.total_pages() * kPageSize}) {
    slots_[5] = slot;
    EXPECT_EQ(refused(wrong), "slots[5]");
  }
  slots_[5] = 5;
  PoolConfig wider = pool_.config();
  wider.memory = {};
  wider.kv_lora_rank += 1;
  LatentPool other(wider);
  wrong.pool = &other;
  EXPECT_EQ(refused(wrong), "pool");
  const auto* rows = static_cast<const float*>(pool_.layer(0).data);
  EXPECT_TRUE(std::all_of(rows, rows + num_pages_ * kPageSize, [](float v) { return v == 0; }));
}

TEST_F(LayerUnit, WorkspaceOfAnotherShapeOrTooSmallIsRefused) {
  std::vector<float> out;
  LayerWorkspace small(file_.config, options_, tokens_ - 1);
  EXPECT_THROW(layer_.forward(step(out), small), InvalidArgument);
  LayerOptions fewer_heads = options_;
  fewer_heads.heads = {.begin = 0, .count = 2};
  LayerWorkspace other(file_.config, fewer_heads, tokens_);
  EXPECT_THROW(layer_.forward(step(out), other), InvalidArgument);
  EXPECT_THROW(LayerWorkspace(file_.config, options_, -1), InvalidArgument);
}

TEST_F(LayerUnit, WrongWeightsAndOptionsAreRefusedByName) {
  const auto refused_what = [&](const LayerWeights& weights, const LayerOptions& options) {
    try {
      const Layer layer(file_.config, weights, options);
    } catch (const InvalidArgument& error) {
      return error.parts().what;
    }
    return std::string("accepted");
  };
  LayerWeights weights = file_.weights;
  weights.q_b_proj.shape[0] -= 1;
  EXPECT_EQ(refused_what(weights, options_), "q_b_proj.shape");
  weights = file_.weights;
  weights.kv_a_layernorm = {};
  EXPECT_EQ(refused_what(weights, options_), "kv_a_layernorm.shape");
  weights = file_.weights;
  weights.kv_b_proj.data = nullptr;
  EXPECT_EQ(refused_what(weights, options_), "kv_b_proj.data");
  weights = file_.weights;
  weights.o_proj.dtype = DType::kInt32;
  EXPECT_EQ(refused_what(weights, options_), "o_proj.dtype");

  LayerOptions options = options_;
  options.dtype = DType::kFloat16;
  EXPECT_EQ(refused_what(file_.weights, options), "dtype");
  options = options_;
  for (const Device device : {Device{DeviceKind::kCuda, 1000}, Device{DeviceKind::kCpu, 1},
                              Device{DeviceKind::kRecording, 0}}) {
    options.device = device;
    EXPECT_EQ(refused_what(file_.weights, options), "device") << to_string(device);
  }
  for (const HeadRange heads : {HeadRange{3, 2}, HeadRange{-1, 1}, HeadRange{1, 0},
                                HeadRange{0, -1}, HeadRange{INT32_MAX, 1}}) {
    options = options_;
    options.heads = heads;
    EXPECT_EQ(refused_what(file_.weights, options), "heads") << heads.begin << " " << heads.count;
  }
}

TEST(LayerWeightsUnit, MissingTensorAndBiasAreRefusedByName) {
  const LayerFile file = open_golden("deepseek_v3_small");
  try {
    find_layer_weights(file.file, file.config, "model.");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("model.q_a_proj.weight"));
  }
  const std::string header =
      R"({"q_a_proj.bias":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})";
  std::vector<std::byte> bytes(8);
  bytes[0] = static_cast<std::byte>(header.size());
  for (const char c : header) bytes.push_back(static_cast<std::byte>(c));
  const Safetensors with_bias(bytes, "memory");
  try {
    find_layer_weights(with_bias, file.config);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.parts().what, "q_a_proj.bias");
  }
}

}  // namespace
}  // namespace mla::cases
