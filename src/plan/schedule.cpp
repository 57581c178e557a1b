#include "plan/schedule.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "mla/error.hpp"

namespace mla::plan {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Rows of one request that share a tile, and the keys that the last of them sees.
struct RowTile {
  int64_t row_begin = 0;
  int32_t request = 0;
  int32_t num_rows = 0;
  int32_t keys = 0;
  int32_t request_keys = 0;
};

template <class Fn>
void for_each_row_tile(const ScheduleInput& input, const CostModel& model, const Fn& fn) {
  const int64_t heads = input.num_heads;
  for (size_t i = 0; i < input.kv_len.size(); ++i) {
    const int64_t queries = int64_t{input.qo_indptr[i + 1]} - input.qo_indptr[i];
    const int64_t rows = queries * heads;
    const int64_t keys = input.kv_len[i];
    for (int64_t row = 0; row < rows; row += model.tile_rows) {
      const int64_t end = std::min(rows, row + model.tile_rows);
      const int64_t last_query = (end - 1) / heads;
      const int64_t visible =
          input.causal ? std::max<int64_t>(0, keys - queries + last_query + 1) : keys;
      fn(RowTile{row, static_cast<int32_t>(i), static_cast<int32_t>(end - row),
                 static_cast<int32_t>(visible), static_cast<int32_t>(keys)});
    }
  }
}

/// Costs of the parts of one row tile.
struct TileCost {
  double block_ns;  ///< one block
  double tile_ns;   ///< the tile apart from its blocks
  double part_ns;   ///< the same where its result is a partial one

  TileCost(const CostModel& model, int32_t rows)
      : block_ns(model.block_ns + rows * model.block_row_ns),
        tile_ns(model.tile_ns),
        part_ns(model.tile_ns + rows * model.partial_row_ns) {}
};

/// Tokens of a part under fixed splits: depends on the request alone.
int64_t fixed_part_tokens(int64_t request_keys, int32_t fixed_tokens, int32_t align) {
  const int64_t step = ceil_div(fixed_tokens, align) * align;
  return step * std::max<int64_t>(1, ceil_div(ceil_div(request_keys, step), kMaxSplits));
}

/// The parts that a policy prescribes for one row tile.
struct Parts {
  int64_t count = 1;
  int64_t tokens = 0;  ///< of each, fixed splits
  int64_t units = 0;   ///< alignment units that are shared out, forced splits
  int64_t align = 1;
  int64_t keys = 0;

  int64_t begin(int64_t part) const {
    const int64_t at = tokens > 0 ? part * tokens : units * part / count * align;
    return std::min(at, keys);
  }
};

Parts prescribed_parts(const RowTile& tile, const SplitPolicy& splits, int32_t align) {
  Parts parts{.align = align, .keys = tile.keys};
  if (splits.fixed_tokens > 0) {
    parts.tokens = fixed_part_tokens(tile.request_keys, splits.fixed_tokens, align);
    parts.count = std::max<int64_t>(1, ceil_div(tile.keys, parts.tokens));
  } else {
    parts.units = ceil_div(tile.keys, align);
    parts.count = std::clamp<int64_t>(parts.units, 1, std::min(splits.forced_count, kMaxSplits));
  }
  return parts;
}

/// What the whole batch costs when its parts are shared out.
struct Totals {
  int64_t tiles = 0;
  int64_t partial_rows = 0;
  double total_ns = 0;
  double largest_ns = 0;  ///< of one part
  int32_t largest_rows = 0;
};

bool is_automatic(const SplitPolicy& splits) {
  return splits.fixed_tokens <= 0 && splits.forced_count <= 0;
}

Totals sum_up(const ScheduleInput& input, const CostModel& model) {
  Totals totals;
  const bool automatic = is_automatic(input.splits);
  for_each_row_tile(input, model, [&](const RowTile& tile) {
    const TileCost cost(model, tile.num_rows);
    totals.largest_rows = std::max(totals.largest_rows, tile.num_rows);
    const auto add = [&](int64_t tokens, double start_ns) {
      const double ns =
          start_ns + static_cast<double>(ceil_div(tokens, model.block_tokens)) * cost.block_ns;
      totals.total_ns += ns;
      totals.largest_ns = std::max(totals.largest_ns, ns);
    };
    if (automatic) {
      add(tile.keys, cost.tile_ns);
      totals.tiles += 1;
      return;
    }
    const Parts parts = prescribed_parts(tile, input.splits, model.split_align);
    totals.tiles += parts.count;
    if (parts.count > 1) totals.partial_rows += parts.count * tile.num_rows;
    for (int64_t part = 0; part < parts.count; ++part) {
      add(parts.begin(part + 1) - parts.begin(part), parts.count > 1 ? cost.part_ns : cost.tile_ns);
    }
  });
  return totals;
}

/// Hands tiles to the workers in turn.
class Dealer {
 public:
  Dealer(Schedule& schedule, int32_t num_workers, double cap_ns)
      : schedule_(schedule), num_workers_(num_workers), cap_ns_(cap_ns) {
    schedule.worker_indptr.clear();
    schedule.worker_indptr.push_back(0);
    schedule.tiles.clear();
    schedule.merges.clear();
    schedule.num_partial_rows = 0;
    schedule.max_splits = 0;
  }

