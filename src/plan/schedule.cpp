#include "plan/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "mla/error.hpp"
#include "plan/parts.hpp"
#include "plan/row_tiles.hpp"

// The scheme, its bound and the proof of it are in docs/planner.md.

namespace mla::plan {
namespace {

/// Sums of costs are equal up to this share.
constexpr double kRounding = 1e-9;

/// What tiles of some rows cost. Most tiles of a batch have as many rows as the one before.
class TileCost {
 public:
  explicit TileCost(const CostModel& model) : model_(model) { set_rows(0); }

  void set_rows(int32_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    block_ns = model_.block_ns + rows * model_.block_row_ns;
    blocks_per_ns = (1 + kRounding) / block_ns;
    part_ns = model_.tile_ns + rows * model_.partial_row_ns;
  }
  double of(int64_t blocks, bool split) const {
    return (split ? part_ns : model_.tile_ns) + static_cast<double>(blocks) * block_ns;
  }

  double block_ns = 0;  ///< one block of keys
  double blocks_per_ns = 0;
  double part_ns = 0;  ///< all but the blocks, where the result is a partial one

 private:
  CostModel model_;
  int32_t rows_ = -1;
};

/// The whole batch before it is shared out.
struct Totals {
  int64_t tiles = 0;
  int64_t partial_rows = 0;
  double ns = 0;
  double largest_ns = 0;  ///< one tile
  int32_t most_rows = 0;
  int64_t most_blocks = 0;
};

Totals sum_automatic(std::span<const Tile> row_tiles, const CostModel& model) {
  const CeilDivider blocks_of(model.block_tokens);
  TileCost cost(model);
  Totals totals{.tiles = static_cast<int64_t>(row_tiles.size())};
  for (const Tile& tile : row_tiles) {
    cost.set_rows(tile.num_rows);
    const int64_t blocks = blocks_of(tile.kv_end);
    const double ns = cost.of(blocks, false);
    totals.ns += ns;
    totals.largest_ns = std::max(totals.largest_ns, ns);
    totals.most_rows = std::max(totals.most_rows, tile.num_rows);
    totals.most_blocks = std::max(totals.most_blocks, blocks);
  }
  return totals;
}

Totals sum_prescribed(std::span<const Tile> row_tiles, const ScheduleInput& input,
                      const CostModel& model) {
  const CeilDivider blocks_of(model.block_tokens);
  const Prescription prescription(input.splits, model);
  TileCost cost(model);
  Totals totals;
  for (const Tile& tile : row_tiles) {
    cost.set_rows(tile.num_rows);
    const Parts parts = prescription.parts(tile.kv_end, input.kv_len[tile.request]);
    const bool split = parts.count > 1;
    totals.tiles += parts.count;
    if (split) totals.partial_rows += parts.count * tile.num_rows;
    const auto add = [&](int64_t count, int64_t tokens) {
      const double ns = cost.of(blocks_of(tokens), split);
      totals.ns += static_cast<double>(count) * ns;
      totals.largest_ns = std::max(totals.largest_ns, ns);
    };
    const int64_t last = parts.count - 1;
    if (parts.longer > 0) add(parts.longer, (parts.steps + 1) * parts.step_tokens);
    if (last > parts.longer) add(last - parts.longer, parts.steps * parts.step_tokens);
    add(1, parts.keys - parts.begin(last));
  }
  return totals;
}

/// How far each worker is filled, and whether row tiles may be cut for that.
struct Fill {
  double cap_ns = 0;
  double lower_ns = 0;  ///< no cap below this can do
  bool may_cut = false;
};

Fill choose_fill(const Totals& totals, const ScheduleInput& input, const CostModel& model) {
  const double workers = input.num_workers;
  const double share = totals.ns / workers;
  const double others = 1 - 1 / workers;
  const Fill whole{.cap_ns = totals.tiles <= input.num_workers ? totals.largest_ns
                                                               : share + others * totals.largest_ns,
                   .lower_ns = std::max(share, totals.largest_ns)};
  if (!is_automatic(input.splits)) return whole;

  TileCost cost(model);
  cost.set_rows(totals.most_rows);
  // A chain of merges grows with the parts: beyond this many the cut does not pay.
  double least = std::sqrt(model.partial_row_ns * totals.largest_ns);
  if (input.num_workers > kMaxSplits) {
    // Two parts may be short, those that begin and end the row tile.
    least = std::max(least, cost.of(ceil_div(totals.most_blocks, kMaxSplits - 2), true));
  }
  const Fill cut{.cap_ns = std::max(share + others * (cost.of(1, true) + cost.part_ns), least),
                 .lower_ns = std::max(share, least),
                 .may_cut = true};
  const double most_parts = std::ceil(totals.largest_ns / cut.cap_ns);
  const double merge_ns = model.merge_ns + most_parts * model.partial_row_ns;
  return cut.cap_ns + merge_ns < whole.cap_ns ? cut : whole;
}

/// Workers in turn, each filled up to a cap; the last takes all that is left.
class Workers {
 public:
  Workers(int32_t count, double cap_ns) : cap_ns_(cap_ns), left_(count) { next(); }

