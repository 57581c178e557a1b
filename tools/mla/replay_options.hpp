#pragma once

#include <cstdint>
#include <string>

#include "mla/device.hpp"
#include "mla/dtype.hpp"

namespace mla::cli {

struct ReplayOptions {
  std::string trace;
  int64_t max_requests = INT64_MAX;
  double length_scale = 1;
  int32_t num_heads = 16;
  int32_t num_layers = 2;
  int32_t kv_lora_rank = 512;
  int32_t qk_rope_head_dim = 64;
  double sm_scale = 0.07216878364870322;  ///< 192^-0.5
  int32_t page_size = 64;
  int64_t num_pages = 0;  ///< usable pages; 0: room for kDefaultPoolTokens
  int64_t token_budget = 2048;
  int64_t max_running = 256;
  int32_t num_drafts = 0;  ///< that each decode step verifies
  DType dtype = DType::kBFloat16;
  Device device{};      ///< cpu or cuda:N
  int num_threads = 0;  ///< 0: every processor that may be used; on a GPU they check rows
  int64_t checks_per_step = 2;
  uint64_t seed = 1;
  std::string kernel;  ///< empty: the first that accepts
  bool obey_arrivals = false;
};

inline constexpr int64_t kDefaultPoolTokens = 131072;

}  // namespace mla::cli
