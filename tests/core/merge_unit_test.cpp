#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cases/random.hpp"
#include "mla/error.hpp"
#include "mla/merge.hpp"

namespace mla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A partial result of T tokens and H heads over D columns, in fp32.
struct State {
  std::array<int64_t, 3> shape;
  std::vector<float> out, lse;

  State(std::array<int64_t, 3> extents, float value, float log_sum)
      : shape(extents),
        out(static_cast<size_t>(extents[0] * extents[1] * extents[2]), value),
        lse(static_cast<size_t>(extents[0] * extents[1]), log_sum) {}

  Tensor<3> out_view() { return contiguous_view(out.data(), shape); }
  TensorView<float, 2> lse_view() {
    return contiguous_view(lse.data(), std::array<int64_t, 2>{shape[0], shape[1]});
  }
  PartialState partial(LseBase base = LseBase::kNatural) {
    return {.out = out_view(), .lse = lse_view(), .lse_base = base};
  }
};

constexpr std::array<int64_t, 3> kOneRow = {1, 1, 3};

// Context-parallel ranks without keys: flashinfer-ai/flashinfer issue 4051.
TEST(MergeUnit, EmptyStatesGiveTheEmptyState) {
  for (const size_t count : {1, 2, 7}) {
    std::vector<State> states(count, State(kOneRow, kNan, -kInf));
    std::vector<PartialState> partials;
    for (State& state : states) partials.push_back(state.partial());
    State merged(kOneRow, kNan, kNan);
    merge_states(partials, merged.out_view(), merged.lse_view());
    EXPECT_THAT(merged.out, testing::Each(0.0F));
    EXPECT_THAT(merged.lse, testing::Each(-kInf));
    merge_states(partials, states[0].out_view(), states[0].lse_view());
    EXPECT_THAT(states[0].out, testing::Each(0.0F)) << "in place";
    EXPECT_THAT(states[0].lse, testing::Each(-kInf)) << "in place";
  }
}

// sgl-project/sglang issue 33064: sums 2 and 8 of values 1 and 0 must be weighed 0.2 and 0.8.
TEST(MergeUnit, WeighsStatesByTheirSumsInTheBaseOfTheMerge) {
  for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
    const auto log = [base](float x) { return base == LseBase::kTwo ? std::log2(x) : std::log(x); };
    State a(kOneRow, 1, log(2));
    State b(kOneRow, 0, log(8));
    State merged(kOneRow, kNan, kNan);
    const std::array partials = {a.partial(base), b.partial(base)};
    merge_states(partials, merged.out_view(), merged.lse_view(), base);
    EXPECT_THAT(merged.out, testing::Each(testing::FloatNear(0.2F, 1e-7F)));
    EXPECT_FLOAT_EQ(merged.lse[0], log(10));
  }
}

TEST(MergeUnit, StateOfAnotherBaseIsRefused) {
  State a(kOneRow, 1, 0);
  State b(kOneRow, 1, 0);
  const std::array partials = {a.partial(), b.partial(LseBase::kTwo)};
  try {
    merge_states(partials, a.out_view(), a.lse_view());
    FAIL() << "not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.parts().what, "states[1].lse_base");
    EXPECT_EQ(error.parts().expected, "base e, the base of this merge");
    EXPECT_EQ(error.parts().got, "base 2");
  }
}

TEST(MergeUnit, BaseThatIsNoneIsRefused) {
  State a(kOneRow, 1, 0);
  const auto unknown = static_cast<LseBase>(7);
  const std::array partials = {a.partial(unknown)};
  try {
    merge_states(partials, a.out_view(), a.lse_view(), unknown);
    FAIL() << "not refused";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.parts().what, "base");
    EXPECT_EQ(error.parts().got, "7");
  }
}

TEST(MergeUnit, EmptyStateChangesNothingWhateverItsOutHolds) {
  State a(kOneRow, 0.3F, 1.25F);
  for (const float garbage : {kNan, kInf, 5.0F}) {
    State empty(kOneRow, garbage, -kInf);
    State merged(kOneRow, kNan, kNan);
    const std::array partials = {empty.partial(), a.partial(), empty.partial()};
    merge_states(partials, merged.out_view(), merged.lse_view());
    EXPECT_EQ(merged.out, a.out);
    EXPECT_EQ(merged.lse, a.lse);
  }
}

