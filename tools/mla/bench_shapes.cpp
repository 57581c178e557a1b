#include "mla/bench_shapes.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

#include "mla/supports.hpp"

namespace mla::cli {
namespace {

struct Dims {
  int32_t heads = 16;
  int32_t queries = 1;
  int32_t rank = 512;
  int32_t rope = 64;
};

BenchShape shape_of(std::string group, const Dims& dims, std::vector<int32_t> kv_lens,
                    const std::string& lengths) {
  BenchShape shape;
  shape.group = std::move(group);
  cases::AttentionCase& c = shape.attention_case;
  c.geometry.num_heads = dims.heads;
  c.geometry.kv_lora_rank = dims.rank;
  c.geometry.qk_rope_head_dim = dims.rope;
  c.q_lens.assign(kv_lens.size(), dims.queries);
  c.kv_lens = std::move(kv_lens);
  c.causal = dims.queries > 1;
  c.name = fmt::format("{}+{} h{} q{} b{} kv {}", dims.rank, dims.rope, dims.heads, dims.queries,
                       c.q_lens.size(), lengths);
  return shape;
}

BenchShape equal_shape(std::string group, const Dims& dims, size_t batch, int32_t kv_len) {
  return shape_of(std::move(group), dims, std::vector<int32_t>(batch, kv_len),
                  std::to_string(kv_len));
}

// Lengths as uneven as a server's, with the generator and seed of the anchors' rows.
BenchShape log_normal_shape(const Dims& dims, size_t batch, int32_t kv_scale,
                            std::string group = "batch") {
  std::mt19937 generator(1);  // NOLINT(cert-msc51-cpp): the same lengths every time
  std::vector<int32_t> kv_lens(batch);
  for (int32_t& kv_len : kv_lens) {
    std::normal_distribution<double> normal(0, 1.2);  // a new one: it keeps every second value back
    kv_len = std::max(1, static_cast<int32_t>(kv_scale * 0.25 * std::exp(normal(generator))));
  }
  return shape_of(std::move(group), dims, std::move(kv_lens),
                  fmt::format("log-normal {}", kv_scale));
}

// Decode over batches and lengths, several queries, uneven lengths.
std::vector<BenchShape> gpu_grid() {
  std::vector<BenchShape> shapes;
  for (const int32_t heads : {16, 64, 128}) {
    for (const size_t batch : {1, 8, 32, 128}) {
      for (const int32_t kv_len : {1024, 4096, 16384, 65536}) {
        if (batch == 128 && kv_len == 65536) continue;
        shapes.push_back(equal_shape("grid", {.heads = heads}, batch, kv_len));
      }
    }
  }
  for (const int32_t heads : {16, 128}) {
    for (const size_t batch : {8, 64}) {
      for (const int32_t queries : {2, 4}) {
        shapes.push_back(equal_shape("grid", {.heads = heads, .queries = queries}, batch, 4096));
      }
    }
  }
  for (const int32_t heads : {16, 128}) {
    for (const size_t batch : {32, 128}) {
      shapes.push_back(log_normal_shape({.heads = heads}, batch, 8192, "grid"));
    }
  }
  return shapes;
}

// The kernel for every shape, where the batch is large enough that its rate counts.
void add_general_shapes(std::vector<BenchShape>& shapes) {
  constexpr int64_t kLeastTokens = 131072;
  std::vector<BenchShape> general = gpu_grid();
  std::erase_if(general, [](const BenchShape& shape) {
    const std::vector<int32_t>& kv_lens = shape.attention_case.kv_lens;
    return std::accumulate(kv_lens.begin(), kv_lens.end(), int64_t{0}) < kLeastTokens;
  });
  const std::pair<int32_t, int32_t> latents[] = {
      {512, 0}, {256, 64}, {192, 64}, {128, 32}, {64, 16}};
  for (const auto& [rank, rope] : latents) {
    general.push_back(equal_shape("general", {.rank = rank, .rope = rope}, 32, 16384));
  }
  for (BenchShape& shape : general) {
    shape.group = "general";
    shape.attention_case.kernel = "cuda_tensor_core";
    shapes.push_back(std::move(shape));
  }
}

}  // namespace

double BenchShape::flops() const {
  const cases::AttentionCase& c = attention_case;
  double pairs = 0;  // of a query and a key that it sees
  for (size_t row = 0; row < c.q_lens.size(); ++row) {
    for (int32_t query = 0; query < c.q_lens[row]; ++query) {
      const int32_t hidden = c.causal ? c.q_lens[row] - 1 - query : 0;
      pairs += std::max(0, c.kv_lens[row] - hidden);
    }
  }
  const auto width = static_cast<double>(c.geometry.latent_width() + c.geometry.kv_lora_rank);
  return 2 * c.geometry.num_heads * width * pairs;
}

double BenchShape::matrix_flops() const {
  constexpr double kTileRows = 64;
  const double rows =
      static_cast<double>(attention_case.geometry.num_heads) * attention_case.q_lens[0];
  return flops() * std::max(1.0, kTileRows / rows);
}

double BenchShape::bytes() const {
  const cases::AttentionCase& c = attention_case;
  double keys = 0;
  for (const int32_t kv_len : c.kv_lens) keys += kv_len;
  const auto latent = static_cast<double>(c.geometry.latent_width());
  const double of_a_query = c.geometry.num_heads * (latent + c.geometry.kv_lora_rank);
  return static_cast<double>(size_of(c.geometry.dtype)) *
         (keys * latent + static_cast<double>(c.num_tokens()) * of_a_query);
}

std::vector<BenchShape> bench_shapes() {
  std::vector<BenchShape> shapes;
  for (const int32_t kv_len : {1024, 4096, 16384}) {
    shapes.push_back(equal_shape("decode", {.heads = 128}, 1, kv_len));
  }
  for (const int32_t kv_len : {1024, 4096, 16384, 65536}) {
    shapes.push_back(equal_shape("decode", {.heads = 16}, 1, kv_len));
  }
  shapes.push_back(equal_shape("decode", {.heads = 64}, 1, 4096));
  shapes.push_back(equal_shape("decode", {.heads = 16, .rope = 0}, 1, 4096));
  for (const int32_t queries : {4, 16, 64}) {
    shapes.push_back(equal_shape("queries", {.heads = 16, .queries = queries}, 1, 4096));
  }
  shapes.push_back(equal_shape("queries", {.heads = 128, .queries = 4}, 1, 4096));
  shapes.push_back(equal_shape("latent", {.rank = 256, .rope = 64}, 1, 4096));
  shapes.push_back(equal_shape("latent", {.rank = 128, .rope = 32}, 1, 4096));
  shapes.push_back(equal_shape("latent", {.rank = 64, .rope = 16}, 1, 4096));
  shapes.push_back(equal_shape("batch", {.heads = 16}, 8, 1024));
  shapes.push_back(equal_shape("batch", {.heads = 16}, 32, 1024));
  shapes.push_back(equal_shape("batch", {.heads = 64}, 8, 1024));
  shapes.push_back(equal_shape("batch", {.heads = 128}, 8, 1024));
  shapes.push_back(log_normal_shape({.heads = 16}, 32, 2048));
  shapes.push_back(log_normal_shape({.heads = 128}, 32, 1024));
  return shapes;
}

std::vector<BenchShape> gpu_bench_shapes() {
  std::vector<BenchShape> shapes = gpu_grid();
  for (const int32_t heads : {1, 8, 12, 20, 32, 48, 65, 96}) {
    shapes.push_back(equal_shape("heads", {.heads = heads}, 32, 16384));
  }
  for (const int32_t page_size : {1, 16, 32, 128}) {
    for (const int32_t heads : {16, 128}) {
      BenchShape shape = equal_shape("pages", {.heads = heads}, 32, 4096);
      shape.attention_case.geometry.page_size = page_size;
      shape.attention_case.name += fmt::format(" page {}", page_size);
      shapes.push_back(shape);
    }
  }
  const std::pair<int32_t, int32_t> latents[] = {{512, 0}, {500, 60}};
  for (const auto& [rank, rope] : latents) {
    shapes.push_back(equal_shape("latent", {.rank = rank, .rope = rope}, 32, 16384));
  }
  BenchShape fp32 = equal_shape("dtype", {}, 8, 16384);
  fp32.attention_case.geometry.dtype = fp32.attention_case.geometry.kv_dtype = DType::kFloat32;
  fp32.attention_case.name += " fp32";
  shapes.push_back(fp32);
  shapes.push_back(equal_shape("prefill", {.heads = 128, .queries = 1024}, 4, 8192));
  shapes.push_back(equal_shape("prefill", {.heads = 16, .queries = 1024}, 4, 8192));
  add_general_shapes(shapes);
  return shapes;
}

std::vector<std::string> drop_unserved(std::vector<BenchShape>& shapes, Device device) {
  std::map<std::string, int> counts;  // by group and reason
  std::erase_if(shapes, [&](const BenchShape& shape) {
    const cases::AttentionCase& c = shape.attention_case;
    if (c.kernel.empty()) return false;
    const Support support = supports(c.geometry, device, std::nullopt, c.kernel);
    if (!support) ++counts[shape.group + ": " + support.reason];
    return !support;
  });
  std::vector<std::string> lines;
  lines.reserve(counts.size());
  for (const auto& [text, count] : counts) {
    lines.push_back(fmt::format("{} shapes are skipped, {}", count, text));
  }
  return lines;
}

}  // namespace mla::cli
