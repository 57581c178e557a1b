#include "mla/bench_cell.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>

#include "cases/random.hpp"
#include "mla/bench_spread.hpp"
#include "mla/captured_runs.hpp"
#include "mla/clock.hpp"
#include "mla/device_memory.hpp"
#include "mla/page_reads.hpp"

namespace mla::cli {
namespace {

constexpr int64_t kMostCaches = 256;
constexpr int kTimedPlans = 9;

// Index arrays of a batch on scattered pages.
struct Indices {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_indices;

  explicit Indices(const cases::AttentionCase& c) {
    for (size_t row = 0; row < c.q_lens.size(); ++row) {
      qo_indptr.push_back(qo_indptr.back() + c.q_lens[row]);
      kv_indptr.push_back(kv_indptr.back() +
                          static_cast<int32_t>(c.pages_of(static_cast<int64_t>(row))));
    }
    kv_indices.resize(static_cast<size_t>(kv_indptr.back()));
    std::iota(kv_indices.begin(), kv_indices.end(), 0);
    std::mt19937 generator(1);  // NOLINT(cert-msc51-cpp): the same pages every time
    std::shuffle(kv_indices.begin(), kv_indices.end(), generator);
  }
};

// Uniform values: one random block again and again, of a length that no row divides.
void fill_random(DeviceMemory& memory, DType dtype, Stream stream) {
  constexpr int64_t kBlockValues = (int64_t{4} << 20) - 1;
  std::vector<std::byte> block(static_cast<size_t>(kBlockValues * size_of(dtype)));
  cases::fill_uniform(cases::row_key(7, 0, 0), dtype, block.data(), kBlockValues);
  for (size_t at = 0; at < memory.bytes(); at += block.size()) {
    memory.copy_from_host(block.data(), std::min(block.size(), memory.bytes() - at), stream, at);
  }
  synchronize(memory.device(), stream);
}

/// A cell in memory: index arrays on the host, tensors and the copies of the cache on the device.
class Cell {
 public:
  Cell(const cases::AttentionCase& c, int64_t cold_bytes)
      : case_(c),
        indices_(c),
        stream_(c.device),
        cache_bytes_(c.pages_needed() * c.geometry.page_size * c.geometry.latent_width() *
                     size_of(c.geometry.kv_dtype)),
        num_caches_(std::clamp(cold_bytes / cache_bytes_ + 1, int64_t{2}, kMostCaches)),
        caches_(memory(num_caches_ * cache_bytes_)),
        queries_(memory(num_heads() * c.geometry.latent_width() * size_of(c.geometry.dtype))),
        out_(memory(num_heads() * c.geometry.kv_lora_rank * size_of(c.geometry.dtype))),
        lse_(memory(num_heads() * int64_t{sizeof(float)})) {
    fill_random(caches_, c.geometry.kv_dtype, stream_);
    fill_random(queries_, c.geometry.dtype, stream_);
  }

  const cases::AttentionCase& attention_case() const { return case_; }
  Device device() const { return case_.device; }
  Stream stream() const { return stream_; }
  int64_t num_caches() const { return num_caches_; }

  Batch batch() const {
    return {.qo_indptr = indices_.qo_indptr,
            .kv_indptr = indices_.kv_indptr,
            .kv_indices = indices_.kv_indices,
            .kv_len = case_.kv_lens};
  }
  MlaPeerBatch peer_batch() const {
    const Geometry& g = case_.geometry;
    return {.num_rows = static_cast<int32_t>(case_.num_rows()),
            .num_heads = g.num_heads,
            .kv_lora_rank = g.kv_lora_rank,
            .qk_rope_head_dim = g.qk_rope_head_dim,
            .page_size = g.page_size,
            .causal = case_.causal ? 1 : 0,
            .num_tokens = case_.num_tokens(),
            .num_pages = case_.pages_needed(),
            .sm_scale = case_.sm_scale,
            .qo_indptr = indices_.qo_indptr.data(),
            .kv_indptr = indices_.kv_indptr.data(),
            .kv_indices = indices_.kv_indices.data(),
            .kv_len = case_.kv_lens.data()};
  }

