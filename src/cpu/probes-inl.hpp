// Loops that run into one limit of the machine each, in the instruction set of the including file
// (see attention-inl.hpp).

#include <cstddef>
#include <cstdint>

#include "cpu/simd_impls.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Independent fp32 multiply-adds in registers alone: 12 chains hide a latency of 4 cycles on up to
// three units. Returns the flop done.
double multiply_add_probe(int64_t rounds, float* sink) {
  constexpr int kChains = 12;
  const hn::ScalableTag<float> d;
  hn::Vec<decltype(d)> chain[kChains];
  HWY_UNROLL(12)
  for (int i = 0; i < kChains; ++i) chain[i] = hn::Set(d, static_cast<float>(i));
  const auto factor = hn::Set(d, 0.5F);
  const auto term = hn::Set(d, *sink);
  for (int64_t round = 0; round < rounds; ++round) {
    HWY_UNROLL(12)
    for (int i = 0; i < kChains; ++i) {
      chain[i] = hn::MulAdd(chain[i], factor, term);
    }
  }
  auto all = hn::Zero(d);
  HWY_UNROLL(12)
  for (int i = 0; i < kChains; ++i) all = hn::Add(all, chain[i]);
  *sink = hn::GetLane(all);
  constexpr auto kLanesOfProbe = static_cast<double>(hn::MaxLanes(d));
  return 2.0 * kChains * kLanesOfProbe * static_cast<double>(rounds);
}

// Reads `count` floats (a multiple of 128) once.
void read_probe(const float* from, int64_t count, float* sink) {
  constexpr int kStreams = 8;
  const hn::ScalableTag<float> d;
  constexpr auto kStep = static_cast<int64_t>(hn::MaxLanes(d));
  hn::Vec<decltype(d)> sum[kStreams];
  HWY_UNROLL(8)
  for (int i = 0; i < kStreams; ++i) sum[i] = hn::Zero(d);
  for (int64_t at = 0; at < count; at += kStreams * kStep) {
    HWY_UNROLL(8)
    for (int i = 0; i < kStreams; ++i) {
      sum[i] = hn::Add(sum[i], hn::Load(d, from + at + i * kStep));
    }
  }
  auto all = hn::Zero(d);
  HWY_UNROLL(8)
  for (int i = 0; i < kStreams; ++i) all = hn::Add(all, sum[i]);
  *sink = hn::GetLane(all);
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
