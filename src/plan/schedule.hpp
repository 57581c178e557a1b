#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/attention.hpp"

namespace mla::plan {

/// What a kernel's work costs, as its backend states or measures it, and the shape of its tiles.
struct CostModel {
  int32_t tile_rows = 0;      ///< rows (query token x head) that one tile holds at most
  int32_t block_tokens = 0;   ///< keys of one inner step: automatic splits begin at multiples of it
  int32_t split_align = 1;    ///< a forced or fixed split may begin only at multiples of this
  double tile_ns = 0;         ///< start and end of a tile
  double block_ns = 0;        ///< one block of keys, whatever the rows; with the next one above 0
  double block_row_ns = 0;    ///< and for each row of the tile
  double partial_row_ns = 0;  ///< one partial row written, read again and merged
  double merge_ns = 0;        ///< once, where anything is merged at all: a barrier, a launch
  bool shares_keys = false;   ///< keys that workers read at the same time come from memory once
};

/// Rows of one request against a range of its keys. Row r is query r / num_heads, head
/// r % num_heads of the request. Where the range is empty the rows see no key and are written as
/// such. Keys past what a row may see under causal are masked by the kernel.
struct Tile {
  int64_t row_begin = 0;
  int64_t partial_begin = -1;  ///< first of its rows among the partial rows; -1: it is the output
  int32_t request = 0;
  int32_t num_rows = 0;
  int32_t kv_begin = 0;  ///< tokens
  int32_t kv_end = 0;
};

/// Partial results of num_rows rows, num_partials times num_rows of them from partial_begin on,
/// in the order of the keys.
struct Merge {
  int64_t row_begin = 0;
  int64_t partial_begin = 0;
  int32_t request = 0;
  int32_t num_rows = 0;
  int32_t num_partials = 0;
  int32_t rows_before = 0;  ///< rows of the merges before this one
};

/// Who computes what. Reused from plan to plan, so that it stops allocating.
struct Schedule {
  std::vector<int32_t> worker_indptr;  ///< [workers + 1] into tiles
  std::vector<Tile> tiles;
  std::vector<Merge> merges;
  int64_t num_partial_rows = 0;
  int32_t max_splits = 0;  ///< the most parts of one row's keys; 0 without tiles

  // Memory of make_schedule:
  std::vector<Tile> row_tiles;  ///< the tiles before they are cut
  std::vector<Schedule> teams;  ///< at most one: what each team does, before its members share it
};

struct ScheduleInput {
  std::span<const int32_t> qo_indptr;  ///< [B + 1], checked
  std::span<const int32_t> kv_len;     ///< [B], checked
  int32_t num_heads = 0;
  bool causal = true;
  int32_t num_workers = 0;
  SplitPolicy splits{};
};

/// The most row tiles (query tokens x heads / tile_rows + requests, rounded down), prescribed parts
/// and partial rows of one schedule; more are refused.
inline constexpr int64_t kMaxTiles = int64_t{1} << 24;
inline constexpr int64_t kMaxPartialRows = int64_t{1} << 31;

/// Cuts the batch into tiles and shares them out. Every (row, visible key) pair is in exactly one
/// tile; every row is in at least one, so that all outputs are written. Pure: the same input gives
/// the same schedule. Allocates only where `schedule` never held as much. The scheme, its bound on
/// the heaviest worker's load and the proof are in docs/planner.md.
/// Throws InvalidArgument: above kMaxTiles or kMaxPartialRows; the message has the number.
void make_schedule(const ScheduleInput& input, const CostModel& model, Schedule& schedule);

/// The most partial rows that make_schedule can ask for within the limits. Forced splits, and fixed
/// ones where a request's rows fit in one tile: exact, some batch within them needs this many.
/// Otherwise a bound that holds for every batch.
/// Throws InvalidArgument: above kMaxPartialRows.
int64_t max_partial_rows(const Limits& limits, const Geometry& geometry, int32_t num_workers,
                         const SplitPolicy& splits, const CostModel& model);

/// The most tiles, an upper bound for every batch within the limits that make_schedule accepts.
int64_t max_tiles(const Limits& limits, const Geometry& geometry, int32_t num_workers,
                  const SplitPolicy& splits, const CostModel& model);

}  // namespace mla::plan