  /// Tensors of a run over the cache `index`.
  RunArgs args(int64_t index) const {
    const Geometry& g = case_.geometry;
    const int64_t heads = g.num_heads;
    const int64_t rank = g.kv_lora_rank;
    const auto queries =
        contiguous_view(static_cast<const void*>(queries_.data()),
                        std::array{case_.num_tokens(), heads, g.latent_width()}, g.dtype, device());
    const auto cache = contiguous_view(
        cache_at(index), std::array{case_.pages_needed(), int64_t{g.page_size}, g.latent_width()},
        g.kv_dtype, device());
    return {.q_nope = columns(queries, 0, rank),
            .q_pe = columns(queries, rank, g.qk_rope_head_dim),
            .cache = split_latent(cache, rank),
            .out = contiguous_view(out_.data(), std::array{case_.num_tokens(), heads, rank},
                                   g.dtype, device()),
            .lse = contiguous_view(static_cast<float*>(lse_.data()),
                                   std::array{case_.num_tokens(), heads}, device())};
  }
  MlaPeerTensors peer_tensors(int64_t index) const {
    return {.q = queries_.data(),
            .cache = cache_at(index),
            .out = out_.data(),
            .lse = static_cast<float*>(lse_.data())};
  }

  const void* cache_at(int64_t index) const {
    return static_cast<const std::byte*>(caches_.data()) + index * cache_bytes_;
  }

  /// Fills the output with NaN, and waits for it.
  void spoil_out() {
    out_.fill(0xff, stream_);
    synchronize(device(), stream_);
  }
  /// Waits for the stream and returns the output, which is bf16.
  std::vector<BFloat16> read_out() const {
    std::vector<BFloat16> values(out_.bytes() / sizeof(BFloat16));
    out_.copy_to_host(values.data(), out_.bytes(), stream_);
    synchronize(device(), stream_);
    return values;
  }

 private:
  int64_t num_heads() const { return case_.num_tokens() * case_.geometry.num_heads; }
  DeviceMemory memory(int64_t bytes) const { return {case_.device, static_cast<size_t>(bytes)}; }

  const cases::AttentionCase& case_;
  Indices indices_;
  DeviceStream stream_;
  int64_t cache_bytes_;
  int64_t num_caches_;
  DeviceMemory caches_, queries_, out_, lse_;
};

/// Median microseconds of the host in `plan`; the device's work of each is waited for in between.
double time_plans(const Cell& cell, const std::function<void()>& plan) {
  std::vector<double> us;
  for (int i = 0; i < kTimedPlans; ++i) {
    const double begin = now_s();
    plan();
    us.push_back((now_s() - begin) * 1e6);
    synchronize(cell.device(), cell.stream());
  }
  return spread_of(us).median;
}

/// A contender of a cell: its captured runs over every copy of the cache and where its rounds are
/// noted.
struct Contender {
  Contender(const Cell& cell, const std::function<void(int64_t)>& run, std::vector<double>& us)
      : runs(cell.device(), cell.stream(), cell.num_caches(), run), round_us(us) {}