  /// What the current worker can still take.
  double room() const {
    return last_worker() ? std::numeric_limits<double>::infinity() : cap_ns_ - load_ns_;
  }
  void next_worker() {
    schedule_.worker_indptr.push_back(static_cast<int32_t>(schedule_.tiles.size()));
    load_ns_ = 0;
  }
  void take(const RowTile& tile, int64_t kv_begin, int64_t kv_end, bool partial, double ns) {
    schedule_.tiles.push_back({tile.row_begin, partial ? schedule_.num_partial_rows : -1,
                               tile.request, tile.num_rows, static_cast<int32_t>(kv_begin),
                               static_cast<int32_t>(kv_end)});
    if (partial) schedule_.num_partial_rows += tile.num_rows;
    load_ns_ += ns;
  }
  void merge(const RowTile& tile, int64_t count) {
    schedule_.max_splits = std::max(schedule_.max_splits, static_cast<int32_t>(count));
    if (count == 1) return;
    schedule_.merges.push_back({tile.row_begin, schedule_.num_partial_rows - count * tile.num_rows,
                                tile.request, tile.num_rows, static_cast<int32_t>(count)});
  }
  void finish() {
    while (schedule_.worker_indptr.size() <= static_cast<size_t>(num_workers_)) next_worker();
  }

 private:
  bool last_worker() const {
    return schedule_.worker_indptr.size() == static_cast<size_t>(num_workers_);
  }

  Schedule& schedule_;
  int32_t num_workers_;
  double cap_ns_;
  double load_ns_ = 0;
};

/// Fills each worker up to the cap; a row tile that does not fit is cut at a block.
void deal_automatic(const RowTile& tile, const CostModel& model, bool may_split, Dealer& dealer) {
  const TileCost cost(model, tile.num_rows);
  int64_t left = ceil_div(tile.keys, model.block_tokens);
  int64_t begin = 0;
  for (int64_t part = 0;; ++part) {
    const double start_ns = part == 0 ? cost.tile_ns : cost.part_ns;
    const double rest_ns = start_ns + static_cast<double>(left) * cost.block_ns;
    if (rest_ns <= dealer.room()) {
      dealer.take(tile, begin, tile.keys, part > 0, rest_ns);
      return dealer.merge(tile, part + 1);
    }
    const double fit = (dealer.room() - cost.part_ns) / cost.block_ns;
    if (may_split && left > 1 && fit >= 1) {
      const int64_t blocks = std::min(static_cast<int64_t>(fit), left - 1);
      const int64_t end = begin + blocks * model.block_tokens;
      dealer.take(tile, begin, end, true,
                  cost.part_ns + static_cast<double>(blocks) * cost.block_ns);
      begin = end;
      left -= blocks;
    } else {
      --part;
    }
    dealer.next_worker();
  }
}

void deal_prescribed(const RowTile& tile, const ScheduleInput& input, const CostModel& model,
                     Dealer& dealer) {
  const TileCost cost(model, tile.num_rows);
  const Parts parts = prescribed_parts(tile, input.splits, model.split_align);
  const bool split = parts.count > 1;
  for (int64_t part = 0; part < parts.count; ++part) {
    const int64_t begin = parts.begin(part);
    const int64_t end = parts.begin(part + 1);
    const double ns =
        (split ? cost.part_ns : cost.tile_ns) +
        static_cast<double>(ceil_div(end - begin, model.block_tokens)) * cost.block_ns;
    if (ns > dealer.room()) dealer.next_worker();
    dealer.take(tile, begin, end, split, ns);
  }
  dealer.merge(tile, parts.count);
}

void refuse_above(int64_t value, int64_t limit, const char* what) {
  if (value <= limit) return;
  throw_invalid({what, "make_schedule", "at most " + std::to_string(limit), std::to_string(value)});
}

}  // namespace

