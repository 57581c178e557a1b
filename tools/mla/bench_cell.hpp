#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cases/attention_case.hpp"
#include "mla/attention.hpp"
#include "mla/peer_library.hpp"

namespace mla::cli {

/// What one peer gave for a cell.
struct PeerTimes {
  std::string name;
  std::vector<double> round_us;  ///< of one run; empty where it is at fault
  double plan_us = 0;            ///< host time of a plan, median
  double max_difference = 0;     ///< the largest |peer - ours| of an output; infinite for NaN
  std::string fault;             ///< why it was not timed
};

/// What was measured of one cell.
struct CellTimes {
  std::string kernel;
  PlanInfo plan;
  double plan_us = 0;            ///< host time of a plan, median
  std::vector<double> round_us;  ///< of one run
  std::vector<double> read_us;   ///< of reading the same pages alone; empty where not measured
  std::vector<PeerTimes> peers;  ///< those that serve the cell
};

struct CellOptions {
  int rounds = 5;
  double round_seconds = 0.02;              ///< of each contender in each round
  bool time_reads = true;                   ///< also a kernel that only reads the pages, on a GPU
  int64_t cold_bytes = int64_t{400} << 20;  ///< of caches that runs take in turn
};

/// How far an output is from another, both [rows, columns].
struct Difference {
  double largest = 0;        ///< |theirs - ours|; infinite where theirs has a NaN
  double largest_share = 0;  ///< of the largest |ours| in the same row
};
Difference compare_rows(std::span<const BFloat16> ours, std::span<const BFloat16> theirs,
                        int64_t columns);

/// A peer is wrong where an output differs by more than this share of the largest value in its row:
/// several times what rounding in bf16 gives.
inline constexpr double kLargestPeerShare = 1.0 / 32;

/// Times a case on a device with graphs: ours, each peer that serves it, and on a GPU a kernel that
/// only reads the pages. The runs of each
/// contender are captured over copies of the cache that are together several times any level-2
/// cache, on scattered pages, and replayed; rounds of all contenders are interleaved. Values are
/// uniform in [-1, 1). Throws what PagedAttention throws, std::bad_alloc, CudaError.
CellTimes time_cell(const cases::AttentionCase& attention_case, std::span<const PeerLibrary> peers,
                    const CellOptions& options);

}  // namespace mla::cli
