#include <gtest/gtest.h>

#include <numeric>
#include <ranges>

#include "device/runtime.hpp"
#include "device/test_device.hpp"
#include "layer/bucket_steps.hpp"
#include "layer/golden.hpp"
#include "mla/device_memory.hpp"
#include "mla/error.hpp"

// The layer files of golden/ on a CUDA device, and steps that are captured there.
namespace mla::cases {
namespace {

using test::kCuda;

class LayerCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = test::missing(kCuda); !reason.empty()) GTEST_SKIP() << reason;
  }
};

struct Ways : LayerCuda, testing::WithParamInterface<std::tuple<std::string, DType, int32_t>> {};

TEST_P(Ways, EachWayThroughTheCacheGivesTheFilesOutput) {
  const auto& [name, dtype, page_size] = GetParam();
  expect_every_way(name, {.dtype = dtype, .device = kCuda, .page_size = page_size});
}

INSTANTIATE_TEST_SUITE_P(LayerCuda, Ways,
                         testing::Combine(testing::ValuesIn(golden_names()),
                                          testing::Values(DType::kFloat32, DType::kBFloat16,
                                                          DType::kFloat16),
                                          testing::Values(1, 64)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  std::string(name_of(std::get<1>(test.param))) + "_page" +
                                  std::to_string(std::get<2>(test.param));
                         });

TEST_F(LayerCuda, RanksOfHeadsAddUpToTheWholeLayer) {
  const LayerFile file = open_golden("deepseek_v3_small");
  std::vector<float> sum(file.expected.size(), 0);
  for (const HeadRange heads : {HeadRange{0, 1}, HeadRange{1, 2}, HeadRange{3, 1}}) {
    const LayerRun run{.dtype = DType::kFloat32, .device = kCuda, .heads = heads};
    const auto part = run_layer(file, run, in_chunks(file))[0];
    std::ranges::transform(part, sum, sum.begin(), std::plus());
  }
  EXPECT_LE(max_rel_error(file, sum), 2e-4);
}

// A step of a whole file in fp32, captured as the first thing that its layer does.
TEST_F(LayerCuda, CapturedStepReadsItsTensorsAnewAtEachReplay) {
  constexpr int32_t kPageSize = 8;
  const LayerFile file = open_golden("deepseek_v3_yarn");
  const int64_t tokens = file.num_tokens;
  device::Runtime& runtime = device::runtime_of(kCuda);
  const DeviceStream stream(kCuda);  // the attention, which is ordered on it, ends before it
  const LayerOptions options{.dtype = DType::kFloat32, .device = kCuda};
  const Layer layer(file.config, file.weights, options);
  LayerWorkspace workspace(file.config, options, tokens);
  LatentPool pool(pool_of(file, kPageSize, kCuda));
  AttentionConfig config;
  config.geometry = layer.geometry(kPageSize);
  config.num_pages = pool.total_pages();
  config.device = kCuda;
  config.bucket = Bucket{.num_rows = 1, .num_tokens = tokens};
  config.limits.max_listed_pages = pool.total_pages();
  config.capture = true;
  PagedAttention attention(config);

  const auto count = static_cast<size_t>(tokens);
  DeviceMemory hidden(kCuda, file.hidden.size() * sizeof(float)), out(kCuda, hidden.bytes());
  DeviceMemory positions(kCuda, count * sizeof(int32_t)), slots(kCuda, count * sizeof(int64_t));
  const std::array<int64_t, 2> shape{tokens, file.config.hidden_size};
  const LayerStep step{
      .hidden =
          contiguous_view(static_cast<const void*>(hidden.data()), shape, DType::kFloat32, kCuda),
      .positions =
          contiguous_view(static_cast<const int32_t*>(positions.data()), std::array{tokens}, kCuda),
      .slots =
          contiguous_view(static_cast<const int64_t*>(slots.data()), std::array{tokens}, kCuda),
      .pool = &pool,
      .layer_idx = 0,
      .attention = &attention,
      .out = contiguous_view(out.data(), shape, DType::kFloat32, kCuda)};

  // Plans for pages in this order and puts what a replay reads where it reads it.
  std::vector<int32_t> pages(static_cast<size_t>(pool.total_pages())), places(count);
  std::vector<int64_t> rows(count);
  const auto set_up = [&] {
    const int32_t qo_indptr[] = {0, static_cast<int32_t>(tokens)};
    const int32_t kv_indptr[] = {0, static_cast<int32_t>(pool.total_pages())};
    const int32_t kv_len[] = {static_cast<int32_t>(tokens)};
    attention.plan({qo_indptr, kv_indptr, pages, kv_len, {}}, {.sm_scale = file.config.sm_scale},
                   stream);
    for (size_t t = 0; t < count; ++t) {
      rows[t] = int64_t{pages[t / kPageSize]} * kPageSize + static_cast<int64_t>(t % kPageSize);
    }
    std::iota(places.begin(), places.end(), 0);
    hidden.copy_from_host(file.hidden.data(), hidden.bytes(), stream);
    positions.copy_from_host(places.data(), positions.bytes(), stream);
    slots.copy_from_host(rows.data(), slots.bytes(), stream);
    runtime.fill(pool.layer(0).data, 0xff, LatentPool::bytes(pool.config()), stream);
    out.fill(0xff, stream);
  };
  const auto result = [&] {
    std::vector<float> values(file.expected.size());
    out.copy_to_host(values.data(), out.bytes(), stream);
    stream.synchronize();
    return values;
  };

  std::iota(pages.begin(), pages.end(), 0);
  set_up();
  runtime.begin_capture(stream);
  layer.forward(step, workspace, stream);
  const device::Graph graph = runtime.end_capture(stream);
  for (int round = 0; round < 3; ++round) {
    if (round == 2) std::ranges::reverse(pages);
    set_up();
    attention.order_replay(stream);
    runtime.replay(graph, stream);
    const std::vector<float> replayed = result();
    EXPECT_LE(max_rel_error(file, replayed), 2e-4) << round;
    set_up();
    layer.forward(step, workspace, stream);
    EXPECT_EQ(result(), replayed) << round;
  }
  runtime.destroy_graph(graph);
}

