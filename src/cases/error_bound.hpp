#pragma once

#include "mla/geometry.hpp"
#include "mla/reference.hpp"

namespace mla::cases {

/// How far one row of a kernel may be from the reference.
struct ErrorBound {
  double arithmetic = 0;  ///< of each output value before it is rounded to the output's dtype
  double lse = 0;         ///< of the natural LSE
};

/// The bound of a row, from what the reference saw in it (L = the largest |ckv| that the row
/// attends to, S = its largest |score|):
///
/// arithmetic = 1e-5 L + probabilities L + scores L
///   1e-5           fp32 accumulation of scores, softmax and output (the contract's figure)
///   probabilities  for a kernel that feeds probabilities to tensor cores in 16 bits: each weight
///                  is off by half an ulp at most and the weights sum to 1, so 2^-8 (bf16) or
///                  2^-11 (fp16). Kernels of the CPU keep them in fp32: 0
///   scores         0 up to S = 32. Above it fp32 can not hold a score to 1e-5: an error of two
///                  units in the last place, e = 2 ulp(S), in every score changes every weight by
///                  a factor within exp(+-e) and their sum too, so 2 e
/// lse = 1e-5 (fp32) or 1e-4 (16 bits) + 2 ulp(S)
ErrorBound error_bound(const Geometry& geometry, const ReferenceRow& row,
                       double probability_rounding = 0);

/// What rounding probabilities to a kernel's dtype adds: half an ulp below 1 in 16 bits, else 0.
double probability_rounding(DType dtype, bool rounds_probabilities);

/// The bound of one output value: the arithmetic and half a unit in the last place, of the output's
/// dtype, at the largest value that the arithmetic may give. bf16 has 8 significant bits, so this
/// is at most 2^-8 of the value (fp16 11 bits, 2^-11, and 2^-25 below its normal range); nothing
/// for fp32, whose rounding is part of the 1e-5.
double value_bound(const ErrorBound& bound, DType dtype, double expected);

}  // namespace mla::cases
