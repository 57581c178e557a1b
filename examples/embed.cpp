// Two requests attend to their pages of one pool layer: 4 new tokens of a prompt of 100, and 1
// token of a request that has 7,000.
#include <cstdio>
#include <vector>

#include "mla/mla.hpp"

int main() {
  const mla::Geometry geometry{.num_heads = 16,
                               .kv_lora_rank = 512,
                               .qk_rope_head_dim = 64,
                               .page_size = 64,
                               .dtype = mla::DType::kBFloat16,
                               .kv_dtype = mla::DType::kBFloat16};
  mla::PagedAttention attention({.geometry = geometry, .num_pages = 128});

  // Host arrays: which queries and which pages are whose. Pages may lie anywhere in the pool.
  const std::vector<int32_t> qo_indptr = {0, 4, 5}, kv_indptr = {0, 2, 112}, kv_len = {100, 7000};
  std::vector<int32_t> pages(112);
  for (int i = 0; i < 112; ++i) pages[i] = 127 - i;
  attention.plan(
      {.qo_indptr = qo_indptr, .kv_indptr = kv_indptr, .kv_indices = pages, .kv_len = kv_len},
      {.sm_scale = 0.0721688F});  // 192^-0.5, of the head before it is absorbed

  // One plan serves every layer of the step.
  std::vector<mla::BFloat16> pool(128 * 64 * 576, mla::BFloat16(0.5F)), q_nope(5 * 16 * 512),
      q_pe(5 * 16 * 64), out(5 * 16 * 512);
  const auto layer = mla::contiguous_view(pool.data(), std::array<int64_t, 3>{128, 64, 576});
  attention.run({.q_nope = mla::contiguous_view(q_nope.data(), std::array<int64_t, 3>{5, 16, 512}),
                 .q_pe = mla::contiguous_view(q_pe.data(), std::array<int64_t, 3>{5, 16, 64}),
                 .cache = mla::split_latent(layer, 512),
                 .out = mla::contiguous_view(out.data(), std::array<int64_t, 3>{5, 16, 512})});
  std::printf("%s: out[4][15][511] = %g\n", attention.kernel().c_str(), float(out.back()));
}
