#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/named_barrier.cuh"
#include "cuda/numbers.cuh"
#include "cuda/sm90/attention/store.cuh"
#include "cuda/sm90/attention/work.cuh"
#include "cuda/sm90/ptx.cuh"

// The two math groups: scores, weights, output; stages 1 to 4.
namespace mla::cuda::sm90 {

/// The rows of one thread in the running softmax, alike in both groups.
struct SoftmaxRows {
  float max[kRowsOfThread] = {};  // of scores * log2_scale, or up to kSlackLog2 below it
  float sum[kRowsOfThread] = {};  // of the weights that this thread formed
  float log2_scale = 0;           // sm_scale * log2(e)

  // A maximum stays while no score is a factor of 2^8 above it: weights up to 256 lose nothing, and
  // the output seldom has to be rescaled.
  static constexpr float kSlackLog2 = 8;

  __device__ void reset(float scale) {
    for (int r = 0; r < kRowsOfThread; ++r) {
      max[r] = -FLT_MAX;  // below every finite score, and differences from it
                          // are no NaN
      sum[r] = 0;
    }
    log2_scale = scale;
  }

  /// Of a score relative to the maximum, in powers of 2: rounded once, so exact near the maximum
  /// however large both are.
  __device__ float above_max(int r, float score) const { return fmaf(score, log2_scale, -max[r]); }

  __device__ float raised_max(int r, float score) const {
    return above_max(r, score) > kSlackLog2 ? score * log2_scale : max[r];
  }

  /// Moves to other maxima; returns what earlier weights are worth under them.
  __device__ void move(const float (&new_max)[kRowsOfThread], float (&rescale)[kRowsOfThread]) {
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      rescale[r] = exp2_approximate(max[r] - new_max[r]);
      max[r] = new_max[r];
      sum[r] *= rescale[r];
    }
  }
};

