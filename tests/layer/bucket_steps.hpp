#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "cases/layer_case.hpp"
#include "layer/golden.hpp"
#include "mla/mla.hpp"

namespace mla::cases {

/// The file's layer in fp32 as an engine runs it under a bucket: in chunks that are padded to the
/// bucket's tokens, into two slots in turn, with the cache rows stored by Layer::forward where
/// KvResource::slots_buf says. On CUDA a slot's first step is captured, the others are replayed.
/// Returns the outputs, [T, hidden_size].
inline std::vector<float> run_under_a_bucket(const LayerFile& file, Device device) {
  constexpr int64_t kTokens = 16;  // of the bucket
  constexpr int32_t kChunks[] = {5, 16, 1, 3};
  constexpr int32_t kPageSize = 4;
  const bool has_graphs = device.kind == DeviceKind::kCuda;
  const int64_t width = file.config.hidden_size;
  const LayerOptions options{.dtype = DType::kFloat32, .device = device};
  const Layer layer(file.config, file.weights, options);
  LayerWorkspace workspace(file.config, options, kTokens);
  LatentPool pool(pool_of(file, kPageSize, device));
  KvResource kv(pool);
  AttentionResource attention(
      pool, kv.key(),
      {.geometry = layer.geometry(kPageSize),
       .sm_scale = file.config.sm_scale,
       .limits = {.max_rows = 1, .max_tokens = kTokens, .max_listed_pages = pool.total_pages()},
       .capture = has_graphs});
  StepRunner steps({&kv, &attention});
  const GraphBucket bucket{"chunk", {.num_rows = 1, .num_tokens = kTokens}};
  std::vector<GraphBucket> buckets;
  if (has_graphs) buckets.push_back(bucket);
  const DeviceStream stream(device);
  GraphRunner graphs(
      steps, {.device = device, .buckets = buckets, .max_listed_pages = pool.total_pages()});

  const std::array<int64_t, 2> shape{kTokens, width};
  DeviceMemory hidden(device, static_cast<size_t>(kTokens * width) * sizeof(float));
  DeviceMemory positions(device, kTokens * sizeof(int32_t)), out(device, hidden.bytes());
  const auto forward = [&](Stream s) {
    layer.forward(
        {.hidden = contiguous_view(static_cast<const void*>(hidden.data()), shape, DType::kFloat32,
                                   device),
         .positions = contiguous_view(static_cast<const int32_t*>(positions.data()),
                                      std::array{kTokens}, device),
         .slots = kv.slots_buf("main", s),
         .pool = &pool,
         .attention = steps.results().get<AttentionPlan>(attention.key()).entries[0].attention,
         .out = contiguous_view(out.data(), shape, DType::kFloat32, device)},
        workspace, s);
  };

  kv.open({.request = 1});
  std::vector<float> outputs, padded(static_cast<size_t>(kTokens * width));
  std::vector<int32_t> places(kTokens);
  for (int64_t start = 0, chunk = 0; start < file.num_tokens; ++chunk) {
    const int64_t count = std::min<int64_t>(kChunks[chunk % 4], file.num_tokens - start);
    Step step;
    step.part<KvStep>(kv.key()).segments = {{.request = 1, .span = static_cast<int32_t>(count)}};
    step.part<AttentionStep>(attention.key());
    const SlotLease lease{.slot = static_cast<int32_t>(chunk % 2), .bucket = bucket};
    EXPECT_TRUE(steps.admit(step));
    steps.plan(step, lease, stream);
    std::ranges::fill(padded, 1.0F);
    std::copy_n(file.hidden.begin() + start * width, count * width, padded.begin());
    for (int64_t i = 0; i < kTokens; ++i)
      places[i] = static_cast<int32_t>(i < count ? start + i : 0);
    hidden.copy_from_host(padded.data(), hidden.bytes(), stream);
    positions.copy_from_host(places.data(), positions.bytes(), stream);
    if (has_graphs) {
      graphs.run(lease, stream, forward);
    } else {
      forward(stream);
    }
    out.copy_to_host(padded.data(), out.bytes(), stream);
    stream.synchronize();
    outputs.insert(outputs.end(), padded.begin(), padded.begin() + count * width);
    steps.commit();
    start += count;
  }
  return outputs;
}

}  // namespace mla::cases
