#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <type_traits>

#include "cuda/numbers.cuh"
#include "cuda/sm90/attention/work.cuh"
#include "cuda/sm90/ptx.cuh"

// Stage 5: the finished rows of a tile, from the registers of a math group to where the plan wants
// them.
namespace mla::cuda::sm90 {

// A thread holds two rows of its warp's 16: lane / 4 and the row 8 below.
constexpr int kRowsOfThread = 2;

__device__ inline float log2_scale_of(float sm_scale) {
  return sm_scale * std::numbers::log2e_v<float>;
}

/// ln(sum * 2^max), for weights formed with log2_scale_of(sm_scale). That is off from sm_scale *
/// log2(e) by its rounding, and ln 2 by its own: together an error of the maximum's size times
/// 2^-24, which is taken back. So is most of what the tensor cores cut off a score: 4 (fp16) or 2
/// (bf16) times 2^-24 of it, where 4.7 and 2.5 are lost on average with random elements.
template <class T>
__device__ inline float natural_lse(float max, float sum, float sm_scale) {
  constexpr float kCutOff = std::is_same_v<T, __half> ? 0x1p-22F : 0x1p-23F;
  constexpr float kLog2e = std::numbers::log2e_v<float>, kLn2 = std::numbers::ln2_v<float>;
  constexpr auto kLog2eRest = static_cast<float>(std::numbers::log2e - double{kLog2e});
  constexpr auto kLn2Rest = static_cast<float>(std::numbers::ln2 - double{kLn2});
  const float scale = log2_scale_of(sm_scale);
  const float scale_rest = fmaf(sm_scale, kLog2e, -scale) + sm_scale * kLog2eRest;
  const float rest = kLn2Rest + kLn2 * (scale_rest / scale + kCutOff);
  return fmaf(max, kLn2, fmaf(max, rest, logf(sum)));
}

/// The group's columns of the finished rows, to where the plan wants them.
template <class Traits>
__device__ inline void store_rows(const AttentionArgs& args, const Work& work, int half,
                                  const float (&out)[128], const float (&max)[kRowsOfThread],
                                  const float (&sum)[kRowsOfThread]) {
  using T = typename Traits::Element;
  const AttentionParams& tensors = args.tensors;
  const PlanView plan = plan_of(args);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pair = lane % 4;
  const int warp_row = static_cast<int>(threadIdx.x) % Traits::kGroupThreads / 32 * 16;
  constexpr int kRowsOfTwoWarps = 32;
  if (warp_row >= work.num_rows) return;
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    const int row = warp_row + lane / 4 + 8 * r;
    const bool live = row < work.num_rows;
    const bool empty = sum[r] == 0;  // not so where it is NaN
    const float inverse = empty ? 0 : 1 / sum[r];
    const float lse = empty ? -INFINITY : natural_lse<T>(max[r], sum[r], plan.sm_scale);
    // Of two chunks of eight columns neighbouring lanes swap a half each, so that a lane has four
    // columns of one of them.
    const bool odd = pair % 2 != 0;
    const int four = 8 * (pair % 2) + 2 * (pair & 2);
    const auto swap = [&](auto first, auto second) {
      return __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
    };
    if (work.partial_begin >= 0) {
      const int64_t at = work.partial_begin + row;
      float* to = tensors.partial_out + at * Traits::kRank + half * Traits::kHalfColumns;
      if (work.num_rows > kRowsOfTwoWarps) {
#pragma unroll
        for (int c = 0; c < 32; c += 2) {
          const float2 first =
              make_float2(out[4 * c + 2 * r] * inverse, out[4 * c + 2 * r + 1] * inverse);
          const float2 second =
              make_float2(out[4 * c + 4 + 2 * r] * inverse, out[4 * c + 4 + 2 * r + 1] * inverse);
          const float2 swapped = make_float2(swap(first.x, second.x), swap(first.y, second.y));
          store_if(live, to + four + 8 * c,
                   odd ? make_float4(swapped.x, swapped.y, second.x, second.y)
                       : make_float4(first.x, first.y, swapped.x, swapped.y));
        }
      } else if (live) {
        // Few warps store: fewer instructions matter more than fewer stores.
#pragma unroll
        for (int c = 0; c < 32; ++c) {
          *reinterpret_cast<float2*>(to + 2 * pair + 8 * c) =
              make_float2(out[4 * c + 2 * r] * inverse, out[4 * c + 2 * r + 1] * inverse);
        }
      }
      if (live && half == 0 && pair == 0) tensors.partial_lse[at] = lse;
      continue;
    }
    const RowPlace at =
        place_of(plan, tensors.geometry.num_heads, work.request, work.row_begin + (live ? row : 0));
    T* to = static_cast<T*>(tensors.out) + at.token * tensors.out_token_stride +
            at.head * tensors.out_head_stride + half * Traits::kHalfColumns;
    if (args.out_aligned) {
#pragma unroll
      for (int c = 0; c < 32; c += 2) {
        const uint32_t first =
            pack<T>(out[4 * c + 2 * r] * inverse, out[4 * c + 2 * r + 1] * inverse);
        const uint32_t second =
            pack<T>(out[4 * c + 4 + 2 * r] * inverse, out[4 * c + 4 + 2 * r + 1] * inverse);
        const uint32_t swapped = swap(first, second);
        store_if(live, to + four + 8 * c,
                 odd ? make_uint2(swapped, second) : make_uint2(first, swapped));
      }
    } else if (live) {
#pragma unroll
      for (int c = 0; c < 32; ++c) {
        to[8 * c + 2 * pair] = from_float<T>(out[4 * c + 2 * r] * inverse);
        to[8 * c + 2 * pair + 1] = from_float<T>(out[4 * c + 2 * r + 1] * inverse);
      }
    }
    if (live && half == 0 && pair == 0) write_lse(tensors, plan, at, lse);
  }
}

}  // namespace mla::cuda::sm90
