#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "mla/dtype.hpp"
#include "mla/merge.hpp"

namespace mla::cpu {

/// One partial result of one row: normalised output [columns] and log-sum-exp.
struct PartialRow {
  const void* out = nullptr;
  DType dtype = DType::kFloat32;
  float lse = 0;
};

namespace detail {

inline constexpr int64_t kMergeColumns = 256;  // 2 KiB of doubles on the stack

template <class T>
void add_weighted(double weight, const void* values, int64_t begin, int64_t count, double* sum) {
  const T* from = static_cast<const T*>(values) + begin;
  for (int64_t c = 0; c < count; ++c) {
    sum[c] += weight * static_cast<double>(static_cast<float>(from[c]));
  }
}

template <class T>
void store(const double* values, int64_t begin, int64_t count, void* out) {
  T* to = static_cast<T*>(out) + begin;
  for (int64_t c = 0; c < count; ++c) to[c] = T(static_cast<float>(values[c]));
}

inline void add_weighted(double weight, const PartialRow& part, int64_t begin, int64_t count,
                         double* sum) {
  switch (part.dtype) {
    case DType::kBFloat16:
      return add_weighted<BFloat16>(weight, part.out, begin, count, sum);
    case DType::kFloat16:
      return add_weighted<Float16>(weight, part.out, begin, count, sum);
    default:
      return add_weighted<float>(weight, part.out, begin, count, sum);
  }
}

inline void store(const double* values, DType dtype, int64_t begin, int64_t count, void* out) {
  switch (dtype) {
    case DType::kBFloat16:
      return store<BFloat16>(values, begin, count, out);
    case DType::kFloat16:
      return store<Float16>(values, begin, count, out);
    default:
      return store<float>(values, begin, count, out);
  }
}

}  // namespace detail

/// Merges the partial results of one row over disjoint parts of its keys, in double, in the order
/// of the parts: the same parts give the same bits. `part(i)` is the PartialRow of part i.
///
/// A part with lse -inf is left out, whatever its out holds; with no other part the row is zero
/// and the result -inf. An lse of NaN or +inf has no weight that could be right: the row and the
/// result become NaN. `out` [columns] may be the very memory of one of the parts.
/// Returns the merged lse in `base`, the base of the parts. Allocates nothing.
template <class Part>
float merge_row(int64_t num_parts, const Part& part, LseBase base, int64_t columns, DType dtype,
                void* out) {
  const auto power = [base](double x) {
    return base == LseBase::kTwo ? std::exp2(x) : std::exp(x);
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double largest = -kInfinity;
  for (int64_t i = 0; i < num_parts; ++i) {
    const double lse = part(i).lse;
    largest = lse > largest || std::isnan(lse) ? lse : largest;
    if (std::isnan(largest)) break;
  }
  const bool is_empty = largest == -kInfinity;
  double total = 0;
  for (int64_t i = 0; i < num_parts && !is_empty; ++i) total += power(part(i).lse - largest);

  double sum[detail::kMergeColumns];
  for (int64_t begin = 0; begin < columns; begin += detail::kMergeColumns) {
    const int64_t count = std::min(detail::kMergeColumns, columns - begin);
    std::fill_n(sum, count, 0.0);
    for (int64_t i = 0; i < num_parts; ++i) {
      const PartialRow row = part(i);
      if (row.lse == -kInfinity) continue;
      // Once a part and block of columns: cheaper than room for the weights of any many parts.
      detail::add_weighted(power(row.lse - largest) / total, row, begin, count, sum);
    }
    detail::store(sum, dtype, begin, count, out);
  }
  if (is_empty) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(largest + (base == LseBase::kTwo ? std::log2(total) : std::log(total)));
}

}  // namespace mla::cpu
