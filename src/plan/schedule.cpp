#include "plan/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "mla/error.hpp"
#include "plan/deal.hpp"
#include "plan/parts.hpp"
#include "plan/row_tiles.hpp"
#include "plan/teams.hpp"
#include "plan/tile_cost.hpp"
#include "plan/totals.hpp"

// The scheme, its bound and the proof of it are in docs/planner.md.

namespace mla::plan {
namespace {

// Trials of one schedule: at most so many, which deal so many tiles in all. A worker, with the cut
// that it may end with, costs as much as two tiles.
constexpr int64_t kMostTrials = 8;
constexpr int64_t kTrialWork = 700;
// How much later teams may finish than workers on their own: the model does not have what they
// save, keys that come from memory once.
constexpr double kMostTeamLoss = 1.0 / 16;

/// What a trial learns.
class TrialSink {
 public:
  void take(const Tile&, bool) {}
  void merge(const Tile&, int32_t parts) { most_parts_ = std::max(most_parts_, parts); }
  void next_worker() {}

  int32_t most_parts() const { return most_parts_; }

 private:
  int32_t most_parts_ = 1;
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
    const int32_t rows_before =
        out_.merges.empty() ? 0 : out_.merges.back().rows_before + out_.merges.back().num_rows;
    out_.merges.push_back({.row_begin = tile.row_begin,
                           .partial_begin = num_partial_rows_ - int64_t{parts} * tile.num_rows,
                           .request = tile.request,
                           .num_rows = tile.num_rows,
                           .num_partials = parts,
                           .rows_before = rows_before});
  }
  /// For parts that do not follow each other: their merge, and the first of their partial rows.
  int64_t reserve(const Tile& tile, int32_t parts) {
    const int64_t partial_begin = num_partial_rows_;
    num_partial_rows_ += int64_t{parts} * tile.num_rows;
    merge(tile, parts);
    return partial_begin;
  }
  /// A tile whose partial_begin is known.
  void put(const Tile& tile) { *next_++ = tile; }
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

/// How far each worker is filled, and whether row tiles may be cut for that.
struct Fill {
  double start_ns = 0;   ///< the first cap to try; lower ones fail or do not pay
  double cap_ns = 0;     ///< one that is known to do
  double finish_ns = 0;  ///< when all is merged at that cap
  bool may_cut = false;
};

/// The parts of one row are merged one after another.
double merge_ns(double parts, const CostModel& model) {
  return parts > 1 ? model.merge_ns + parts * model.partial_row_ns : 0;
}

/// No row tile is cut. Two caps that do: a worker left has less room than the largest tile; or it
/// has room for its even count of largest tiles.
Fill whole_fill(const Totals& totals, double workers) {
  const double share = totals.ns / workers;
  const double even_count = std::ceil(static_cast<double>(totals.tiles) / workers);
  const double cap =
      std::min(share + (1 - 1 / workers) * totals.largest_ns, even_count * totals.largest_ns);
  return {.start_ns = std::max(share, totals.largest_ns), .cap_ns = cap, .finish_ns = cap};
}

/// Blocks of a part below which the longer chain of merges costs more than the shorter part saves.
double least_blocks(const Totals& totals, const TileCost& cost, double workers,
                    const CostModel& model) {
  const auto blocks = static_cast<double>(totals.most_blocks);
  const auto ns = [&](double part) {
    return part * cost.block_ns + std::ceil(blocks / part) * model.partial_row_ns;
  };
  const double below =
      std::max(1.0, std::floor(std::sqrt(blocks * model.partial_row_ns / cost.block_ns)));
  const double least = ns(below) <= ns(below + 1) ? below : below + 1;
  // More workers than a row may have parts: two of them may be short, the first and the last.
  return workers > kMaxSplits ? std::max(least, std::ceil(blocks / (kMaxSplits - 2))) : least;
}

/// Row tiles are cut so that each worker gets a share.
Fill cut_fill(const Totals& totals, double workers, const CostModel& model) {
  TileCost cost(model);
  cost.set_rows(totals.most_rows);
  const double share = totals.ns / workers;
  const double least = cost.part_ns + least_blocks(totals, cost, workers, model) * cost.block_ns;
  const double grain = 2 * cost.part_ns + cost.block_ns;
  const double cap = std::max(share + (1 - 1 / workers) * grain, least);
  double start = std::max(share, least);
  if (static_cast<double>(totals.tiles) < workers) {
    // Workers get one part each: a cap between two numbers of blocks is as the lower one.
    const double tiles_ns = static_cast<double>(totals.tiles) * model.tile_ns;
    const double blocks = std::ceil((totals.ns - tiles_ns) / workers / cost.block_ns);
    start = std::clamp(cost.part_ns + blocks * cost.block_ns, least, cap);
  }
  return {.start_ns = start,
          .cap_ns = cap,
          .finish_ns = cap + merge_ns(std::ceil(totals.largest_ns / cap) + 1, model),
          .may_cut = true};
}

/// Deals all tiles and returns by how much the last worker is above the cap.
template <class Sink>
double deal(std::span<const Tile> row_tiles, const ScheduleInput& input, const CostModel& model,
            double cap_ns, bool may_cut, Sink& sink) {
  Workers workers(input.num_workers, cap_ns);
  if (is_automatic(input.splits)) {
    deal_automatic(row_tiles, model, may_cut, workers, sink);
  } else {
    deal_prescribed(row_tiles, input, model, workers, sink);
  }
  return workers.excess();
}

/// Tries a few lower caps, from below, while that is cheap: many tiles are even enough without.
Fill tighten(const Fill& fill, std::span<const Tile> row_tiles, const Totals& totals,
             const ScheduleInput& input, const CostModel& model) {
  const int64_t workers = input.num_workers;
  const int64_t trials = std::min(kMostTrials, kTrialWork / (totals.tiles + 2 * workers));
  double cap = fill.start_ns;
  for (int64_t i = 0; i < trials && cap < fill.cap_ns; ++i) {
    TrialSink sink;
    const double excess = deal(row_tiles, input, model, cap, fill.may_cut, sink);
    if (excess <= cap * kRounding) {
      return {.start_ns = cap,
              .cap_ns = cap,
              .finish_ns = cap + merge_ns(sink.most_parts(), model),
              .may_cut = fill.may_cut};
    }
    // What was too much for the last worker is spread over all.
    cap += std::max(excess / static_cast<double>(workers), (fill.cap_ns - cap) / kMostTrials);
  }
  return fill;
}

Fill choose_fill(std::span<const Tile> row_tiles, const Totals& totals, const ScheduleInput& input,
                 const CostModel& model) {
  const Fill whole = whole_fill(totals, input.num_workers);
  if (is_automatic(input.splits)) {
    const Fill cut =
        tighten(cut_fill(totals, input.num_workers, model), row_tiles, totals, input, model);
    if (cut.finish_ns < whole.finish_ns) return cut;
  }
  return tighten(whole, row_tiles, totals, input, model);
}

/// Row tiles, teams' tiles or prescribed parts, dealt to input.num_workers.
void deal_out(std::span<const Tile> tiles, const Totals& totals, const Fill& fill,
              const ScheduleInput& input, const CostModel& model, Schedule& schedule) {
  // Each worker but the last ends with at most one cut.
  ScheduleSink sink(schedule, totals.tiles + (fill.may_cut ? input.num_workers - 1 : 0));
  deal(tiles, input, model, fill.cap_ns * (1 + kRounding), fill.may_cut, sink);
  sink.finish(input.num_workers);
}

/// Deals to teams instead; false, and nothing is done, where that would finish too late.
bool deal_to_teams(std::span<Tile> row_tiles, double finish_ns, int32_t size,
                   const ScheduleInput& input, const CostModel& model, Schedule& schedule) {
  schedule.teams.resize(1);
  Schedule& teams = schedule.teams.front();
  ScheduleInput to_teams = input;
  to_teams.num_workers = input.num_workers / size;
  const std::span<const Tile> tiles = list_team_tiles(row_tiles, size, teams.row_tiles);
  const Totals totals = sum_up(tiles, to_teams, model);
  const Fill fill = choose_fill(tiles, totals, to_teams, model);
  if (fill.finish_ns > (1 + kMostTeamLoss) * finish_ns) return false;
  deal_out(tiles, totals, fill, to_teams, model, teams);
  // A cut of a team tile is one of each of its members' row tiles.
  const size_t cuts = teams.tiles.size() - tiles.size();
  ScheduleSink sink(schedule,
                    static_cast<int64_t>(row_tiles.size() + cuts * static_cast<size_t>(size)));
  share_out(teams, size, row_tiles, sink);
  sink.finish(input.num_workers);
  return true;
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
  const std::span<Tile> row_tiles = list_row_tiles(input, model, schedule.row_tiles);
  const Totals totals = sum_up(row_tiles, input, model);
  refuse_above(kMaxTiles, totals.tiles, "tiles of the plan");
  refuse_above(kMaxPartialRows, totals.partial_rows, "partial rows of the plan");

  const Fill fill = row_tiles.empty() ? Fill{} : choose_fill(row_tiles, totals, input, model);
  const int32_t size = team_size(input, model);
  if (size > 1 && deal_to_teams(row_tiles, fill.finish_ns, size, input, model, schedule)) return;
  deal_out(row_tiles, totals, fill, input, model, schedule);
}

}  // namespace mla::plan
