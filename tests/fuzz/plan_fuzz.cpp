// Any index arrays are refused or planned right: after a plan that is taken, run stays within
// exactly sized memory (which AddressSanitizer watches) and equals the reference.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cases/error_bound.hpp"
#include "cases/random.hpp"
#include "fuzz/byte_reader.hpp"
#include "mla/attention.hpp"
#include "mla/error.hpp"
#include "mla/reference.hpp"
#include "mla/supports.hpp"

namespace {

using mla::fuzz::ByteReader;
using mla::fuzz::fail;

// Every value of a config from the bytes, far out of range too: refused, or a size.
void query_scratch(ByteReader& bytes) {
  mla::AttentionConfig config{.geometry = {.num_heads = bytes.word(),
                                           .kv_lora_rank = bytes.word(),
                                           .qk_rope_head_dim = bytes.word(),
                                           .page_size = bytes.word()},
                              .num_pages = bytes.word()};
  config.limits = {bytes.word(), bytes.word(), bytes.word()};
  config.splits = {.fixed_tokens = bytes.word(), .forced_count = bytes.word()};
  if (bytes.byte() % 2 == 0) {
    config.strides = mla::CacheStrides{bytes.word() * int64_t{bytes.word()}, bytes.word(),
                                       bytes.word() * int64_t{bytes.word()}, bytes.word()};
  }
  try {
    mla::PagedAttention::scratch_bytes(config);
  } catch (const mla::Error&) {
  }
}

mla::AttentionConfig small_config(ByteReader& bytes) {
  // Waking a crew takes longer than most inputs: one in four has several workers.
  static const auto kAlone = std::make_shared<mla::Executor>(1);
  static const auto kCrew = std::make_shared<mla::Executor>(3);
  static const std::vector<mla::KernelVerdict> kKernels =
      mla::supports({.num_heads = 1, .kv_lora_rank = 1, .page_size = 1}).considered;
  const auto dtype = static_cast<mla::DType>(bytes.within(0, 2));
  mla::AttentionConfig config{.geometry = {.num_heads = bytes.within(1, 3),
                                           .kv_lora_rank = bytes.within(1, 20),
                                           .qk_rope_head_dim = bytes.within(0, 8),
                                           .page_size = bytes.within(1, 5),
                                           .dtype = dtype,
                                           .kv_dtype = dtype},
                              .num_pages = bytes.within(0, 9)};
  config.limits = {bytes.within(0, 9), bytes.within(0, 40), bytes.within(0, 60)};
  const int32_t splits = bytes.within(0, 3);
  if (splits == 1) config.splits.forced_count = bytes.within(1, 40);
  if (splits == 2) config.splits.fixed_tokens = bytes.within(1, 40);
  if (bytes.byte() % 3 == 0) config.bucket = mla::Bucket{bytes.within(1, 9), bytes.within(1, 40)};
  const size_t choice = bytes.byte();
  config.executor = choice / kKernels.size() % 4 == 1 ? kCrew : kAlone;
  const auto& kernel = kKernels[choice % kKernels.size()];
  if (kernel.refusal.empty()) config.kernel = kernel.kernel;
  return config;
}

// Offsets that mostly rise by little, as a caller's would, but may be anything.
std::vector<int32_t> read_offsets(ByteReader& bytes, int32_t count) {
  std::vector<int32_t> offsets;
  int64_t at = 0;
  for (int32_t i = 0; i < count; ++i) {
    const uint8_t step = i == 0 ? 0 : bytes.byte();
    if (step >= 250) {
      offsets.push_back(bytes.word());
      continue;
    }
    at += step % 16;
    offsets.push_back(static_cast<int32_t>(at));
  }
  return offsets;
}

std::vector<int32_t> read_values(ByteReader& bytes, int32_t count, int32_t modulus) {
  std::vector<int32_t> values;
  for (int32_t i = 0; i < count; ++i) {
    const uint8_t value = bytes.byte();
    values.push_back(value >= 250 ? bytes.word() : value % modulus);
  }
  return values;
}

struct Arrays {
  std::vector<int32_t> qo_indptr, kv_indptr, kv_indices, lengths;
  bool last_page = false;

  explicit Arrays(ByteReader& bytes) {
    const int32_t rows = bytes.within(0, 10);
    const uint8_t odd = bytes.byte();  // sizes that do not fit each other, now and then
    qo_indptr = read_offsets(bytes, rows + (odd == 255 ? 0 : 1));
    kv_indptr = read_offsets(bytes, rows + (odd == 254 ? 0 : 1));
    lengths = read_values(bytes, rows + (odd == 253 ? 1 : 0), 70);
    kv_indices = read_values(bytes, bytes.within(0, 60), 10);
    last_page = odd % 4 == 0;
  }

