#include <cstdlib>

#include "core/checks.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

constexpr const char* kRun = "PagedAttention::run";

[[noreturn]] void refuse(const std::string& what, std::string expected, std::string got) {
  throw_invalid(
      {.what = what, .where = kRun, .expected = std::move(expected), .got = std::move(got)});
}

// Where it lives, what it holds, its shape, its last dimension, and that it is there at all.
template <class T, int Rank>
void check_tensor(const char* name, const TensorView<T, Rank>& tensor,
                  const std::array<int64_t, Rank>& shape, DType dtype, Device device) {
  const auto field = [name](const char* suffix) { return std::string(name) + suffix; };
  if (tensor.shape != shape) refuse(field(".shape"), to_string(shape), to_string(tensor.shape));
  if (tensor.dtype != dtype) {
    refuse(field(".dtype"), std::string(name_of(dtype)), std::string(name_of(tensor.dtype)));
  }
  if (tensor.device != device) {
    refuse(field(".device"), to_string(device), to_string(tensor.device));
  }
  if (tensor.empty()) return;
  if (tensor.data == nullptr) refuse(field(".data"), "a tensor " + to_string(shape), "null");
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(size_of(dtype)) != 0) {
    refuse(field(".data"), "an address aligned to its elements, " + std::to_string(size_of(dtype)),
           "another");
  }
}

// [T, H, width]: contiguous columns, and no address beyond 2^61 bytes.
template <class T>
void check_token_strides(const char* name, const TensorView<T, 3>& tensor) {
  if (tensor.shape[2] > 1 && tensor.stride[2] != 1) {
    refuse(std::string(name) + ".stride[2]", "1", std::to_string(tensor.stride[2]));
  }
  for (size_t d = 0; d < 2; ++d) {
    int64_t end = 0;
    if (tensor.stride[d] < 0 || __builtin_mul_overflow(tensor.stride[d], tensor.shape[d], &end) ||
        end > (int64_t{1} << 59)) {
      refuse(std::string(name) + ".stride[" + std::to_string(d) + "]",
             "0 or more, within 2^59 elements", std::to_string(tensor.stride[d]));
    }
  }
}

// Rows of an output must not run into each other, whichever of the two dimensions is outermost.
void check_rows_apart(const char* name, std::array<int64_t, 2> extent,
                      std::array<int64_t, 2> stride, int64_t width) {
  size_t inner = 1;
  if (extent[0] > 1 && (extent[1] <= 1 || stride[0] < stride[1])) inner = 0;
  const size_t outer = 1 - inner;
  if (extent[inner] > 1 && stride[inner] < width) {
    refuse(std::string(name) + ".stride[" + std::to_string(inner) + "]",
           "at least " + std::to_string(width) + ", so that rows do not overlap",
           std::to_string(stride[inner]));
  }
  const int64_t span = (extent[inner] - 1) * stride[inner] + width;
  if (extent[outer] > 1 && extent[inner] > 0 && stride[outer] < span) {
    refuse(std::string(name) + ".stride[" + std::to_string(outer) + "]",
           "at least " + std::to_string(span) + ", so that rows do not overlap",
           std::to_string(stride[outer]));
  }
}

void check_cache_part(const char* name, const ConstTensor<3>& tensor, int64_t width, int64_t page,
                      int64_t row, const AttentionConfig& config) {
  const Geometry& geometry = config.geometry;
  check_tensor<const void, 3>(name, tensor, {config.num_pages, geometry.page_size, width},
                              geometry.kv_dtype, config.device);
  const auto check = [&](size_t d, int64_t expected, const char* declared) {
    if (tensor.shape[d] <= 1 || tensor.stride[d] == expected) return;
    refuse(std::string(name) + ".stride[" + std::to_string(d) + "]",
           std::to_string(expected) + declared, std::to_string(tensor.stride[d]));
  };
  check(2, 1, "");
  check(1, row, ", the row stride declared at creation");
  check(0, page, ", the page stride declared at creation");
}

int64_t check_num_tokens(const RunArgs& args, const AttentionConfig& config, int64_t num_tokens) {
  const int64_t got = args.q_nope.shape[0];
  if (got == num_tokens || (config.bucket && got == config.bucket->num_tokens)) return got;
  refuse("q_nope.shape[0]",
         std::to_string(num_tokens) + " query tokens, as planned" +
             (config.bucket ? ", or " + std::to_string(config.bucket->num_tokens) + ", the bucket's"
                            : ""),
         std::to_string(got));
}

}  // namespace

void check_run(const RunArgs& args, const AttentionConfig& config, int64_t num_tokens) {
  const Geometry& geometry = config.geometry;
  const int64_t tokens = check_num_tokens(args, config, num_tokens);
  if (tokens == 0) return;  // nothing is read or written: even empty views will do
  const int64_t heads = geometry.num_heads;
  const int64_t rank = geometry.kv_lora_rank;
  const int64_t rope = geometry.qk_rope_head_dim;
  check_tensor<const void, 3>("q_nope", args.q_nope, {tokens, heads, rank}, geometry.dtype,
                              config.device);
  check_token_strides("q_nope", args.q_nope);
  if (rope > 0) {
    check_tensor<const void, 3>("q_pe", args.q_pe, {tokens, heads, rope}, geometry.dtype,
                                config.device);
    check_token_strides("q_pe", args.q_pe);
  }
  const CacheStrides strides = strides_of(config);
  check_cache_part("cache.ckv", args.cache.ckv, rank, strides.ckv_page, strides.ckv_row, config);
  if (rope > 0) {
    check_cache_part("cache.kpe", args.cache.kpe, rope, strides.kpe_page, strides.kpe_row, config);
  }
  check_tensor<void, 3>("out", args.out, {tokens, heads, rank}, geometry.dtype, config.device);
  check_token_strides("out", args.out);
  check_rows_apart("out", {tokens, heads}, {args.out.stride[0], args.out.stride[1]}, rank);
  if (args.lse.data != nullptr) {
    check_tensor<float, 2>("lse", args.lse, {tokens, heads}, DType::kFloat32, config.device);
    check_rows_apart("lse", {tokens, heads}, args.lse.stride, 1);
  }
}

}  // namespace mla