/// The math group of columns half * 256 to half * 256 + 255; it leads steps half, half + 2 and so
/// on, counted over all tiles.
template <class Traits>
__device__ inline void attend(const AttentionArgs& args, const int half,
                              SharedStorage<Traits>& shared) {
  using T = typename Traits::Element;
  constexpr uint32_t kAllLanes = 0xffffffff;
  const int warp = static_cast<int>(threadIdx.x) % Traits::kGroupThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = warp * 16 + lane / 4;
  const int other = half ^ 1;
  // Above 64 heads the left group's maxima come ahead of its weights (follow_and_lead).
  const bool sends_max_ahead = Traits::kBlocks == 2 && half == 0;
  const bool gets_max_ahead = Traits::kBlocks == 2 && half == 1;
  const bool has_boxes = args.key_loads == KeyLoads::kBoxes;
  const float log2_scale = log2_scale_of(plan_of(args).sm_scale);

  using Keys = KeyLayout<Traits>;
  const uint64_t queries = matrix_descriptor(shared_address(shared.queries));
  const uint64_t shared_weights = matrix_descriptor(shared_address(shared.weights));
  // Lane l names row l % 16 of its warp's, chunk l / 16 (of two) for store_matrices.
  const int named_row = warp * 16 + lane % 16;
  const uint32_t weights_row = shared_address(shared.weights) + named_row * Traits::kRowBytes;

  RingPlace ring;
  uint32_t num_works = 0;  // that have keys
  float out[128];          // 256 columns of two rows, eight columns after eight
  float scores[32];        // 64 keys of two rows, likewise
  float more_scores[32];   // a further summand of theirs
  uint32_t weights[4][4];  // of the same, packed, by 16 keys
  SoftmaxRows rows;
  float step_max[kRowsOfThread];  // of the thread's own scores
  float rescale[kRowsOfThread];

  // Boxes bring whole pages, but no more pages than have keys; the other rows may hold anything,
  // and zero times anything must be zero.
  const auto clear_rows_from = [&](RingPlace at, int32_t begin) {
    for (uint64_t& full : shared.keys_full[at.stage()]) {
      barrier_wait(shared_address(&full), at.parity());
    }
    constexpr int kChunks = Traits::kRowBytes / 16;
    const int thread = static_cast<int>(threadIdx.x) % Traits::kGroupThreads;
    const uint32_t matrix = shared_address(shared.keys[at.stage()]);
    for (uint32_t i = begin * kChunks + thread; i < Traits::kKeys * kChunks;
         i += Traits::kGroupThreads) {
      const uint32_t bytes = i * 16, atom = bytes / Traits::kAtomBytes;
      for (int s = 0; s < Traits::kStrips; ++s) {
        store_shared(
            matrix + Keys::strip(s) + atom * Keys::row_stride(s) + bytes % Traits::kAtomBytes,
            make_uint4(0, 0, 0, 0));
      }
    }
    fence_async_proxy();
    named_barrier_sync(kRowsClearedLeft + half, Traits::kGroupThreads);
  };

  // Stage 1: scores of a step, as its keys come. The tensor cores cut off what does not fit their
  // accumulator at each product, so scores are sums of two chains of products, each over a half of
  // the value columns and a half of the rope part. The group's own half comes first; a chain is the
  // same whichever group leads, so the scores have the same bits.
  const auto keys_at = [&](RingPlace at) {
    return uniform(shared_address(shared.keys[at.stage()]));
  };
  // For all warps of the group alike: a wait for products that some of them skip is undefined.
  const auto keys_are_here = [&](RingPlace at) {
    const bool seen = barrier_test(shared_address(&shared.keys_full[at.stage()][0]), at.parity()) &&
                      barrier_test(shared_address(&shared.keys_full[at.stage()][1]), at.parity());
    return named_barrier_all(kKeysSeenLeft + half, Traits::kGroupThreads, seen);
  };
  const auto wait_for_keys = [&](RingPlace at, int keys_half) {
    barrier_wait(shared_address(&shared.keys_full[at.stage()][keys_half]), at.parity());
    if (!has_boxes) fence_async_proxy();
  };
  const auto multiply_strip = [&](float(&sums)[32], uint64_t a, uint64_t b, bool accumulate) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply_scores<T>(sums, advance(a, k * 32), advance(b, k * 32), accumulate || k > 0);
    }
  };
  const auto multiply_half = [&](uint32_t keys, int keys_half, float(&sums)[32]) {
    const uint32_t begin = uniform(keys_half * Traits::kHalfBytes);
    const uint64_t a = advance(queries, begin);
    const uint64_t b = matrix_descriptor(keys + begin, Keys::kHalfRowStride);
#pragma unroll
    for (int s = 0; s < Traits::kHalfStrips; ++s) {
      multiply_strip(sums, advance(a, s * Traits::kStripBytes), advance(b, s * Traits::kAtomBytes),
                     s > 0);
    }
  };
  const auto multiply_rope = [&](uint32_t keys, int keys_half, float(&sums)[32]) {
    constexpr int kProducts = Traits::kRope / 16 / Traits::kHalves;
    const uint32_t begin = uniform(keys_half * kProducts * 32);
    const uint64_t a = advance(queries, Traits::kValueStrips * Traits::kStripBytes + begin);
    const uint64_t b = matrix_descriptor(keys + Keys::kRopeStrip + begin, Traits::kAtomBytes);
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      multiply_scores<T>(sums, advance(a, k * 32), advance(b, k * 32), true);
    }
  };
  const auto start_scores = [&](RingPlace at, int32_t num_keys) {
    if (has_boxes && num_keys < Traits::kKeys) clear_rows_from(at, num_keys);
    const uint32_t keys = keys_at(at);
    wait_for_keys(at, half);
    products_begin();
    multiply_half(keys, half, scores);
    products_commit();
    wait_for_keys(at, other);
    products_begin();
    multiply_half(keys, other, more_scores);
    multiply_rope(keys, other, more_scores);
    multiply_rope(keys, half, scores);
    products_commit();
  };
  const auto finish_scores = [&] {
    products_wait<0>();
    products_arrive(scores);
    products_arrive(more_scores);
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] += more_scores[i];
  };

  // Stage 2: weights from scores.
  const auto hide_keys = [&](const auto& keys_seen_by) {
    const int first_key = lane % 4 * 2;
    const int32_t seen[kRowsOfThread] = {keys_seen_by(first_row) - first_key,
                                         keys_seen_by(first_row + 8) - first_key};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + i % 2 >= seen[i / 2 % 2]) scores[i] = -INFINITY;
    }
  };
  const auto find_max = [&] {
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      // Four chains, since each link waits for the one before.
      float chains[4] = {-FLT_MAX, -FLT_MAX, -FLT_MAX, -FLT_MAX};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        chains[i % 4] = fmaxf(chains[i % 4], scores[i / 2 * 4 + 2 * r + i % 2]);
      }
      step_max[r] = fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3]));
    }
  };
  const auto raise_max = [&] {
    float max[kRowsOfThread];
    bool raises = false;
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      max[r] = rows.max[r];
      raises = raises || rows.raised_max(r, step_max[r]) != max[r];
    }
    // Seldom: shuffles wait for the tensor cores, which have the shared memory's wires.
    if (__any_sync(kAllLanes, raises)) {
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
        step_max[r] = fmaxf(step_max[r], __shfl_xor_sync(kAllLanes, step_max[r], 1));
        step_max[r] = fmaxf(step_max[r], __shfl_xor_sync(kAllLanes, step_max[r], 2));
        max[r] = rows.raised_max(r, step_max[r]);
      }
    }
    rows.move(max, rescale);
    if (lane % 4 == 0) {
      for (int r = 0; r < kRowsOfThread; ++r) shared.row_max[first_row + 8 * r] = rows.max[r];
    }
    if (sends_max_ahead) barrier_arrive(shared_address(&shared.max_full));
  };
  const auto form_weights = [&] {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = i / 2 % 2;
      const float first = exp2_approximate(rows.above_max(r, scores[i]));
      const float second = exp2_approximate(rows.above_max(r, scores[i + 1]));
      rows.sum[r] += first + second;
      weights[i / 8][i / 2 % 4] = pack<T>(first, second);
    }
  };

  // Stage 3: weights, and the maxima stored above, from the group that leads the step to the one
  // that follows.
  const auto publish_weights = [&] {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int chunk = (2 * k + lane / 16) ^ (named_row % 8);
      store_matrices(weights_row + chunk * 16, weights[k]);
    }
    fence_async_proxy();
    barrier_arrive(shared_address(&shared.weights_full[half]));
  };
  const auto wait_for_weights = [&](RingPlace at) {
    barrier_wait(shared_address(&shared.weights_full[other]), at.parity());
  };
  const auto receive_max = [&](RingPlace at) {
    if (gets_max_ahead) {
      barrier_wait(shared_address(&shared.max_full), at.parity());
    } else {
      wait_for_weights(at);
    }
    const float max[kRowsOfThread] = {shared.row_max[first_row], shared.row_max[first_row + 8]};
    __syncwarp();  // the warp's next maxima go to the same place
    rows.move(max, rescale);
  };

  // Stage 4: out = out * rescale + weights x values, this group's columns.
  const auto rescale_by = [&](const float(&factor)[kRowsOfThread]) {
    if (!__any_sync(kAllLanes, factor[0] != 1.0F || factor[1] != 1.0F)) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] *= factor[i / 2 % 2];
  };
  // Made before the products that use it: what a warp does between two of them holds up the second.
  const auto values_of = [&](RingPlace at) {
    const uint32_t values = keys_at(at) + half * Traits::kHalfBytes;
    return matrix_descriptor(values, Keys::kHalfRowStride, Traits::kAtomBytes);
  };
  constexpr uint32_t kBytesOf16Keys = 16 / Traits::kAtomRows * Keys::kHalfRowStride;
  const auto start_values_of_own = [&](RingPlace at) {
    const uint64_t values = values_of(at);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply_values<T>(out, weights[k], advance(values, k * kBytesOf16Keys));
    }
    products_commit();
  };
  const auto start_values_of_other = [&](RingPlace at) {
    const uint64_t values = values_of(at);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      multiply_values<T>(out, advance(shared_weights, k * 32), advance(values, k * kBytesOf16Keys));
    }
    products_commit();
  };
  const auto free_keys = [&](RingPlace at) {
    if (lane != 0) return;
    const uint32_t barrier = shared_address(&shared.keys_free[at.stage()][half]);
    if (in_cluster<Traits>(args)) {
      barrier_arrive_in_cluster(address_in_cluster(barrier, half));  // who brings this half
    } else {
      barrier_arrive(barrier);
    }
  };
  const auto finish_values = [&](RingPlace at) {
    products_wait<0>();
    products_arrive(out);
    free_keys(at);
  };

  // All steps of a work; ends with the row sums of both groups.
  const auto attend_keys = [&](const Work& work, float(&sum)[kRowsOfThread]) {
    int32_t left = work.kv_end - work.kv_begin;  // keys from this step on
    // Of the last `keys` ones, what a row sees; the tile is read again, as above.
    const auto keys_seen_by = [&](int row, int32_t keys) {
      const Work again = work_of<Traits>(args, work.tile);
      const int32_t seen = visible_keys(plan_of(args), args.tensors.geometry.num_heads,
                                        again.request, again.row_begin + row);
      return min(again.kv_end, seen) - (again.kv_end - keys);
    };
    const int32_t hidden = left - keys_seen_by(0, left);  // from some row; later rows see no less

    const auto next_step = [&] {
      ++ring.step;
      left -= Traits::kKeys;
    };
    // When both groups' scores of the steps up to the last are done: this one's, and the other's,
    // whose maxima or weights of the step before have come.
    const auto free_queries = [&](int32_t keys) {
      if (keys <= Traits::kKeys && lane == 0) barrier_arrive(shared_address(&shared.queries_free));
    };
    // Of a step that this group leads and that `keys` keys are left from: all before its weights.
    const auto judge_scores = [&](int32_t keys) {
      if (keys - hidden < Traits::kKeys) {
        hide_keys([&](int row) { return keys_seen_by(row, keys); });
      }
      find_max();
    };
    const auto lead_values = [&] {
      publish_weights();
      rescale_by(rescale);
      start_values_of_own(ring);
      finish_values(ring);
    };
    const auto follow_values = [&] {
      receive_max(ring);
      if (gets_max_ahead) wait_for_weights(ring);
      rescale_by(rescale);
      start_values_of_other(ring);
    };
    // This group's step, from its finished scores on.
    const auto lead = [&] {
      free_queries(left);
      judge_scores(left);
      raise_max();
      form_weights();
      lead_values();
    };
    // The other group's step, and the scores of the next if there is one.
    const auto follow = [&] {
      const RingPlace next{ring.step + 1};
      const bool is_last = left <= Traits::kKeys;
      follow_values();
      // The next scores queue up behind these products where their keys are here; else this step's
      // keys must not wait for them.
      const bool queue = !is_last && keys_are_here(next);
      if (!queue) finish_values(ring);
      if (is_last) return;
      start_scores(next, left - Traits::kKeys);
      products_wait<2>();  // two chains of scores
      products_arrive(out);
      if (queue) free_keys(ring);
      finish_scores();
    };
    // Both steps, scores first, where the tensor cores are the bound, not the memory. The other
    // group's maxima come ahead of its weights, so that this group knows its own when those come
    // and forms its weights while the other's are multiplied.
    const auto follow_and_lead = [&] {
      const RingPlace next{ring.step + 1};
      start_scores(next, left - Traits::kKeys);
      finish_scores();
      judge_scores(left - Traits::kKeys);
      receive_max(ring);
      free_queries(left - Traits::kKeys);
      const float others_rescale[kRowsOfThread] = {rescale[0], rescale[1]};
      raise_max();
      wait_for_weights(ring);
      rescale_by(others_rescale);
      start_values_of_other(ring);
      form_weights();  // for the most part between those products, as the compiler orders it
      finish_values(ring);
      next_step();
      lead_values();
    };

    // Each group leads the steps of one stage. Up to 64 heads the code of follow and lead stands
    // once: what is not in the instruction cache costs more than what it does.
    bool leads = static_cast<int>(ring.stage()) == half;
    // Only who multiplies queries waits for them: for a warp that just follows a work's only step
    // they might go again unseen, and it would wait for ever.
    if (leads || left > Traits::kKeys) {
      barrier_wait(shared_address(&shared.queries_full), num_works % 2);
      fence_async_proxy();
    }
    if (leads) {
      start_scores(ring, left);
      finish_scores();
    }
    if (Traits::kBlocks == 2 && half == 1) {
      if (leads) {
        lead();
        next_step();
        leads = false;
      }
#pragma unroll 1
      while (left > Traits::kKeys) {
        follow_and_lead();
        next_step();
      }
    }
#pragma unroll 1
    while (left > 0) {
      if (leads) {
        lead();
      } else {
        follow();
      }
      next_step();
      leads = !leads;
    }

    float(&sums)[Traits::kHalves][Traits::kRows] = shared.row_sum[num_works % 2];
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 1);
      rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 2);
      if (lane % 4 == 0) sums[half][first_row + 8 * r] = rows.sum[r];
    }
    barrier_arrive(shared_address(&shared.sums_full));
    barrier_wait(shared_address(&shared.sums_full), num_works % 2);
    for (int r = 0; r < kRowsOfThread; ++r) {
      sum[r] = sums[0][first_row + 8 * r] + sums[1][first_row + 8 * r];
    }
    ++num_works;
  };

  for_each_work<Traits>(args, [&](const Work& work) {
    rows.reset(log2_scale);
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0;
    float sum[kRowsOfThread] = {};
    if (work.num_steps > 0) attend_keys(work, sum);
    store_rows<Traits>(args, work_of<Traits>(args, work.tile), half, out, rows.max, sum);
  });
}

}  // namespace mla::cuda::sm90
