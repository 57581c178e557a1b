#pragma once

// Numbers in vectors of fp32: conversions from and to the dtypes of tensors, and the exponential.
// For attention-inl.hpp.

#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "mla/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using IntTag = hn::RebindToSigned<FloatTag>;
using WordTag = hn::RebindToUnsigned<FloatTag>;
using Vec = hn::Vec<FloatTag>;
constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(FloatTag()));

// Columns are widened and narrowed two vectors at a time. Of bf16, the even columns of the pair
// come first and then the odd ones: that takes one instruction a vector, where the order of memory
// takes two. Queries, keys and outputs all lie so in the working memory, and writing restores the
// order.
struct VecPair {
  Vec first;
  Vec second;
};
constexpr int32_t kPair = 2 * kLanes;

HWY_INLINE VecPair widen(const float* from) {
  return {hn::LoadU(FloatTag(), from), hn::LoadU(FloatTag(), from + kLanes)};
}
HWY_INLINE void narrow(VecPair values, float* to) {
  hn::StoreU(values.first, FloatTag(), to);
  hn::StoreU(values.second, FloatTag(), to + kLanes);
}

#if HWY_TARGET == HWY_SCALAR  // Highway's conversions of one lane truncate; its fp16 knows no NaN
template <class T>
HWY_INLINE VecPair widen(const T* from) {
  return {hn::Set(FloatTag(), static_cast<float>(from[0])),
          hn::Set(FloatTag(), static_cast<float>(from[1]))};
}
template <class T>
HWY_INLINE void narrow(VecPair values, T* to) {
  to[0] = T(hn::GetLane(values.first));
  to[1] = T(hn::GetLane(values.second));
}
HWY_INLINE void restore_order(VecPair values, const BFloat16*, float* to) { narrow(values, to); }
#else
HWY_INLINE VecPair split_words(hn::Vec<hn::Repartition<uint16_t, FloatTag> > halves) {
  const WordTag words;
  const auto both = hn::BitCast(words, halves);
  return {hn::BitCast(FloatTag(), hn::ShiftLeft<16>(both)),
          hn::BitCast(FloatTag(), hn::And(both, hn::Set(words, 0xffff0000U)))};
}
HWY_INLINE VecPair widen(const BFloat16* from) {
  const hn::Repartition<uint16_t, FloatTag> halves;
  return split_words(hn::LoadU(halves, reinterpret_cast<const uint16_t*>(from)));
}
// Half a pair, then zeros.
HWY_INLINE VecPair widen_half(const BFloat16* from) {
  const hn::Repartition<uint16_t, FloatTag> halves;
  const hn::Half<decltype(halves)> half;
  const auto loaded = hn::LoadU(half, reinterpret_cast<const uint16_t*>(from));
  return split_words(hn::ZeroExtendVector(halves, loaded));
}

// Highway cuts fp32 to bf16; this rounds to nearest even and keeps NaN. The result is in the upper
// half of each word, the lower half is of no use.
HWY_INLINE hn::Vec<WordTag> round_to_bf16(Vec value) {
  const WordTag words;
  const auto bits = hn::BitCast(words, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1U));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(words, 0x7fffU)), odd);
  const auto quiet = hn::Or(bits, hn::Set(words, 0x00400000U));
  return hn::IfThenElse(hn::RebindMask(words, hn::IsNaN(value)), quiet, rounded);
}

HWY_INLINE void narrow(VecPair values, BFloat16* to) {
  const hn::Repartition<uint16_t, FloatTag> halves;
  const auto even = hn::ShiftRight<16>(round_to_bf16(values.first));
  const auto odd = hn::And(round_to_bf16(values.second), hn::Set(WordTag(), 0xffff0000U));
  hn::StoreU(hn::BitCast(halves, hn::Or(even, odd)), halves, reinterpret_cast<uint16_t*>(to));
}
HWY_INLINE void restore_order(VecPair values, const BFloat16*, float* to) {
  hn::StoreInterleaved2(values.first, values.second, FloatTag(), to);
}

HWY_INLINE VecPair widen(const Float16* from) {
  const hn::Rebind<uint16_t, FloatTag> bits;
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  const auto half = [&](const Float16* at) HWY_ATTR {
    const auto loaded = hn::LoadU(bits, reinterpret_cast<const uint16_t*>(at));
    return hn::PromoteTo(FloatTag(), hn::BitCast(tag, loaded));
  };
  return {half(from), half(from + kLanes)};
}

HWY_INLINE void narrow(VecPair values, Float16* to) {  // the hardware's: to nearest even
  const hn::Rebind<uint16_t, FloatTag> bits;
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  auto* halves = reinterpret_cast<uint16_t*>(to);
  hn::StoreU(hn::BitCast(bits, hn::DemoteTo(tag, values.first)), bits, halves);
  hn::StoreU(hn::BitCast(bits, hn::DemoteTo(tag, values.second)), bits, halves + kLanes);
}
#endif
template <class T>
HWY_INLINE void restore_order(VecPair values, const T*, float* to) {
  narrow(values, to);
}

// The first `count` elements, then zeros; reads no others.
template <class T>
HWY_INLINE VecPair widen_first(const T* from, int32_t count) {
  if (count >= kPair) return widen(from);
#if HWY_TARGET != HWY_SCALAR
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (count == kLanes) return widen_half(from);  // 16 rope columns, say
  }
#endif
  T padded[kPair] = {};
  for (int32_t i = 0; i < count; ++i) padded[i] = from[i];
  return widen(padded);
}

HWY_INLINE void store_pair(VecPair values, float* to) {
  hn::Store(values.first, FloatTag(), to);
  hn::Store(values.second, FloatTag(), to + kLanes);
}

// e^x to 2^-23 for x <= 0 or a rounding error above it (which for scores beyond 2^24 is more than
// 1; above 64 it is cut, so that even the largest scores give numbers). 0 below -87, where fp32 has
// no normal numbers left; exactly 1 at 0; NaN stays NaN.
HWY_INLINE Vec exp_near_zero(Vec x) {
  const FloatTag d;
  const Vec limit = hn::Set(d, 92.0F);
  const Vec scaled = hn::Mul(x, hn::Set(d, 1.44269504F));
  const Vec y = hn::IfThenElse(hn::Gt(scaled, limit), limit, scaled);
  const Vec n = hn::Round(y);
  const Vec f = hn::Sub(y, n);  // [-0.5, 0.5]; the polynomial is 2^f to 2e-9, exact at 0
  Vec p = hn::MulAdd(hn::Set(d, 1.5353354683611542e-4F), f, hn::Set(d, 1.339887734502554e-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 9.618437848985195e-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5503323674201965e-2F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022647738456726F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.6931471824645996F));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0F));
  const auto exponent = hn::Add(hn::ConvertTo(IntTag(), n), hn::Set(IntTag(), 127));
  const Vec power = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  return hn::IfThenZeroElse(hn::Lt(y, hn::Set(d, -126.0F)), hn::Mul(p, power));
}

}  // namespace mla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