TEST(MergeUnit, NeitherNanNorInfinityOfOneRowReachesAnother) {
  for (const float bad : {kNan, kInf}) {
    State a({2, 2, 3}, 1, 0);
    State b({2, 2, 3}, 2, 0);
    b.lse[1] = bad;
    State merged({2, 2, 3}, kNan, kNan);
    const std::array partials = {a.partial(), b.partial()};
    merge_states(partials, merged.out_view(), merged.lse_view());
    for (size_t row = 0; row < 4; ++row) {
      EXPECT_EQ(std::isnan(merged.lse[row]), row == 1);
      EXPECT_EQ(std::isnan(merged.out[3 * row]), row == 1);
    }
  }
}

TEST(MergeUnit, SumsFarFromOneNeitherOverflowNorVanish) {
  for (const float size : {3000.0F, -3000.0F, 3e38F}) {
    State a(kOneRow, 1, size);
    State b(kOneRow, 2, size);
    State merged(kOneRow, kNan, kNan);
    const std::array partials = {a.partial(), b.partial()};
    merge_states(partials, merged.out_view(), merged.lse_view());
    EXPECT_THAT(merged.out, testing::Each(1.5F));
    EXPECT_FLOAT_EQ(merged.lse[0], size + std::log(2.0F));
  }
}

// Two tensors of the wider-than-packed kind: rows 5 of 8 columns apart, and lse rows of 4.
TEST(MergeUnit, StridesAreHonouredAndGapsStayUntouched) {
  constexpr int64_t kTokens = 2;
  constexpr int64_t kHeads = 3;
  constexpr int64_t kColumns = 5;
  const auto wide = [](std::vector<float>& data) {
    return TensorView<float, 3>{data.data(), {kTokens, kHeads, kColumns}, {8 * kHeads, 8, 1}};
  };
  const auto wide_lse = [](std::vector<float>& data) {
    return TensorView<float, 2>{data.data(), {kTokens, kHeads}, {4, 1}};
  };
  std::vector<float> from(kTokens * kHeads * 8, kNan);
  std::vector<float> from_lse(kTokens * 4, kNan);
  State packed({kTokens, kHeads, kColumns}, 0, 0);
  for (int64_t row = 0; row < kTokens * kHeads; ++row) {
    from_lse[row / kHeads * 4 + row % kHeads] = static_cast<float>(row);
    packed.lse[row] = static_cast<float>(row);
    for (int64_t c = 0; c < kColumns; ++c) {
      from[row * 8 + c] = static_cast<float>(row + c);
      packed.out[row * kColumns + c] = static_cast<float>(row + c);
    }
  }
  std::vector<float> to(from.size(), -7);
  std::vector<float> to_lse(from_lse.size(), -7);
  const std::array partials = {PartialState{.out = wide(from), .lse = wide_lse(from_lse)},
                               packed.partial()};
  merge_states(partials, wide(to), wide_lse(to_lse));
  for (int64_t row = 0; row < kTokens * kHeads; ++row) {
    for (int64_t c = 0; c < 8; ++c) {
      EXPECT_EQ(to[row * 8 + c], c < kColumns ? static_cast<float>(row + c) : -7.0F);
    }
    EXPECT_FLOAT_EQ(to_lse[row / kHeads * 4 + row % kHeads],
                    static_cast<float>(row) + std::log(2.0F));
  }
  EXPECT_EQ(to_lse[3], -7);
  EXPECT_EQ(to_lse[7], -7);
}

