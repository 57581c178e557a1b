#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "plan/parts.hpp"
#include "plan/row_tiles.hpp"
#include "plan/schedule.hpp"
#include "plan/tile_cost.hpp"

namespace mla::plan {

/// Workers in turn, each filled up to a cap; the last takes all that is left.
class Workers {
 public:
  Workers(int32_t count, double cap_ns) : cap_ns_(cap_ns), left_(count) { next(); }

  bool has_room(double ns) const { return load_ns_ + ns <= limit_ns_; }
  bool idle() const { return load_ns_ == 0; }
  double room() const { return limit_ns_ - load_ns_; }
  void take(double ns) { load_ns_ += ns; }
  void next() {
    --left_;
    load_ns_ = 0;
    limit_ns_ = left_ == 0 ? std::numeric_limits<double>::infinity() : cap_ns_;
  }
  /// By how much the current worker, the last, is above the cap.
  double excess() const { return left_ == 0 ? load_ns_ - cap_ns_ : 0; }

 private:
  double cap_ns_;
  double limit_ns_ = 0;
  double load_ns_ = 0;
  int32_t left_;
};

/// Puts a row tile that does not fit where there is room: cut, unless that would leave a worker
/// that has other work with less than what the cut adds; else on the next worker.
template <class Sink>
void deal_over_workers(const Tile& tile, int64_t blocks, const TileCost& cost, bool may_cut,
                       const CostModel& model, Workers& workers, Sink& sink) {
  Tile rest = tile;
  int32_t parts = 0;
  while (!workers.has_room(cost.of(blocks, parts > 0))) {
    const double room = workers.room() - cost.part_ns;
    const double least = workers.idle() ? cost.block_ns : std::max(cost.block_ns, cost.part_ns);
    if (may_cut && blocks > 1 && room * (1 + kRounding) >= least) {
      const auto taken = static_cast<int64_t>(
          std::min(room * cost.blocks_per_ns, static_cast<double>(blocks - 1)));
      Tile part = rest;
      part.kv_end = static_cast<int32_t>(rest.kv_begin + taken * model.block_tokens);
      rest.kv_begin = part.kv_end;
      sink.take(part, true);
      blocks -= taken;
      ++parts;
    }
    workers.next();
    sink.next_worker();
  }
  workers.take(cost.of(blocks, parts > 0));
  sink.take(rest, parts > 0);
  if (parts > 0) sink.merge(tile, parts + 1);
}

template <class Sink>
void deal_automatic(std::span<const Tile> row_tiles, const CostModel& model, bool may_cut,
                    Workers& workers, Sink& sink) {
  const CeilDivider blocks_of(model.block_tokens);
  TileCost cost(model);
  for (const Tile& tile : row_tiles) {
    cost.set_rows(tile.num_rows);
    const int64_t blocks = blocks_of(tile.kv_end);
    const double ns = cost.of(blocks, false);
    if (workers.has_room(ns)) [[likely]] {
      workers.take(ns);
      sink.take(tile, false);
    } else {
      deal_over_workers(tile, blocks, cost, may_cut, model, workers, sink);
    }
  }
}

template <class Sink>
void deal_prescribed(std::span<const Tile> row_tiles, const ScheduleInput& input,
                     const CostModel& model, Workers& workers, Sink& sink) {
  const CeilDivider blocks_of(model.block_tokens);
  const Prescription prescription(input.splits, model);
  TileCost cost(model);
  for (const Tile& tile : row_tiles) {
    cost.set_rows(tile.num_rows);
    const Parts parts =
        prescription.parts(tile.kv_end, size_of_request(input, model, tile.request));
    const bool split = parts.count > 1;
    Tile part = tile;
    parts.for_each_run([&](int64_t count, int64_t tokens) {
      const double ns = cost.of(blocks_of(tokens), split);
      for (int64_t i = 0; i < count; ++i) {
        part.kv_end = static_cast<int32_t>(part.kv_begin + tokens);
        if (!workers.has_room(ns)) {
          workers.next();
          sink.next_worker();
        }
        workers.take(ns);
        sink.take(part, split);
        part.kv_begin = part.kv_end;
      }
    });
    if (split) sink.merge(tile, static_cast<int32_t>(parts.count));
  }
}

}  // namespace mla::plan
