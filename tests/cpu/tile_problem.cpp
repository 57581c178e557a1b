#include "cpu/tile_problem.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "cases/random.hpp"
#include "cpu/reference.hpp"
#include "cpu/rows.hpp"

namespace mla::cpu {
namespace {

constexpr std::byte kPoison{0xff};  // NaN in fp32, bf16 and fp16
constexpr int64_t kGap = 3;         // elements between rows of every tensor: no row is aligned
constexpr int32_t kFirstQuery = 2;  // queries of the request before
constexpr size_t kGuard = 64;
constexpr int64_t kMemoryAlign = 64;

bool is_poison(const std::byte* data, size_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte b) { return b == kPoison; });
}

float load(DType dtype, const std::byte* at) {
  BFloat16 bf16;
  Float16 fp16;
  float fp32 = 0;
  switch (dtype) {
    case DType::kBFloat16:
      std::memcpy(&bf16, at, sizeof bf16);
      return static_cast<float>(bf16);
    case DType::kFloat16:
      std::memcpy(&fp16, at, sizeof fp16);
      return static_cast<float>(fp16);
    default:
      std::memcpy(&fp32, at, sizeof fp32);
      return fp32;
  }
}

// Half a unit in the last place of a value below `largest`.
double rounding(DType dtype, double largest) {
  switch (dtype) {
    case DType::kBFloat16:
      return largest * 0x1p-9;
    case DType::kFloat16:
      return largest * 0x1p-12 + 0x1p-25;  // 2^-25: of subnormal numbers
    default:
      return 0;
  }
}

double ulp(double value) {
  const auto nearest = static_cast<float>(value);
  return static_cast<double>(std::nextafter(nearest, INFINITY)) - static_cast<double>(nearest);
}

}  // namespace

TileProblem::TileProblem(const TileCase& tile_case, const AttentionImpl& impl)
    : case_(tile_case), impl_(impl) {
  const Geometry& g = case_.geometry;
  element_ = size_of(g.dtype);
  row_stride_ = g.latent_width() + kGap;
  out_stride_ = g.kv_lora_rank + kGap;
  if (case_.kv_end < 0) case_.kv_end = case_.num_keys;
  const int64_t all_rows = int64_t{case_.num_queries} * g.num_heads;
  if (case_.num_rows == 0) {
    case_.num_rows = static_cast<int32_t>(
        std::min<int64_t>(impl.cost_model({g}).tile_rows, all_rows - case_.row_begin));
  }

  // Pages: one of the request before, then this request's, then two that lead nowhere.
  const int32_t pages = (case_.num_keys + g.page_size - 1) / g.page_size;
  const int32_t pool_pages = 2 * pages + 2;
  kv_indices_ = {0};
  for (int32_t i = 0; i < pages; ++i) {
    kv_indices_.push_back(case_.contiguous ? i + 1 : pool_pages - 1 - 2 * i);
  }
  kv_indices_.push_back(-1);
  kv_indices_.push_back(std::numeric_limits<int32_t>::max());
  qo_indptr_ = {0, kFirstQuery, kFirstQuery + case_.num_queries};
  kv_indptr_ = {0, 1, 1 + pages};
  kv_len_ = {1, case_.num_keys};

  const auto poisoned = [&](int64_t elements) {
    return std::vector<std::byte>(static_cast<size_t>(elements * element_), kPoison);
  };
  pool_ = poisoned(int64_t{pool_pages} * g.page_size * row_stride_);
  for (int32_t token = 0; token < case_.num_keys; ++token) {
    const auto key = cases::row_key(1, 0, static_cast<uint64_t>(token));
    cases::fill_uniform(key, g.dtype, key_row(token), g.latent_width());
  }
  const int64_t tokens = kFirstQuery + case_.num_queries;
  queries_ = poisoned(tokens * g.num_heads * row_stride_);
  for (int64_t row = 0; row < all_rows; ++row) {
    const int64_t name = case_.equal_heads ? row / g.num_heads : row;
    std::vector<float> values(static_cast<size_t>(g.latent_width()));
    cases::fill_uniform(cases::row_key(2, 0, static_cast<uint64_t>(name)), DType::kFloat32,
                        values.data(), g.latent_width());
    std::byte* to =
        queries_.data() + (kFirstQuery * int64_t{g.num_heads} + row) * row_stride_ * element_;
    for (size_t c = 0; c < values.size(); ++c, to += element_) {
      const float value = values[c] * case_.query_scale;
      const BFloat16 bf16(value);
      const Float16 fp16(value);
      if (g.dtype == DType::kBFloat16) std::memcpy(to, &bf16, sizeof bf16);
      if (g.dtype == DType::kFloat16) std::memcpy(to, &fp16, sizeof fp16);
      if (g.dtype == DType::kFloat32) std::memcpy(to, &value, sizeof value);
    }
  }
  out_ = poisoned(tokens * g.num_heads * out_stride_);
  lse_.resize(static_cast<size_t>(tokens * (g.num_heads + 1)));
  partial_out_.resize(static_cast<size_t>((case_.num_rows + 2) * int64_t{g.kv_lora_rank}));
  partial_lse_.resize(static_cast<size_t>(case_.num_rows + 2));
  memory_.resize(impl.worker_bytes(g) + kGuard + kMemoryAlign);

  const int64_t rope_offset = g.kv_lora_rank * element_;
  params_ = {.geometry = g,
             .q_nope = queries_.data(),
             .q_pe = g.qk_rope_head_dim == 0 ? nullptr : queries_.data() + rope_offset,
             .ckv = pool_.data(),
             .kpe = g.qk_rope_head_dim == 0 ? nullptr : pool_.data() + rope_offset,
             .out = out_.data(),
             .lse = lse_.data(),
             .q_nope_token_stride = g.num_heads * row_stride_,
             .q_nope_head_stride = row_stride_,
             .q_pe_token_stride = g.num_heads * row_stride_,
             .q_pe_head_stride = row_stride_,
             .out_token_stride = g.num_heads * out_stride_,
             .out_head_stride = out_stride_,
             .lse_token_stride = g.num_heads + 1,
             .lse_head_stride = 1,
             .cache = {.ckv_page = g.page_size * row_stride_,
                       .ckv_row = row_stride_,
                       .kpe_page = g.page_size * row_stride_,
                       .kpe_row = row_stride_},
             .qo_indptr = qo_indptr_.data(),
             .kv_indptr = kv_indptr_.data(),
             .kv_indices = kv_indices_.data(),
             .kv_len = kv_len_.data(),
             .sm_scale = case_.sm_scale,
             .causal = case_.causal,
             .partial_out = partial_out_.data(),
             .partial_lse = partial_lse_.data()};
  tile_ = {.row_begin = case_.row_begin,
           .partial_begin = case_.partial ? 1 : -1,
           .request = 1,
           .num_rows = case_.num_rows,
           .kv_begin = case_.kv_begin,
           .kv_end = case_.kv_end};
}