TEST(MergeUnit, OutputsThatOverlapPartOfAnotherTensorAreRefused) {
  State a({2, 2, 3}, 1, 0);
  State b({2, 2, 3}, 2, 0);
  std::vector<float> memory(64, 7);
  const auto values = [&](int64_t at) {
    return contiguous_view(memory.data() + at, std::array<int64_t, 3>{2, 2, 3});
  };
  const auto sums = [&](int64_t at) {
    return contiguous_view(memory.data() + at, std::array<int64_t, 2>{2, 2});
  };
  const auto refused = [](std::span<const PartialState> states, const Tensor<3>& out,
                          const TensorView<float, 2>& lse) {
    try {
      merge_states(states, out, lse);
      return std::string("nothing");
    } catch (const InvalidArgument& error) {
      return error.parts().what + " of " + error.parts().expected;
    }
  };
  const std::array own = {a.partial(), b.partial()};
  EXPECT_EQ(refused(own, values(0), sums(11)), "lse of memory apart from that of out");
  EXPECT_EQ(refused(own, values(0), sums(12)), "nothing");
  const std::array lent = {a.partial(), PartialState{.out = values(20), .lse = sums(40)}};
  EXPECT_EQ(refused(lent, values(20), sums(40)), "nothing") << "the state's very tensors";
  EXPECT_EQ(refused(lent, values(21), {}), "out of memory apart from that of states[1].out");
  EXPECT_EQ(refused(lent, values(32), {}), "out of memory apart from that of states[1].lse");
  EXPECT_EQ(refused(lent, values(0), sums(42)), "lse of memory apart from that of states[1].lse");
  EXPECT_EQ(refused(lent, values(0), sums(17)), "lse of memory apart from that of states[1].out");
}

TEST(MergeUnit, LseIsOnlyWrittenWhereItIsWanted) {
  State a(kOneRow, 1, 0);
  State merged(kOneRow, kNan, kNan);
  const std::array partials = {a.partial()};
  merge_states(partials, merged.out_view(), {});
  EXPECT_EQ(merged.out, a.out);
}

TEST(MergeUnit, NoRowsAreMergedWithoutMemory) {
  constexpr std::array<int64_t, 3> kNoRows = {0, 4, 8};
  const PartialState nothing{.out = contiguous_view<const void>(nullptr, kNoRows, DType::kFloat32),
                             .lse = {nullptr, {0, 4}, {4, 1}}};
  const std::array partials = {nothing, nothing};
  merge_states(partials, contiguous_view<void>(nullptr, kNoRows, DType::kFloat32), {});
}

TEST(MergeUnit, BadArgumentsAreNamed) {
  State good({2, 2, 3}, 1, 0);
  State other({2, 1, 3}, 1, 0);
  const auto refusal = [&](PartialState second, Tensor<3> out, TensorView<float, 2> lse) {
    const std::array partials = {good.partial(), second};
    try {
      merge_states(partials, out, lse);
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.parts().where, "merge_states");
      return error.parts().what;
    }
    return std::string("not refused");
  };
  const Tensor<3> out = good.out_view();
  const TensorView<float, 2> lse = good.lse_view();
  EXPECT_EQ(refusal(good.partial(), out, lse), "not refused");
  EXPECT_EQ(refusal(other.partial(), out, lse), "states[1].out.shape");
  PartialState state = good.partial();
  state.lse.shape[1] = 3;
  EXPECT_EQ(refusal(state, out, lse), "states[1].lse.shape");
  state = good.partial();
  state.lse.data = nullptr;
  EXPECT_EQ(refusal(state, out, lse), "states[1].lse.data");
  state = good.partial();
  state.out.data = nullptr;
  EXPECT_EQ(refusal(state, out, lse), "states[1].out.data");
  state = good.partial();
  state.out.dtype = DType::kInt32;
  EXPECT_EQ(refusal(state, out, lse), "states[1].out.dtype");
  state = good.partial();
  state.out.stride[2] = 2;
  EXPECT_EQ(refusal(state, out, lse), "states[1].out.stride[2]");
  state = good.partial();
  state.out.stride[1] = -3;
  EXPECT_EQ(refusal(state, out, lse), "states[1].out.stride[1]");
  state = good.partial();
  state.out.device = {DeviceKind::kCuda, 0};
  EXPECT_EQ(refusal(state, out, lse), "states[1].out.device");
  Tensor<3> overlapping = out;
  overlapping.stride[1] = 2;
  EXPECT_EQ(refusal(good.partial(), overlapping, lse), "out.stride[1]");
  TensorView<float, 2> overlapping_lse = lse;
  overlapping_lse.stride = {1, 1};
  EXPECT_EQ(refusal(good.partial(), out, overlapping_lse), "lse.stride[0]");
  EXPECT_THROW(merge_states({}, out, lse), InvalidArgument);
}