  CapturedRuns runs;
  std::vector<double>& round_us;
};

void run_peer(const PeerPlan& plan, const Cell& cell, int64_t index) {
  const int status = plan.run(cell.peer_tensors(index), cell.stream());
  if (status != 0) throw std::runtime_error(fmt::format("its run returned {}", status));
}

/// A peer's plan of the cell, held against our output. Null where it does not serve the cell.
std::unique_ptr<PeerPlan> try_peer(const PeerLibrary& library, Cell& cell,
                                   std::span<const BFloat16> ours, PeerTimes& times) {
  const MlaPeerBatch batch = cell.peer_batch();
  if (!PeerPlan(library, batch, cell.stream())) return nullptr;  // it was warmed up by that
  times.name = library.name();
  times.plan_us = time_plans(cell, [&] { const PeerPlan timed(library, batch, cell.stream()); });
  auto plan = std::make_unique<PeerPlan>(library, batch, cell.stream());
  cell.spoil_out();
  try {
    run_peer(*plan, cell, 0);
  } catch (const std::exception& error) {
    times.fault = error.what();
    return plan;
  }
  const Difference difference =
      compare_rows(ours, cell.read_out(), cell.attention_case().geometry.kv_lora_rank);
  times.max_difference = difference.largest;
  if (difference.largest_share > kLargestPeerShare) {
    times.fault = fmt::format("its output differs by {:.3g}, {:.3g} of the largest in the row",
                              difference.largest, difference.largest_share);
  }
  return plan;
}

}  // namespace

Difference compare_rows(std::span<const BFloat16> ours, std::span<const BFloat16> theirs,
                        int64_t columns) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  Difference result;
  const auto width = static_cast<size_t>(columns);
  for (size_t row = 0; row < ours.size(); row += width) {
    float largest = 0;
    float apart = 0;
    for (size_t at = row; at < row + width; ++at) {
      largest = std::max(largest, std::abs(static_cast<float>(ours[at])));
      const float difference =
          std::abs(static_cast<float>(theirs[at]) - static_cast<float>(ours[at]));
      if (!(difference <= apart)) apart = difference;  // NaN stays
      if (std::isnan(apart)) return {.largest = kInfinite, .largest_share = kInfinite};
    }
    if (apart == 0) continue;
    result.largest = std::max<double>(result.largest, apart);
    result.largest_share = std::max<double>(result.largest_share, apart / largest);
  }
  return result;
}

CellTimes time_cell(const cases::AttentionCase& c, std::span<const PeerLibrary> peers,
                    const CellOptions& options) {
  Cell cell(c, options.cold_bytes);
  PagedAttention attention(
      {.geometry = c.geometry,
       .num_pages = c.pages_needed(),
       .device = c.device,
       .limits = {.max_listed_pages = c.pages_needed()},
       .bucket = Bucket{.num_rows = c.num_rows(), .num_tokens = c.num_tokens()},
       .capture = true,
       .splits = c.splits,
       .kernel = c.kernel});
  const auto plan = [&] {
    attention.plan(cell.batch(), {.sm_scale = c.sm_scale, .causal = c.causal}, cell.stream());
  };
  plan();
  CellTimes times;
  times.plan_us = time_plans(cell, plan);
  times.plan = attention.info();
  times.kernel = attention.kernel();

  std::deque<Contender> contenders;
  contenders.emplace_back(
      cell, [&](int64_t index) { attention.run(cell.args(index), cell.stream()); }, times.round_us);
  std::vector<std::unique_ptr<PeerPlan>> plans;
  times.peers.reserve(peers.size());  // contenders point into it
  if (!peers.empty() && c.geometry.dtype == DType::kBFloat16) {
    attention.run(cell.args(0), cell.stream());
    const std::vector<BFloat16> ours = cell.read_out();
    for (const PeerLibrary& library : peers) {
      PeerTimes peer;
      auto peer_plan = try_peer(library, cell, ours, peer);
      if (peer_plan == nullptr) continue;
      times.peers.push_back(std::move(peer));
      const PeerPlan& kept = *plans.emplace_back(std::move(peer_plan));
      if (!times.peers.back().fault.empty()) continue;
      try {
        contenders.emplace_back(
            cell, [&](int64_t index) { run_peer(kept, cell, index); }, times.peers.back().round_us);
      } catch (const std::exception& error) {
        times.peers.back().fault = fmt::format("in a capture: {}", error.what());
      }
    }
  }
  std::optional<PageReads> reads;
  if (options.time_reads && PageReads::serves(c)) {
    const Batch batch = cell.batch();
    reads.emplace(c, batch.kv_indptr, batch.kv_indices, cell.stream());
    reads->run(cell.cache_at(0), cell.stream());  // its code is loaded by that, not in the capture
    contenders.emplace_back(
        cell, [&](int64_t index) { reads->run(cell.cache_at(index), cell.stream()); },
        times.read_us);
  }
  for (Contender& contender : contenders) contender.runs.warm_up(options.round_seconds);
  for (int round = 0; round < options.rounds; ++round) {
    for (Contender& contender : contenders) {
      contender.round_us.push_back(contender.runs.time_round());
    }
  }
  return times;
}

}  // namespace mla::cli
