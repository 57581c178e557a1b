// Plans and runs one request of three keys whose rows are 1, 2 and 3, with queries of zero: the
// output is their mean. Also provokes an error, to see that exceptions cross the library's border.
#include <array>
#include <cstdio>
#include <vector>

#include "mla/mla.h"
#include "mla/mla.hpp"

int main() {
  mla::PagedAttention attention({.geometry = {.num_heads = 1,
                                              .kv_lora_rank = 8,
                                              .qk_rope_head_dim = 0,
                                              .page_size = 4,
                                              .dtype = mla::DType::kFloat32,
                                              .kv_dtype = mla::DType::kFloat32},
                                 .num_pages = 1});
  const std::vector<int32_t> indptr = {0, 1}, pages = {0}, kv_len = {3};
  const mla::Batch batch{
      .qo_indptr = indptr, .kv_indptr = indptr, .kv_indices = pages, .kv_len = kv_len};
  try {
    attention.plan(batch, {});
    return 1;
  } catch (const mla::InvalidArgument& error) {
    std::printf("%s\n", error.what());
  }
  attention.plan(batch, {.sm_scale = 1});
  std::vector<float> pool(4 * 8), q(8), out(8);
  for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<float>(i / 8 + 1);
  const std::array<int64_t, 3> row = {1, 1, 8}, page = {1, 4, 8};
  attention.run({.q_nope = mla::contiguous_view(q.data(), row),
                 .cache = mla::split_latent(mla::contiguous_view(pool.data(), page), 8),
                 .out = mla::contiguous_view(out.data(), row)});
  std::printf("libmla %s, kernel %s: %g\n", mla_version(), attention.kernel().c_str(), out[7]);
  return out[7] == 2 ? 0 : 1;
}