// Many states of any dtype against sums in long double, whichever tensor takes the result.
template <class T>
void check_against_long_double(uint64_t seed, size_t num_states, DType dtype, double bound) {
  constexpr std::array<int64_t, 3> kShape = {3, 2, 300};  // wider than one block of columns
  constexpr int64_t kRows = kShape[0] * kShape[1];
  std::vector<std::vector<T>> outs(num_states, std::vector<T>(kRows * kShape[2]));
  std::vector<std::vector<float>> lses(num_states, std::vector<float>(kRows));
  std::vector<PartialState> partials;
  for (size_t i = 0; i < num_states; ++i) {
    cases::fill_uniform(cases::row_key(seed, i, 0), dtype, outs[i].data(), kRows * kShape[2]);
    cases::fill_uniform(cases::row_key(seed, i, 1), DType::kFloat32, lses[i].data(), kRows);
    for (float& lse : lses[i]) lse = lse > 0.8F ? -kInf : 20 * lse;
    partials.push_back({.out = contiguous_view<const T>(outs[i].data(), kShape),
                        .lse = {lses[i].data(), {kShape[0], kShape[1]}, {kShape[1], 1}}});
  }
  std::vector<double> expected(kRows * kShape[2]);
  std::vector<double> expected_lse(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<long double> weights(num_states);
    long double total = 0;
    for (size_t i = 0; i < num_states; ++i) {
      weights[i] = std::exp(static_cast<long double>(lses[i][row]));
      total += weights[i];
    }
    expected_lse[row] = static_cast<double>(std::log(total));
    for (int64_t c = 0; c < kShape[2]; ++c) {
      long double sum = 0;
      for (size_t i = 0; i < num_states; ++i) {
        sum += weights[i] * static_cast<float>(outs[i][row * kShape[2] + c]);
      }
      expected[row * kShape[2] + c] = total > 0 ? static_cast<double>(sum / total) : 0.0;
    }
  }
  Executor executor(3);
  const size_t target = seed % num_states;  // in place of any of them
  merge_states(partials, contiguous_view(outs[target].data(), kShape),
               contiguous_view(lses[target].data(), std::array<int64_t, 2>{kShape[0], kShape[1]}),
               LseBase::kNatural, &executor);
  for (int64_t row = 0; row < kRows; ++row) {
    if (std::isinf(expected_lse[row])) {
      EXPECT_EQ(lses[target][row], -kInf);
    } else {
      ASSERT_NEAR(lses[target][row], expected_lse[row], 2e-6);
    }
    for (int64_t c = 0; c < kShape[2]; ++c) {
      const int64_t at = row * kShape[2] + c;
      ASSERT_NEAR(static_cast<float>(outs[target][at]), expected[at], bound) << "seed " << seed;
    }
  }
}

TEST(MergeProperty, ManyStatesEqualOneSumOverAll) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const size_t num_states = 1 + seed % 5 * (seed % 7) * 9;
    check_against_long_double<float>(seed, num_states, DType::kFloat32, 1e-7);
    check_against_long_double<BFloat16>(seed, num_states, DType::kBFloat16, 0x1p-9 + 1e-7);
    check_against_long_double<Float16>(seed, num_states, DType::kFloat16, 0x1p-12 + 1e-7);
  }
}

TEST(MergeProperty, ThreadsDoNotChangeTheBits) {
  constexpr std::array<int64_t, 3> kShape = {64, 8, 256};
  State a(kShape, 0, 0);
  State b(kShape, 0, 0);
  for (State* state : {&a, &b}) {
    const uint64_t key = cases::row_key(5, state == &a ? 0 : 1, 0);
    cases::fill_uniform(key, DType::kFloat32, state->out.data(),
                        static_cast<int64_t>(state->out.size()));
    cases::fill_uniform(~key, DType::kFloat32, state->lse.data(),
                        static_cast<int64_t>(state->lse.size()));
  }
  const std::array partials = {a.partial(), b.partial()};
  State alone(kShape, kNan, kNan);
  merge_states(partials, alone.out_view(), alone.lse_view());
  for (const int threads : {1, 2, 5}) {
    Executor executor(threads);
    State merged(kShape, kNan, kNan);
    merge_states(partials, merged.out_view(), merged.lse_view(), LseBase::kNatural, &executor);
    EXPECT_EQ(merged.out, alone.out);
    EXPECT_EQ(merged.lse, alone.lse);
  }
}

}  // namespace
}  // namespace mla