int64_t TileProblem::page_of(int32_t token) const {
  return kv_indices_[static_cast<size_t>(1 + token / case_.geometry.page_size)];
}

std::byte* TileProblem::key_row(int32_t token) {
  const int64_t page_size = case_.geometry.page_size;
  const int64_t slot = page_of(token) * page_size + token % page_size;
  return pool_.data() + slot * row_stride_ * element_;
}

void TileProblem::run() {
  const auto poison = [](auto& values) {
    std::memset(values.data(), static_cast<int>(kPoison), values.size() * sizeof values[0]);
  };
  poison(out_);
  poison(lse_);
  poison(partial_out_);
  poison(partial_lse_);
  poison(memory_);
  auto* memory = reinterpret_cast<std::byte*>(
      (reinterpret_cast<uintptr_t>(memory_.data()) + kMemoryAlign - 1) / kMemoryAlign *
      kMemoryAlign);
  impl_.run_tile(params_, tile_, memory);
}

float TileProblem::out_value(int32_t row_in_tile, int64_t column) const {
  if (case_.partial) {
    const int64_t at = tile_.partial_begin + row_in_tile;
    return partial_out_[static_cast<size_t>(at * case_.geometry.kv_lora_rank + column)];
  }
  const RowPlace at = place_of(params_, 1, case_.row_begin + row_in_tile);
  const int64_t offset =
      at.token * params_.out_token_stride + at.head * params_.out_head_stride + column;
  return load(case_.geometry.dtype, out_.data() + offset * element_);
}

float TileProblem::lse_value(int32_t row_in_tile) const {
  if (case_.partial) {
    return partial_lse_[static_cast<size_t>(tile_.partial_begin + row_in_tile)];
  }
  const RowPlace at = place_of(params_, 1, case_.row_begin + row_in_tile);
  return lse_[static_cast<size_t>(at.token * params_.lse_token_stride + at.head)];
}

