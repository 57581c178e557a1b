#pragma once

#include <cstdint>
#include <vector>

namespace mla::cli {

/// What a replay measures. Times are in seconds; those of the generator and of the checks are
/// apart and not in a step's time.
struct ReplayStats {
  int64_t requests_finished = 0;
  int64_t requests_failed = 0;  ///< with a checked row outside its bound
  int64_t prefill_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t decode_tokens = 0;
  int64_t drafted_tokens = 0;
  int64_t accepted_tokens = 0;  ///< drafts that were right: part of the decode tokens
  int64_t recomputed_tokens = 0;
  int64_t preemptions = 0;
  int64_t peak_pages = 0;    ///< the most that requests held at a time
  int64_t pages_leaked = 0;  ///< not free at the end, the prefix index dropped

  std::vector<double> step_s;
  double schedule_s = 0;   ///< choice of the step, admission
  double plan_s = 0;       ///< page lists and the attention's plan
  double append_s = 0;     ///< new rows into the pool, commit, trim
  double attention_s = 0;  ///< AttentionResource::run
  double generate_s = 0;
  double check_s = 0;
  double wall_s = 0;
  double attention_flops = 0;  ///< 2 * heads * (rank + rope + rank) for each visible key
  double attention_bytes = 0;  ///< each cached row once a step and layer, queries and outputs

  int64_t checked_rows = 0;
  int64_t checked_requests = 0;  ///< with a checked row
  double max_abs_error = 0;      ///< largest |out - reference| of all checked values
  double max_lse_error = 0;      ///< the same of the LSE
  double max_bound_share = 0;    ///< largest error as a share of what its bound allows
  uint64_t output_digest = 0;    ///< of the bits of all checked rows: equal runs have equal digests

  int64_t rejected_tokens() const { return drafted_tokens - accepted_tokens; }
  double prefix_hit_rate() const;
  double gflops() const { return attention_s > 0 ? attention_flops / attention_s * 1e-9 : 0; }
  double gbytes_per_s() const { return attention_s > 0 ? attention_bytes / attention_s * 1e-9 : 0; }
  /// Of the step times, `share` in [0, 1]; 0 without steps.
  double step_percentile_s(double share) const;
};

}  // namespace mla::cli
