#include <string>

#include "core/checks.hpp"
#include "core/tensor_checks.hpp"

namespace mla {
namespace {

constexpr const char* kRun = "PagedAttention::run";

// [T, H, width], contiguous columns.
void check_rows(const TensorName& name, const ConstTensor<3>& tensor,
                const std::array<int64_t, 3>& shape, const AttentionConfig& config) {
  check_tensor(name, tensor, shape, config.geometry.dtype, config.device);
  check_columns(name, shape[2], tensor.stride[2]);
  check_row_strides(name, row_strides(tensor));
}

void check_cache_part(const TensorName& name, const ConstTensor<3>& tensor, int64_t width,
                      int64_t page, int64_t row, const AttentionConfig& config) {
  const Geometry& geometry = config.geometry;
  check_tensor(name, tensor, {config.num_pages, geometry.page_size, width}, geometry.kv_dtype,
               config.device);
  check_columns(name, width, tensor.stride[2]);
  const auto check = [&](size_t d, int64_t expected, const char* declared) {
    if (tensor.empty() || tensor.shape[d] <= 1 || tensor.stride[d] == expected) return;
    refuse_tensor(name, ".stride[" + std::to_string(d) + "]", std::to_string(expected) + declared,
                  std::to_string(tensor.stride[d]));
  };
  check(1, row, ", the row stride declared at creation");
  check(0, page, ", the page stride declared at creation");
}

void check_apart_from_inputs(const TensorName& name, const ByteRows& output, const RunArgs& args,
                             int64_t rope) {
  check_apart(name, output, {kRun, "q_nope"}, byte_rows(args.q_nope));
  check_apart(name, output, {kRun, "cache.ckv"}, byte_rows(args.cache.ckv));
  if (rope == 0) return;
  check_apart(name, output, {kRun, "q_pe"}, byte_rows(args.q_pe));
  check_apart(name, output, {kRun, "cache.kpe"}, byte_rows(args.cache.kpe));
}

}  // namespace

std::string TokenCounts::expected() const {
  std::string text;
  if (!in_capture) text = std::to_string(planned) + " query tokens, as planned";
  if (!in_capture && bucket) text += ", or ";
  if (bucket) text += std::to_string(*bucket) + ", the bucket's";
  if (in_capture) text += ", in a capture";
  return text;
}

void check_run(const RunArgs& args, const AttentionConfig& config, const TokenCounts& counts) {
  const int64_t tokens = args.q_nope.shape[0];
  if (!counts.accept(tokens)) {
    refuse_tensor({kRun, "q_nope"}, ".shape[0]", counts.expected(), std::to_string(tokens));
  }
  if (tokens == 0) return;  // nothing is read or written: even empty views will do
  const int64_t heads = config.geometry.num_heads;
  const int64_t rank = config.geometry.kv_lora_rank;
  const int64_t rope = config.geometry.qk_rope_head_dim;
  check_rows({kRun, "q_nope"}, args.q_nope, {tokens, heads, rank}, config);
  if (rope > 0) check_rows({kRun, "q_pe"}, args.q_pe, {tokens, heads, rope}, config);

  const CacheStrides strides = strides_of(config);
  check_cache_part({kRun, "cache.ckv"}, args.cache.ckv, rank, strides.ckv_page, strides.ckv_row,
                   config);
  if (rope > 0) {
    check_cache_part({kRun, "cache.kpe"}, args.cache.kpe, rope, strides.kpe_page, strides.kpe_row,
                     config);
  }

  check_rows({kRun, "out"}, args.out, {tokens, heads, rank}, config);
  check_rows_apart({kRun, "out"}, row_strides(args.out));
  check_apart_from_inputs({kRun, "out"}, byte_rows(args.out), args, rope);
  if (args.lse.data == nullptr) return;
  const TensorName lse{kRun, "lse"};
  check_tensor(lse, args.lse, {tokens, heads}, DType::kFloat32, config.device);
  check_row_strides(lse, row_strides(args.lse));
  check_rows_apart(lse, row_strides(args.lse));
  check_apart(lse, byte_rows(args.lse), {kRun, "out"}, byte_rows(args.out));
  check_apart_from_inputs(lse, byte_rows(args.lse), args, rope);
}

}  // namespace mla