void make_schedule(const ScheduleInput& input, const CostModel& model, Schedule& schedule) {
  const int64_t batch_rows =
      input.kv_len.empty() ? 0 : int64_t{input.qo_indptr.back()} * input.num_heads;
  refuse_above(batch_rows / model.tile_rows, kMaxTiles, "tiles of the plan");
  const Totals totals = sum_up(input, model);
  refuse_above(totals.tiles + input.num_workers, kMaxTiles, "tiles of the plan");
  refuse_above(totals.partial_rows, kMaxPartialRows, "partial rows of the plan");

  // A worker left with room for less than one more part wastes no more than `grain`, and each cut
  // adds no more than that: so all fits under the cap.
  const double workers = input.num_workers;
  const TileCost largest(model, totals.largest_rows);
  const double cut_ns = largest.part_ns + largest.block_ns +
                        static_cast<double>(totals.largest_rows) * model.partial_row_ns;
  const bool automatic = is_automatic(input.splits);
  const bool may_split = automatic && cut_ns < totals.largest_ns;
  const double grain = may_split ? cut_ns : totals.largest_ns;
  const double cap = totals.total_ns / workers + grain * (1 - 1 / workers);

  Dealer dealer(schedule, input.num_workers, cap * (1 + 1e-12));
  for_each_row_tile(input, model, [&](const RowTile& tile) {
    if (automatic) {
      deal_automatic(tile, model, may_split, dealer);
    } else {
      deal_prescribed(tile, input, model, dealer);
    }
  });
  dealer.finish();
}

int64_t max_partial_rows(const Limits& limits, const Geometry& geometry, int32_t num_workers,
                         const SplitPolicy& splits, const CostModel& model) {
  if (limits.max_rows == 0) return 0;
  const int64_t rows = limits.max_tokens * geometry.num_heads;
  int64_t needed = 0;
  if (is_automatic(splits)) {
    // Each worker but the last ends in at most one cut, and a tile with c cuts has c + 1 parts.
    const int64_t cuts = num_workers - 1;
    const int64_t tile_rows = std::min<int64_t>(model.tile_rows, rows);
    needed = cuts * tile_rows + std::min(cuts * tile_rows, rows);
  } else {
    const int64_t keys = std::min<int64_t>(limits.max_listed_pages * geometry.page_size, INT32_MAX);
    const int64_t step = splits.fixed_tokens > 0
                             ? ceil_div(splits.fixed_tokens, model.split_align) * model.split_align
                             : model.split_align;
    const int64_t wanted = splits.fixed_tokens > 0 ? kMaxSplits : splits.forced_count;
    const int64_t parts = std::min<int64_t>({kMaxSplits, wanted, ceil_div(keys, step)});
    needed = parts > 1 ? parts * rows : 0;
  }
  if (needed > kMaxPartialRows) {
    throw_invalid({"partial rows within limits", "max_partial_rows",
                   "at most " + std::to_string(kMaxPartialRows), std::to_string(needed)});
  }
  return needed;
}

}  // namespace mla::plan
