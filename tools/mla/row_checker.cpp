#include "mla/row_checker.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "cases/error_bound.hpp"
#include "cases/random.hpp"
#include "mla/interrupt.hpp"
#include "mla/reference.hpp"

namespace mla::cli {
namespace {

constexpr size_t kMostMessages = 5;
constexpr int64_t kBlockKeys = 128;  // drawn and used while they are in a core's cache

float load(const std::byte* at, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<float>(*reinterpret_cast<const BFloat16*>(at));
    case DType::kFloat16:
      return static_cast<float>(*reinterpret_cast<const Float16*>(at));
    default:
      return *reinterpret_cast<const float*>(at);
  }
}

uint64_t digest_bits(uint64_t digest, float value) {
  return cases::row_key(digest, std::bit_cast<uint32_t>(value), 0);
}

}  // namespace

/// Softmax-weighted sums over some of a row's keys: output and LSE of those alone.
struct RowChecker::Partial {
  std::vector<std::byte> keys;  // one block
  std::vector<double> block;    // [rank], of one block
  std::vector<double> out;      // [rank], of all blocks so far
  ReferenceRow row{};

  void begin() { row = {.lse = -std::numeric_limits<double>::infinity()}; }
  /// Joins the result of other keys to this one.
  void add(std::span<const double> other_out, const ReferenceRow& other) {
    if (other.lse == -std::numeric_limits<double>::infinity()) return;
    const double top = std::max(row.lse, other.lse);
    const double lse = top + std::log(std::exp(row.lse - top) + std::exp(other.lse - top));
    const double kept = std::exp(row.lse - lse);
    const double added = std::exp(other.lse - lse);
    for (size_t c = 0; c < out.size(); ++c) {
      out[c] = (kept > 0 ? kept * out[c] : 0) + added * other_out[c];
    }
    row = {.lse = lse,
           .max_abs_ckv = std::max(row.max_abs_ckv, other.max_abs_ckv),
           .max_abs_score = std::max(row.max_abs_score, other.max_abs_score)};
  }
};

RowChecker::~RowChecker() = default;

RowChecker::RowChecker(const ReplayOptions& options, const Geometry& geometry,
                       const Content& content, Executor& executor, double probability_rounding)
    : options_(options),
      geometry_(geometry),
      content_(content),
      executor_(executor),
      probability_rounding_(probability_rounding),
      sampler_(options.seed, options.num_layers, options.num_heads),
      query_(static_cast<size_t>(content.query_bytes())),
      partials_(static_cast<size_t>(executor.num_threads())),
      expected_(static_cast<size_t>(geometry.kv_lora_rank)),
      got_(expected_.size() * static_cast<size_t>(size_of(geometry.dtype))) {
  for (Partial& partial : partials_) {
    partial.keys.resize(static_cast<size_t>(kBlockKeys * content.latent_row_bytes()));
    partial.block.resize(expected_.size());
    partial.out.resize(expected_.size());
  }
}

void RowChecker::choose(const std::vector<StepItem>& items) {
  samples_ = sampler_.choose(items, options_.checks_per_step);
}

void RowChecker::attend(const Request& request, const RowSample& sample, int64_t begin, int64_t end,
                        Partial& partial) const {
  const int64_t row_bytes = content_.latent_row_bytes();
  for (int64_t position = begin; position < end; ++position) {
    content_.latent_row(content_key(request, sample.item, position), position, sample.layer,
                        partial.keys.data() + (position - begin) * row_bytes);
  }
  // One request of one query, which sees all keys; they are one page.
  const auto num_keys = static_cast<int32_t>(end - begin);
  const std::array<int32_t, 2> indptr{0, 1};
  const std::array<int32_t, 1> page{0};
  const std::array<int32_t, 1> kv_len{num_keys};
  Geometry geometry = geometry_;
  geometry.page_size = num_keys;
  const std::array<int64_t, 3> query_shape{1, geometry.num_heads, geometry.latent_width()};
  const std::array<int64_t, 3> cache_shape{1, num_keys, geometry.latent_width()};
  const ConstTensor<3> query =
      contiguous_view(static_cast<const void*>(query_.data()), query_shape, geometry.dtype);
  const ConstTensor<3> cache =
      contiguous_view(static_cast<const void*>(partial.keys.data()), cache_shape, geometry.dtype);
  const ReferenceRow row = reference_row(
      geometry, {.qo_indptr = indptr, .kv_indptr = indptr, .kv_indices = page, .kv_len = kv_len},
      static_cast<float>(options_.sm_scale), true, columns(query, 0, geometry.kv_lora_rank),
      columns(query, geometry.kv_lora_rank, geometry.qk_rope_head_dim),
      split_latent(cache, geometry.kv_lora_rank), 0, sample.head, partial.block);
  partial.add(partial.block, row);
}