std::vector<std::byte> TileProblem::result_bits() const {
  std::vector<std::byte> bits;
  const auto append = [&bits](float value) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    bits.insert(bits.end(), bytes, bytes + sizeof value);
  };
  for (int32_t row = 0; row < case_.num_rows; ++row) {
    for (int64_t c = 0; c < case_.geometry.kv_lora_rank; ++c) append(out_value(row, c));
    append(lse_value(row));
  }
  return bits;
}

std::string TileProblem::check() const {
  std::vector<double> expected(static_cast<size_t>(case_.geometry.kv_lora_rank));
  for (int32_t row = 0; row < case_.num_rows; ++row) {
    if (std::string fault = check_row(row, expected.data()); !fault.empty()) return fault;
  }
  return check_surroundings();
}

std::string TileProblem::check_row(int32_t row, double* expected) const {
  const ReferenceRow reference =
      reference_row(params_, 1, case_.row_begin + row, case_.kv_begin, case_.kv_end, expected);
  std::ostringstream fault;
  fault << impl_.name << " row " << case_.row_begin + row << ": ";
  const DType out_dtype = case_.partial ? DType::kFloat32 : case_.geometry.dtype;
  const double bound = 1e-5 * reference.max_abs_ckv + rounding(out_dtype, reference.max_abs_ckv);
  for (int64_t c = 0; c < case_.geometry.kv_lora_rank; ++c) {
    const double got = out_value(row, c);
    if (std::abs(got - expected[c]) <= bound) continue;
    fault << "out[" << c << "] " << got << ", expected " << expected[c] << " to " << bound;
    return fault.str();
  }
  double lse = reference.lse;
  double lse_bound = 1e-5 + 2 * ulp(reference.max_abs_score);
  if (params_.lse_base == LseBase::kTwo && !case_.partial) {
    lse *= std::numbers::log2e;
    lse_bound *= std::numbers::log2e;
  }
  const double got = lse_value(row);
  if (got != lse && !(std::abs(got - lse) <= lse_bound)) {
    fault << "lse " << got << ", expected " << lse << " to " << lse_bound;
    return fault.str();
  }
  return {};
}

std::string TileProblem::check_surroundings() const {
  const std::string who = std::string(impl_.name) + ": ";
  const Geometry& g = case_.geometry;
  const int64_t first_row = int64_t{kFirstQuery} * g.num_heads + case_.row_begin;
  for (int64_t row = 0; row < (kFirstQuery + int64_t{case_.num_queries}) * g.num_heads; ++row) {
    const bool mine = !case_.partial && row >= first_row && row < first_row + case_.num_rows;
    const std::byte* at = out_.data() + row * out_stride_ * element_;
    const int64_t skip = mine ? g.kv_lora_rank : 0;
    if (!is_poison(at + skip * element_, static_cast<size_t>((out_stride_ - skip) * element_))) {
      return who + "wrote outside of its output, at row " + std::to_string(row);
    }
    const float& lse =
        lse_[static_cast<size_t>(row / g.num_heads * (g.num_heads + 1) + row % g.num_heads)];
    if (!mine && !is_poison(reinterpret_cast<const std::byte*>(&lse), sizeof lse)) {
      return who + "wrote the LSE of another row, " + std::to_string(row);
    }
  }
  const auto* partial = reinterpret_cast<const std::byte*>(partial_out_.data());
  const size_t partial_row = static_cast<size_t>(g.kv_lora_rank) * sizeof(float);
  const auto written = static_cast<size_t>(case_.partial ? case_.num_rows : 0);
  if (!is_poison(partial, partial_row) ||
      !is_poison(partial + (1 + written) * partial_row,
                 (static_cast<size_t>(case_.num_rows) + 1 - written) * partial_row)) {
    return who + "wrote outside of its partial rows";
  }
  const auto base = reinterpret_cast<uintptr_t>(memory_.data());
  const size_t end =
      (base + kMemoryAlign - 1) / kMemoryAlign * kMemoryAlign - base + impl_.worker_bytes(g);
  if (!is_poison(memory_.data() + end, kGuard)) return who + "wrote past its working memory";
  return {};
}

std::vector<const AttentionImpl*> simd_impls() {
  std::vector<const AttentionImpl*> usable;
  const Geometry geometry{.num_heads = 1, .kv_lora_rank = 1, .page_size = 1};
  for (const AttentionImpl* impl : attention_impls(DeviceKind::kCpu)) {
    if (impl->name == "reference") continue;
    if (impl->refuses({geometry, pool_strides(geometry)}) == nullptr) usable.push_back(impl);
  }
  return usable;
}

}  // namespace mla::cpu