  mla::Batch batch() const {
    mla::Batch batch{.qo_indptr = qo_indptr, .kv_indptr = kv_indptr, .kv_indices = kv_indices};
    (last_page ? batch.kv_last_page_len : batch.kv_len) = lengths;
    return batch;
  }
};

// A tensor in memory of exactly its size.
struct Memory {
  std::vector<std::byte> bytes;
  mla::Tensor<3> view;

  Memory(std::array<int64_t, 3> shape, mla::DType dtype, uint64_t key)
      : bytes(static_cast<size_t>(shape[0] * shape[1] * shape[2] * mla::size_of(dtype))),
        view(mla::contiguous_view(static_cast<void*>(bytes.data()), shape, dtype)) {
    mla::cases::fill_uniform(key, dtype, bytes.data(), shape[0] * shape[1] * shape[2]);
  }
};

double value_at(const mla::Tensor<3>& tensor, int64_t at) {
  switch (tensor.dtype) {
    case mla::DType::kBFloat16:
      return static_cast<float>(static_cast<const mla::BFloat16*>(tensor.data)[at]);
    case mla::DType::kFloat16:
      return static_cast<float>(static_cast<const mla::Float16*>(tensor.data)[at]);
    default:
      return static_cast<const float*>(tensor.data)[at];
  }
}

void run_and_compare(mla::PagedAttention& attention, const mla::AttentionConfig& config,
                     const Arrays& arrays, const mla::PlanOptions& options) {
  const mla::Geometry& g = config.geometry;
  const int64_t live = arrays.qo_indptr.back();
  const int64_t tokens = config.bucket ? config.bucket->num_tokens : live;
  const Memory q_nope({tokens, g.num_heads, g.kv_lora_rank}, g.dtype, 1);
  const Memory q_pe({tokens, g.num_heads, g.qk_rope_head_dim}, g.dtype, 2);
  const Memory pool({config.num_pages, g.page_size, g.latent_width()}, g.dtype, 3);
  const Memory out({tokens, g.num_heads, g.kv_lora_rank}, g.dtype, 4);
  std::vector<float> lse(static_cast<size_t>(tokens * g.num_heads), NAN);
  const mla::RunArgs args{.q_nope = q_nope.view,
                          .q_pe = q_pe.view,
                          .cache = mla::split_latent(pool.view, g.kv_lora_rank),
                          .out = out.view,
                          .lse = {lse.data(), {tokens, g.num_heads}, {g.num_heads, 1}}};
  attention.run(args);
  std::vector<double> expected(static_cast<size_t>(g.kv_lora_rank));
  for (int64_t row = 0; row < tokens * g.num_heads; ++row) {
    mla::ReferenceRow reference{.lse = -INFINITY};
    std::fill(expected.begin(), expected.end(), 0.0);
    if (row / g.num_heads < live) {
      reference =
          mla::reference_row(g, arrays.batch(), options.sm_scale, options.causal, args.q_nope,
                             args.q_pe, args.cache, row / g.num_heads, row % g.num_heads, expected);
    }
    const auto bound = mla::cases::error_bound(g, reference);
    const float got = lse[static_cast<size_t>(row)];
    const bool is_empty = std::isinf(reference.lse);
    if (is_empty ? got != -INFINITY : !(std::abs(got - reference.lse) <= bound.lse)) fail("lse");
    for (int64_t c = 0; c < g.kv_lora_rank; ++c) {
      const double value = expected[static_cast<size_t>(c)];
      const double error = std::abs(value_at(out.view, row * g.kv_lora_rank + c) - value);
      if (!(error <= (is_empty ? 0 : mla::cases::value_bound(bound, g.dtype, value)))) fail("out");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data,
                                      size_t size) {  // NOLINT: libFuzzer's name
  ByteReader bytes({data, size});
  if (bytes.byte() % 8 == 0) {
    query_scratch(bytes);
    return 0;
  }
  const mla::AttentionConfig config = small_config(bytes);
  mla::PagedAttention attention(config);
  while (!bytes.empty()) {
    const Arrays arrays(bytes);
    const mla::PlanOptions options{.sm_scale = static_cast<float>(bytes.within(0, 20)) / 8,
                                   .causal = bytes.byte() % 2 == 0};
    try {
      attention.plan(arrays.batch(), options);
    } catch (const mla::InvalidArgument&) {
      continue;
    }
    run_and_compare(attention, config, arrays, options);
  }
  return 0;
}