ReferenceRow RowChecker::compute(const Request& request, const RowSample& sample) {
  content_.query(content_key(request, sample.item, sample.position), sample.position, sample.layer,
                 query_.data());
  const int64_t num_keys = sample.position + 1;
  executor_.run([&](int worker) {
    Partial& partial = partials_[static_cast<size_t>(worker)];
    partial.begin();
    const int64_t stride = kBlockKeys * executor_.num_threads();
    for (int64_t begin = kBlockKeys * worker; begin < num_keys; begin += stride) {
      attend(request, sample, begin, std::min(begin + kBlockKeys, num_keys), partial);
    }
  });
  Partial& all = partials_.front();
  for (size_t worker = 1; worker < partials_.size(); ++worker) {
    all.add(partials_[worker].out, partials_[worker].row);
  }
  expected_ = all.out;
  return all.row;
}

void RowChecker::check(const std::vector<Request>& requests, int32_t layer,
                       const StepTensors& tensors, Stream stream, ReplayStats& stats) {
  for (const RowSample& sample : samples_) {
    if (sample.layer != layer) continue;
    if (interrupted()) return;
    const ReferenceRow row = compute(requests[static_cast<size_t>(sample.item.request)], sample);
    compare(sample, row, tensors.read_row(sample.token, sample.head, got_, stream), stats);
  }
}

void RowChecker::compare(const RowSample& sample, const ReferenceRow& expected, float got_lse,
                         ReplayStats& stats) {
  const DType dtype = geometry_.dtype;
  const cases::ErrorBound bound = cases::error_bound(geometry_, expected, probability_rounding_);
  double worst_share = 0;
  double worst_error = 0;
  for (size_t column = 0; column < expected_.size(); ++column) {
    const float got = load(got_.data() + column * static_cast<size_t>(size_of(dtype)), dtype);
    const double error = std::abs(got - expected_[column]);
    const double share = error / cases::value_bound(bound, dtype, expected_[column]);
    // Written so that a NaN counts as the largest error there is.
    if (!(share <= worst_share)) worst_share = std::isnan(share) ? INFINITY : share;
    if (!(error <= worst_error)) worst_error = std::isnan(error) ? INFINITY : error;
    stats.output_digest = digest_bits(stats.output_digest, got);
  }
  double lse_error = std::abs(got_lse - expected.lse);
  if (std::isnan(lse_error)) lse_error = INFINITY;
  stats.output_digest = digest_bits(stats.output_digest, got_lse);
  worst_share = std::max(worst_share, lse_error / bound.lse);

  checked_requests_.insert(sample.item.request);
  ++stats.checked_rows;
  stats.checked_requests = std::ssize(checked_requests_);
  stats.max_abs_error = std::max(stats.max_abs_error, worst_error);
  stats.max_lse_error = std::max(stats.max_lse_error, lse_error);
  stats.max_bound_share = std::max(stats.max_bound_share, worst_share);
  if (worst_share > 1) note_failure(sample, worst_error, lse_error, worst_share);
}

void RowChecker::note_failure(const RowSample& sample, double error, double lse_error,
                              double bound_share) {
  if (std::ranges::find(failed_requests_, sample.item.request) == failed_requests_.end()) {
    failed_requests_.push_back(sample.item.request);
  }
  if (messages_.size() == kMostMessages) return;
  messages_.push_back(fmt::format(
      "request {} of the trace, position {} layer {} head {}: error {:.3g}, of the LSE {:.3g}: "
      "{:.3g} times what the contract allows",
      sample.item.request + 1, sample.position, sample.layer, sample.head, error, lse_error,
      bound_share));
}

}  // namespace mla::cli
