#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "mla/content.hpp"
#include "mla/step_tensors.hpp"

namespace mla::cli {
namespace {

// The checker draws single rows again; a step draws all of its own at once.
TEST(StepTensorsUnit, AStepDrawsTheRowsOfItsContent) {
  const Geometry geometry{.num_heads = 3,
                          .kv_lora_rank = 40,
                          .qk_rope_head_dim = 8,
                          .dtype = DType::kBFloat16,
                          .kv_dtype = DType::kBFloat16};
  constexpr int64_t kTokens = 7;
  constexpr int32_t kLayer = 5;
  const Content content(11, geometry.dtype, geometry.latent_width(), geometry.num_heads);
  StepTensors tensors(geometry, kTokens, Device{});
  Executor executor(2);
  std::vector<TokenKeys> keys;
  for (int64_t t = 0; t < kTokens; ++t) {
    keys.push_back(
        {.row = content.latent_key(77, t, kLayer), .query = content.query_key(77, t, kLayer)});
  }
  tensors.draw(keys, executor, {});
  const StepViews views = tensors.views(kTokens);
  std::vector<std::byte> row(static_cast<size_t>(content.latent_row_bytes()));
  std::vector<std::byte> query(static_cast<size_t>(content.query_bytes()));
  for (int64_t t = 0; t < kTokens; ++t) {
    content.latent_row(77, t, kLayer, row.data());
    content.query(77, t, kLayer, query.data());
    const auto token = static_cast<size_t>(t);
    EXPECT_EQ(std::memcmp(static_cast<const std::byte*>(views.rows.data) + token * row.size(),
                          row.data(), row.size()),
              0);
    EXPECT_EQ(std::memcmp(static_cast<const std::byte*>(views.queries.data) + token * query.size(),
                          query.data(), query.size()),
              0);
  }
}

}  // namespace
}  // namespace mla::cli
