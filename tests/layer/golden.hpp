#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cases/layer_case.hpp"
#include "mla/pool.hpp"

// The layer files of golden/; on another machine than the one that built the tests they are where
// the environment variable MLA_GOLDEN_LAYERS says.
namespace mla::cases {

inline std::string golden_folder() {
  const char* folder = std::getenv("MLA_GOLDEN_LAYERS");
  return folder == nullptr ? MLA_GOLDEN_LAYERS : folder;
}

inline LayerFile open_golden(const std::string& name) {
  return LayerFile(golden_folder() + "/" + name + ".safetensors");
}

inline std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden_folder())) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::ranges::sort(names);
  return names;
}

/// A pool of just the file's tokens, in fp32.
inline PoolConfig pool_of(const LayerFile& file, int32_t page_size, Device device) {
  return {.num_pages = (file.num_tokens + page_size - 1) / page_size,
          .page_size = page_size,
          .kv_lora_rank = file.config.kv_lora_rank,
          .qk_rope_head_dim = file.config.qk_rope_head_dim,
          .dtype = DType::kFloat32,
          .device = device};
}

/// Runs the file in one pass, in chunks, token by token and interleaved with other requests, and
/// expects each output within the dtype's bound.
inline void expect_every_way(const std::string& name, LayerRun run) {
  const LayerFile file = open_golden(name);
  const double bound = error_bound(file, run.dtype);
  EXPECT_LE(max_rel_error(file, run_layer(file, run, one_pass(file))[0]), bound);
  EXPECT_LE(max_rel_error(file, run_layer(file, run, in_chunks(file))[0]), bound);
  EXPECT_LE(max_rel_error(file, run_layer(file, run, token_by_token(file))[0]), bound);
  run.staged = true;
  for (const auto& output : run_layer(file, run, interleaved(file, 4, 17))) {
    EXPECT_LE(max_rel_error(file, output), bound);
  }
}

}  // namespace mla::cases