TEST_F(LayerCuda, CapturedStepsOfAnEngineGiveTheFilesOutput) {
  for (const std::string& name : golden_names()) {
    const LayerFile file = open_golden(name);
    EXPECT_LE(max_rel_error(file, run_under_a_bucket(file, kCuda)), 2e-4) << name;
  }
}

// Queued one behind the other: nothing of the first may still be needed by the time of the second.
TEST_F(LayerCuda, LayersThatShareAWorkspaceDoNotMix) {
  const LayerFile file = open_golden("deepseek_v3_small");
  const LayerOptions options{.dtype = DType::kFloat32, .device = kCuda};
  const Layer layer(file.config, file.weights, options);
  LayerWeights others = file.weights;
  std::vector<float> zeros(static_cast<size_t>(others.o_proj.shape[0] * others.o_proj.shape[1]));
  others.o_proj =
      contiguous_view(static_cast<const void*>(zeros.data()), others.o_proj.shape, DType::kFloat32);
  const Layer silent(file.config, others, options);
  LayerWorkspace workspace(file.config, options, 1);
  const int64_t width = file.config.hidden_size;
  const int64_t heads = layer.num_heads();
  const int64_t rank = file.config.kv_lora_rank;
  DeviceMemory attended(kCuda, static_cast<size_t>(heads * rank) * sizeof(float));
  std::vector<float> ones(static_cast<size_t>(heads * rank), 1.0F);
  DeviceMemory out(kCuda, static_cast<size_t>(width) * sizeof(float)), other(kCuda, out.bytes());
  attended.copy_from_host(ones.data(), attended.bytes());
  synchronize(kCuda);
  const DeviceStream stream(kCuda);
  const ConstTensor<3> latents =
      contiguous_view(static_cast<const void*>(attended.data()),
                      std::array{int64_t{1}, heads, rank}, DType::kFloat32, kCuda);
  const auto row = [&](DeviceMemory& memory) {
    return contiguous_view(memory.data(), std::array{int64_t{1}, width}, DType::kFloat32, kCuda);
  };
  layer.output(latents, row(out), workspace, stream);
  silent.output(latents, row(other), workspace, stream);
  std::vector<float> values(static_cast<size_t>(width)), none(values.size(), 1);
  out.copy_to_host(values.data(), out.bytes(), stream);
  other.copy_to_host(none.data(), other.bytes(), stream);
  stream.synchronize();
  EXPECT_TRUE(std::ranges::all_of(none, [](float value) { return value == 0; }));
  EXPECT_TRUE(std::ranges::any_of(values, [](float value) { return value != 0; }));
}

TEST_F(LayerCuda, TensorsOfAnotherDeviceAreRefusedByName) {
  const LayerFile file = open_golden("deepseek_v3_small");
  const LayerOptions options{.dtype = DType::kFloat32, .device = kCuda};
  const Layer layer(file.config, file.weights, options);
  LayerWorkspace workspace(file.config, options, file.num_tokens);
  LayerOptions on_cpu = options;
  on_cpu.device = {};
  LayerWorkspace other(file.config, on_cpu, file.num_tokens);
  const auto refused = [&](const ConstTensor<2>& hidden, Device of_positions, LayerWorkspace& ws) {
    const std::vector<int32_t> positions(static_cast<size_t>(hidden.shape[0]));
    try {
      layer.project(
          hidden, contiguous_view(positions.data(), std::array{hidden.shape[0]}, of_positions), ws);
    } catch (const InvalidArgument& error) {
      return error.parts().what;
    }
    return std::string("accepted");
  };
  ConstTensor<2> hidden = contiguous_view(
      static_cast<const void*>(file.hidden.data()),
      std::array<int64_t, 2>{file.num_tokens, file.config.hidden_size}, DType::kFloat32);
  EXPECT_EQ(refused(hidden, kCuda, workspace), "hidden.device");
  hidden.device = kCuda;
  EXPECT_EQ(refused(hidden, Device{}, workspace), "positions.device");
  EXPECT_EQ(refused(hidden, kCuda, other), "workspace");
  hidden.data = static_cast<const std::byte*>(hidden.data) + 1;
  EXPECT_EQ(refused(hidden, kCuda, workspace), "hidden.data");
}

}  // namespace
}  // namespace mla::cases