  bool has_room(double ns) const { return load_ns_ + ns <= limit_ns_; }
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

/// Puts a row tile that does not fit where there is room: cut where that leaves no less work than
/// the cut adds, else on the next worker.
template <class Sink>
void deal_over_workers(const Tile& tile, int64_t blocks, const TileCost& cost, const Fill& fill,
                       const CostModel& model, Workers& workers, Sink& sink) {
  Tile rest = tile;
  int32_t parts = 0;
  while (!workers.has_room(cost.of(blocks, parts > 0))) {
    const double room = workers.room() - cost.part_ns;
    if (fill.may_cut && blocks > 1 && room >= std::max(cost.block_ns, cost.part_ns)) {
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
void deal_automatic(std::span<const Tile> row_tiles, const CostModel& model, const Fill& fill,
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
      deal_over_workers(tile, blocks, cost, fill, model, workers, sink);
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
    const Parts parts = prescription.parts(tile.kv_end, input.kv_len[tile.request]);
    const bool split = parts.count > 1;
    Tile part = tile;
    for (int64_t i = 1; i <= parts.count; ++i) {
      part.kv_end = static_cast<int32_t>(parts.begin(i));
      const double ns = cost.of(blocks_of(part.kv_end - part.kv_begin), split);
      if (!workers.has_room(ns)) {
        workers.next();
        sink.next_worker();
      }
      workers.take(ns);
      sink.take(part, split);
      part.kv_begin = part.kv_end;
    }
    if (split) sink.merge(tile, static_cast<int32_t>(parts.count));
  }
}

/// Where a trial sends its tiles.
struct NoSink {
  void take(const Tile&, bool) {}
  void merge(const Tile&, int32_t) {}
  void next_worker() {}
};

/// Writes the schedule.
class ScheduleSink {
 public:
  ScheduleSink(Schedule& schedule, int64_t most_tiles) : out_(schedule) {
    out_.tiles.resize(static_cast<size_t>(most_tiles));
    out_.merges.clear();
    out_.worker_indptr.assign(1, 0);
    next_ = out_.tiles.data();
    max_splits_ = most_tiles > 0 ? 1 : 0;
  }

  void take(const Tile& tile, bool partial) {
    *next_ = tile;
    if (partial) {
      next_->partial_begin = num_partial_rows_;
      num_partial_rows_ += tile.num_rows;
    }
    ++next_;
  }
  void merge(const Tile& tile, int32_t parts) {
    max_splits_ = std::max(max_splits_, parts);
    out_.merges.push_back({.row_begin = tile.row_begin,
                           .partial_begin = num_partial_rows_ - int64_t{parts} * tile.num_rows,
                           .request = tile.request,
                           .num_rows = tile.num_rows,
                           .num_partials = parts});
  }
  void next_worker() { out_.worker_indptr.push_back(num_tiles()); }

  void finish(int32_t num_workers) {
    out_.worker_indptr.resize(static_cast<size_t>(num_workers) + 1, num_tiles());
    out_.tiles.resize(static_cast<size_t>(num_tiles()));
    out_.num_partial_rows = num_partial_rows_;
    out_.max_splits = max_splits_;
  }

 private:
  int32_t num_tiles() const { return static_cast<int32_t>(next_ - out_.tiles.data()); }

  Schedule& out_;
  Tile* next_ = nullptr;
  int64_t num_partial_rows_ = 0;
  int32_t max_splits_ = 0;
};

/// Deals all tiles and returns by how much the last worker is above the cap.
template <class Sink>
double deal(std::span<const Tile> row_tiles, const ScheduleInput& input, const CostModel& model,
            const Fill& fill, Sink& sink) {
  Workers workers(input.num_workers, fill.cap_ns);
  if (is_automatic(input.splits)) {
    deal_automatic(row_tiles, model, fill, workers, sink);
  } else {
    deal_prescribed(row_tiles, input, model, workers, sink);
  }
  return workers.excess();
}

/// Tries a few lower caps, from below, while that is cheap: many tiles are even enough without.
double tighten(const Fill& fill, std::span<const Tile> row_tiles, const Totals& totals,
               const ScheduleInput& input, const CostModel& model) {
  constexpr int64_t kTrialWork = 1536;  // tiles dealt in all trials; a cut costs as much as four
  constexpr int64_t kMostTrials = 8;
  const int64_t workers = input.num_workers;
  int64_t trials = std::min(kMostTrials, kTrialWork / (totals.tiles + 4 * workers));
  NoSink none;
  Fill trial = fill;
  trial.cap_ns = fill.lower_ns;
  for (; trials > 0 && trial.cap_ns < fill.cap_ns; --trials) {
    const double excess = deal(row_tiles, input, model, trial, none);
    if (excess <= trial.cap_ns * kRounding) return trial.cap_ns;
    // What was too much for the last worker is spread over all.
    trial.cap_ns +=
        std::max(excess / static_cast<double>(workers), (fill.cap_ns - trial.cap_ns) / kMostTrials);
  }
  return fill.cap_ns;
}

void refuse_above(int64_t limit, int64_t value, const char* what) {
  if (value <= limit) return;
  throw_invalid({.what = what,
                 .where = "make_schedule",
                 .expected = "at most " + std::to_string(limit),
                 .got = std::to_string(value)});
}

}  // namespace

void make_schedule(const ScheduleInput& input, const CostModel& model, Schedule& schedule) {
  const std::span<const Tile> row_tiles = list_row_tiles(input, model, schedule.row_tiles);
  const Totals totals = is_automatic(input.splits) ? sum_automatic(row_tiles, model)
                                                   : sum_prescribed(row_tiles, input, model);
  refuse_above(kMaxTiles, totals.tiles, "tiles of the plan");
  refuse_above(kMaxPartialRows, totals.partial_rows, "partial rows of the plan");

  Fill fill = choose_fill(totals, input, model);
  fill.cap_ns = tighten(fill, row_tiles, totals, input, model) * (1 + kRounding);
  // Each worker but the last ends with at most one cut.
  ScheduleSink sink(schedule, totals.tiles + (fill.may_cut ? input.num_workers - 1 : 0));
  deal(row_tiles, input, model, fill, sink);
  sink.finish(input.num_workers);
}

}  // namespace mla::plan
