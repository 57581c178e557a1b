#include <climits>
#include <cmath>
#include <functional>
#include <limits>

#include "cases/problem.hpp"
#include "contract/contract.hpp"
#include "mla/error.hpp"

// Bad input: refused before anything runs, by a message that names the argument, the entry, what
// was expected and what came; the previous plan stays in force.
namespace mla::contract {
namespace {

using cases::Problem;

// What a call refuses, "" where it does not.
ErrorParts refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), error.parts().where + ": " + error.parts().what +
                                             ": expected " + error.parts().expected + ", got " +
                                             error.parts().got);
    return error.parts();
  }
  return {};
}

AttentionConfig good_config() {
  return {.geometry = {.num_heads = 2,
                       .kv_lora_rank = 16,
                       .qk_rope_head_dim = 8,
                       .page_size = 4,
                       .dtype = DType::kFloat32,
                       .kv_dtype = DType::kFloat32},
          .num_pages = 10,
          .limits = {.max_rows = 3, .max_tokens = 8, .max_listed_pages = 12}};
}

struct ConfigFault {
  std::function<void(AttentionConfig&)> spoil;
  std::string what, expected, got;
};

TEST(ArgumentContract, CreationNamesWhatItRefuses) {
  using Config = AttentionConfig;
  const std::vector<ConfigFault> faults = {
      {[](Config& c) { c.geometry.num_heads = 0; }, "geometry.num_heads", "1 to 1024", "0"},
      {[](Config& c) { c.geometry.num_heads = -4; }, "geometry.num_heads", "1 to 1024", "-4"},
      {[](Config& c) { c.geometry.num_heads = 1025; }, "geometry.num_heads", "1 to 1024", "1025"},
      {[](Config& c) { c.geometry.kv_lora_rank = 0; }, "geometry.kv_lora_rank", "1 to 8192", "0"},
      {[](Config& c) { c.geometry.qk_rope_head_dim = -1; }, "geometry.qk_rope_head_dim",
       "0 to 8191", "-1"},
      {[](Config& c) { c.geometry.kv_lora_rank = 8185; },
       "geometry.kv_lora_rank + qk_rope_head_dim", "1 to 8192", "8193"},
      {[](Config& c) { c.geometry.page_size = 0; }, "geometry.page_size", "1 to 2147483647", "0"},
      // ikawrakow/ik_llama.cpp PR 1641: unsupported cache types ended in NaN or an abort.
      {[](Config& c) { c.geometry.kv_dtype = DType::kBFloat16; }, "geometry.dtype and kv_dtype",
       "one of the pairs fp32/fp32, bf16/bf16, fp16/fp16", "fp32/bf16"},
      {[](Config& c) { c.geometry.dtype = c.geometry.kv_dtype = DType::kInt32; },
       "geometry.dtype and kv_dtype", "one of the pairs fp32/fp32, bf16/bf16, fp16/fp16",
       "int32/int32"},
      {[](Config& c) { c.num_pages = -1; }, "num_pages", "0 to 2147483647", "-1"},
      {[](Config& c) { c.limits.max_rows = (1 << 20) + 1; }, "limits.max_rows", "0 to 1048576",
       "1048577"},
      {[](Config& c) { c.limits.max_tokens = int64_t{INT_MAX} + 1; }, "limits.max_tokens",
       "0 to 2147483647", "2147483648"},
      {[](Config& c) { c.limits.max_listed_pages = -1; }, "limits.max_listed_pages",
       "0 to 2147483647", "-1"},
      {[](Config& c) { c.bucket = Bucket{.num_rows = -1}; }, "bucket.num_rows", "1 to 1048576",
       "-1"},
      // Half a bucket.
      {[](Config& c) { c.bucket = Bucket{.num_rows = 4}; }, "bucket.num_tokens", "1 to 2147483647",
       "0"},
      {[](Config& c) { c.bucket = Bucket{.num_tokens = 4}; }, "bucket.num_rows", "1 to 1048576",
       "0"},
      {[](Config& c) { c.bucket = Bucket{.num_rows = 1, .num_tokens = int64_t{INT_MAX} + 1}; },
       "bucket.num_tokens", "1 to 2147483647", "2147483648"},
      {[](Config& c) { c.splits.forced_count = 257; }, "splits.forced_count", "0 to 256", "257"},
      {[](Config& c) { c.splits.fixed_tokens = -5; }, "splits.fixed_tokens", "0 to 2147483647",
       "-5"},
      {[](Config& c) { c.splits = {.fixed_tokens = 64, .forced_count = 2}; }, "splits",
       "fixed_tokens or forced_count, not both", "64 and 2"},
      {[](Config& c) {
         c.strides = CacheStrides{96, 15, 96, 24};
       },
       "strides.ckv_row", "at least 16, the row's width", "15"},
      {[](Config& c) {
         c.strides = CacheStrides{96, 24, 96, 7};
       },
       "strides.kpe_row", "at least 8, the row's width", "7"},
      {[](Config& c) {
         c.device = {DeviceKind::kCuda, 1};
       },
       "device", "cpu", "cuda:1"},
      {[](Config& c) { c.capture = true; }, "capture", "false", "true"},
      // The kernel's own name is what a user mistypes.
      {[](Config& c) { c.kernel = "sm90"; }, "kernel", "", "no kernel \"sm90\""},
  };
  PagedAttention good(good_config());
  for (const ConfigFault& fault : faults) {
    AttentionConfig config = good_config();
    fault.spoil(config);
    const ErrorParts parts = refusal_of([&] { PagedAttention attention(config); });
    EXPECT_EQ(parts.what, fault.what);
    EXPECT_NE(parts.expected.find(fault.expected), std::string::npos) << parts.expected;
    EXPECT_NE(parts.got.find(fault.got), std::string::npos) << parts.got;
    EXPECT_EQ(refusal_of([&] { PagedAttention::scratch_bytes(config); }).what, fault.what);
  }
}

TEST(ArgumentContract, StridesThatNoMemoryHasAreRefused) {
  AttentionConfig config = good_config();
  config.strides = pool_strides(config.geometry);
  config.strides->ckv_page = int64_t{1} << 60;
  EXPECT_EQ(refusal_of([&] { PagedAttention attention(config); }).what, "strides.ckv_page");
  config.strides->ckv_page = -1;
  EXPECT_EQ(refusal_of([&] { PagedAttention attention(config); }).what, "strides.ckv_page");
  config.strides = pool_strides(config.geometry);
  config.strides->kpe_row = INT64_MAX;
  EXPECT_NE(refusal_of([&] { PagedAttention attention(config); }).what, "");
}

TEST(ArgumentContract, TheLargestLimitsAreTakenOrRefusedWithNumbers) {
  AttentionConfig config = good_config();
  config.geometry = {
      .num_heads = 1024, .kv_lora_rank = 8192, .qk_rope_head_dim = 0, .page_size = 1};
  config.num_pages = kMaxPoolPages;
  config.limits = {
      .max_rows = kMaxRows, .max_tokens = kMaxTokens, .max_listed_pages = kMaxListedPages};
  for (const SplitPolicy splits :
       {SplitPolicy{}, SplitPolicy{.forced_count = kMaxSplits}, SplitPolicy{.fixed_tokens = 1}}) {
    config.splits = splits;
    // 2^31 tokens of 1024 heads in 256 parts of 8192 columns are 2^64 bytes: no wrapped number.
    const ErrorParts parts = refusal_of([&] {
      const size_t bytes = PagedAttention::scratch_bytes(config);
      EXPECT_GE(bytes, PagedAttention::scratch_bytes(good_config()));
    });
    const bool has_number = parts.got.find_first_of("123456789") != std::string::npos;
    EXPECT_TRUE(parts.what.empty() || has_number) << parts.got;
  }
}

TEST(ArgumentContract, SupportsGivesTheReasonAndNeverThrows) {
  Geometry geometry = good_config().geometry;
  EXPECT_TRUE(supports(geometry));
  geometry.num_heads = 0;
  EXPECT_FALSE(supports(geometry));
  EXPECT_EQ(supports(geometry).reason, "num_heads: expected 1 to 1024, got 0");
  geometry = good_config().geometry;
  geometry.kv_dtype = DType::kFloat16;
  EXPECT_NE(supports(geometry).reason.find("fp32/fp32, bf16/bf16, fp16/fp16"), std::string::npos);
  EXPECT_NE(supports(good_config().geometry, {DeviceKind::kCuda, 0}).reason, "");
  EXPECT_NE(supports(good_config().geometry, {}, {}, "none such").reason.find("none such"),
            std::string::npos);
  EXPECT_FALSE(supports(good_config().geometry).capturable);
}

// A batch whose arrays can be spoilt one at a time.
struct Arrays {
  std::vector<int32_t> qo_indptr = {0, 2, 3};
  std::vector<int32_t> kv_indptr = {0, 2, 3};
  std::vector<int32_t> kv_indices = {4, 9, 0};
  std::vector<int32_t> kv_len = {8, 1};
  std::vector<int32_t> kv_last_page_len;
  float sm_scale = 0.5F;

  Batch batch() const {
    return {.qo_indptr = qo_indptr,
            .kv_indptr = kv_indptr,
            .kv_indices = kv_indices,
            .kv_len = kv_len,
            .kv_last_page_len = kv_last_page_len};
  }
};

struct PlanFault {
  std::function<void(Arrays&)> spoil;
  std::string what, expected, got;
};

const std::vector<PlanFault>& plan_faults() {
  static const std::vector<PlanFault> kFaults = {
      // sgl-project/sglang issue 5678: a qo_indptr that decreases.
      {[](Arrays& a) {
         a.qo_indptr = {0, 7, 6};
       },
       "qo_indptr[2]", "at least 7", "6"},
      {[](Arrays& a) {
         a.qo_indptr = {0, INT_MAX, INT_MIN};
       },
       "qo_indptr[2]", "", "-2147483648"},
      {[](Arrays& a) { a.qo_indptr[0] = 1; }, "qo_indptr[0]", "0", "1"},
      {[](Arrays& a) { a.qo_indptr[0] = -1; }, "qo_indptr[0]", "0", "-1"},
      {[](Arrays& a) { a.qo_indptr.clear(); }, "qo_indptr.size()", "at least 1", "0"},
      {[](Arrays& a) {
         a.kv_indptr = {0, 3, 2};
       },
       "kv_indptr[2]", "at least 3", "2"},
      {[](Arrays& a) { a.kv_indptr[0] = 1; }, "kv_indptr[0]", "0", "1"},
      {[](Arrays& a) { a.kv_indptr.pop_back(); }, "kv_indptr.size()", "3", "2"},
      {[](Arrays& a) { a.kv_indices.pop_back(); }, "kv_indices.size()", "at least 3", "2"},
      {[](Arrays& a) { a.kv_len[0] = 9; }, "kv_len[0]", "0 to 8", "9"},
      {[](Arrays& a) { a.kv_len[1] = -1; }, "kv_len[1]", "0 to 4", "-1"},
      {[](Arrays& a) { a.kv_len[1] = INT_MAX; }, "kv_len[1]", "0 to 4", "2147483647"},
      {[](Arrays& a) { a.kv_len.pop_back(); }, "kv_len.size()", "2", "1"},
      {[](Arrays& a) { a.kv_len.clear(); }, "kv_len", "2", "0"},
      {[](Arrays& a) {
         a.kv_last_page_len = {4, 1};
       },
       "kv_len and kv_last_page_len", "one", "both"},
      {[](Arrays& a) {
         a.kv_len.clear(), a.kv_last_page_len = {5, 1};
       },
       "kv_last_page_len[0]", "1 to 4", "5"},
      {[](Arrays& a) {
         a.kv_len.clear(), a.kv_last_page_len = {4, 0};
       },
       "kv_last_page_len[1]", "1 to 4", "0"},
      {[](Arrays& a) { a.kv_indices[1] = 10; }, "kv_indices[1]", "0 to 9", "10"},
      {[](Arrays& a) { a.kv_indices[2] = -1; }, "kv_indices[2]", "0 to 9", "-1"},
      {[](Arrays& a) { a.kv_indices[0] = INT_MIN; }, "kv_indices[0]", "0 to 9", "-2147483648"},
      // sgl-project/sglang PR 38590: buffers for 14 rows took a batch of 16.
      {[](Arrays& a) {
         a.qo_indptr = {0, 1, 2, 3, 4}, a.kv_indptr = {0, 0, 0, 0, 0}, a.kv_len = {0, 0, 0, 0};
       },
       "rows", "at most 3", "4"},
      {[](Arrays& a) {
         a.qo_indptr = {0, 2, 9};
       },
       "query tokens", "at most 8", "9"},
      {[](Arrays& a) {
         a.kv_indptr = {0, 2, 13}, a.kv_indices.resize(13);
       },
       "listed pages", "at most 12", "13"},
      // vllm-project/vllm PR 41569: a scale of the library's own making.
      {[](Arrays& a) { a.sm_scale = std::nanf(""); }, "sm_scale", "finite", "NaN"},
      {[](Arrays& a) { a.sm_scale = 0; }, "sm_scale", "above 0", "0"},
      {[](Arrays& a) { a.sm_scale = -0.5F; }, "sm_scale", "above 0", "-0.5"},
      {[](Arrays& a) { a.sm_scale = std::numeric_limits<float>::infinity(); }, "sm_scale", "finite",
       "inf"},
  };
  return kFaults;
}

// Kernels go by steps of keys, in 32 bits: the last keys of that range are refused.
TEST(ArgumentContract, ARequestHasAtMost2147482624Keys) {
  constexpr int32_t kHalf = 1 << 30;
  AttentionConfig config = good_config();
  config.geometry.page_size = kHalf;
  PagedAttention attention(config);
  const std::array<int32_t, 2> qo_indptr{0, 1}, kv_indptr{0, 2}, pages{0, 0};
  const auto plan = [&](int32_t kv_len) {
    const std::array kv_lens{kv_len};
    attention.plan(
        {.qo_indptr = qo_indptr, .kv_indptr = kv_indptr, .kv_indices = pages, .kv_len = kv_lens},
        {.sm_scale = 1});
  };
  plan(INT32_MAX - 1023);
  const ErrorParts parts = refusal_of([&] { plan(INT32_MAX - 1022); });
  EXPECT_EQ(parts.what, "kv_len[0]");
  EXPECT_EQ(parts.expected, "at most 2147482624");
  EXPECT_EQ(parts.got, "2147482625");
}

TEST(ArgumentContract, PlanNamesTheEntryAndThePreviousPlanStays) {
  PagedAttention attention(good_config());
  Problem problem({.geometry = good_config().geometry,
                   .q_lens = {2, 1},
                   .kv_lens = {8, 1},
                   .pages = {4, 9, 0},
                   .pool_pages = 10});
  const Arrays good;
  attention.plan(good.batch(), {.sm_scale = good.sm_scale});
  problem.run(attention);
  const std::vector<float> expected = problem.packed_out();
  const PlanInfo info = attention.info();
  for (const PlanFault& fault : plan_faults()) {
    Arrays bad;
    fault.spoil(bad);
    const ErrorParts parts =
        refusal_of([&] { attention.plan(bad.batch(), {.sm_scale = bad.sm_scale}); });
    EXPECT_EQ(parts.where, "PagedAttention::plan");
    EXPECT_EQ(parts.what.substr(0, fault.what.size()), fault.what);
    EXPECT_NE(parts.expected.find(fault.expected), std::string::npos) << parts.expected;
    EXPECT_NE(parts.got.find(fault.got), std::string::npos) << fault.what << " " << parts.got;
    problem.spoil_outputs();
    problem.run(attention);
    ASSERT_EQ(problem.packed_out(), expected) << "after " << fault.what;
    EXPECT_EQ(attention.info().num_tiles, info.num_tiles);
    EXPECT_EQ(attention.kv_len_buf().data[0], 8);
  }
}

TEST(ArgumentContract, PlanWithoutScaleIsRefused) {
  PagedAttention attention(good_config());
  const Arrays good;
  EXPECT_EQ(refusal_of([&] { attention.plan(good.batch(), {}); }).what, "sm_scale");
}

TEST(ArgumentContract, PlanInNoKnownLseBaseIsRefused) {
  PagedAttention attention(good_config());
  const Arrays good;
  const ErrorParts parts = refusal_of(
      [&] { attention.plan(good.batch(), {.sm_scale = 1, .lse_base = static_cast<LseBase>(7)}); });
  EXPECT_EQ(parts.what, "lse_base");
  EXPECT_EQ(parts.got, "7");
}

TEST(ArgumentContract, LentScratchThatIsNotThereIsRefused) {
  AttentionConfig config = good_config();
  config.scratch = {static_cast<std::byte*>(nullptr), PagedAttention::scratch_bytes(config)};
  const ErrorParts parts = refusal_of([&] { PagedAttention attention(config); });
  EXPECT_EQ(parts.what, "scratch.data()");
  EXPECT_EQ(parts.got, "null");
}

TEST(ArgumentContract, BucketsCapacityIsNamed) {
  AttentionConfig config = good_config();
  config.bucket = Bucket{.num_rows = 1, .num_tokens = 8};
  PagedAttention rows(config);
  const Arrays good;
  EXPECT_NE(refusal_of([&] {
              rows.plan(good.batch(), {.sm_scale = 1});
            }).expected.find("1 = bucket.num_rows"),
            std::string::npos);
  config.bucket = Bucket{.num_rows = 8, .num_tokens = 2};
  PagedAttention tokens(config);
  EXPECT_NE(refusal_of([&] {
              tokens.plan(good.batch(), {.sm_scale = 1});
            }).expected.find("2 = bucket.num_tokens"),
            std::string::npos);
}

struct RunFault {
  std::function<void(RunArgs&)> spoil;
  std::string what, expected, got;
};

// flashinfer-ai/flashinfer issue 2236: q had fewer rows than planned, and run read beyond it.
TEST(ArgumentContract, RunNamesTheTensorThatDoesNotMatchThePlan) {
  using Args = RunArgs;
  const std::vector<RunFault> faults = {
      {[](Args& a) { a.q_nope.shape[0] = 2; }, "q_nope.shape[0]", "3 query tokens", "2"},
      {[](Args& a) { a.q_nope.shape[0] = 4; }, "q_nope.shape[0]", "3 query tokens", "4"},
      {[](Args& a) { a.q_nope.shape[1] = 3; }, "q_nope.shape", "[3, 2, 16]", "[3, 3, 16]"},
      {[](Args& a) { a.q_nope.shape[2] = 24; }, "q_nope.shape", "[3, 2, 16]", "[3, 2, 24]"},
      {[](Args& a) { a.q_nope.dtype = DType::kBFloat16; }, "q_nope.dtype", "fp32", "bf16"},
      {[](Args& a) { a.q_nope.data = nullptr; }, "q_nope.data", "a tensor [3, 2, 16]", "null"},
      {[](Args& a) { a.q_nope.stride[2] = 2; }, "q_nope.stride[2]", "1", "2"},
      {[](Args& a) { a.q_nope.stride[0] = -32; }, "q_nope.stride[0]", "0 or more", "-32"},
      {[](Args& a) { a.q_nope.stride[1] = INT64_MAX / 2; }, "q_nope.stride[1]", "2^59",
       "4611686018427387903"},
      {[](Args& a) {
         a.q_nope.device = {DeviceKind::kCuda, 0};
       },
       "q_nope.device", "cpu", "cuda:0"},
      {[](Args& a) { a.q_nope.data = static_cast<const char*>(a.q_nope.data) + 1; }, "q_nope.data",
       "aligned", ""},
      {[](Args& a) { a.q_pe.shape[0] = 2; }, "q_pe.shape", "[3, 2, 8]", "[2, 2, 8]"},
      {[](Args& a) { a.q_pe.data = nullptr; }, "q_pe.data", "a tensor", "null"},
      {[](Args& a) { a.q_pe.dtype = DType::kFloat16; }, "q_pe.dtype", "fp32", "fp16"},
      {[](Args& a) { a.cache.ckv.shape[0] = 9; }, "cache.ckv.shape", "[10, 4, 16]", "[9, 4, 16]"},
      {[](Args& a) { a.cache.ckv.stride[0] += 1; }, "cache.ckv.stride[0]", "declared", "97"},
      {[](Args& a) { a.cache.ckv.stride[1] += 1; }, "cache.ckv.stride[1]", "24", "25"},
      {[](Args& a) { a.cache.ckv.stride[2] = 3; }, "cache.ckv.stride[2]", "1", "3"},
      {[](Args& a) { a.cache.ckv.dtype = DType::kBFloat16; }, "cache.ckv.dtype", "fp32", "bf16"},
      {[](Args& a) { a.cache.ckv.data = nullptr; }, "cache.ckv.data", "a tensor", "null"},
      {[](Args& a) { a.cache.kpe.shape[2] = 7; }, "cache.kpe.shape", "[10, 4, 8]", "[10, 4, 7]"},
      {[](Args& a) { a.cache.kpe.stride[1] -= 1; }, "cache.kpe.stride[1]", "24", "23"},
      {[](Args& a) { a.out.shape[0] = 5; }, "out.shape", "[3, 2, 16]", "[5, 2, 16]"},
      {[](Args& a) { a.out.dtype = DType::kInt32; }, "out.dtype", "fp32", "int32"},
      {[](Args& a) { a.out.data = nullptr; }, "out.data", "a tensor", "null"},
      {[](Args& a) { a.out.stride[0] = 0; }, "out.stride[0]", "do not overlap", "0"},
      {[](Args& a) { a.out.stride[1] = 15; }, "out.stride[1]", "at least 16", "15"},
      {[](Args& a) { a.lse.shape[1] = 1; }, "lse.shape", "[3, 2]", "[3, 1]"},
      {[](Args& a) { a.lse.stride[0] = 1; }, "lse.stride[0]", "at least 2", "1"},
      {[](Args& a) { a.lse.stride[1] = -1; }, "lse.stride[1]", "0 or more", "-1"},
      {[](Args& a) { a.lse.stride[1] = INT64_MIN; }, "lse.stride[1]", "0 or more", ""},
      {[](Args& a) {
         a.lse.device = {DeviceKind::kCuda, 2};
       },
       "lse.device", "cpu", "cuda:2"},
      {[](Args& a) { a.out.data = const_cast<void*>(a.q_nope.data); }, "out", "apart from", "over"},
      {[](Args& a) { a.out.data = const_cast<void*>(a.q_pe.data); }, "out", "that of q_", "over"},
      {[](Args& a) { a.out.data = const_cast<void*>(a.cache.ckv.data); }, "out", "cache.ckv",
       "over"},
      {[](Args& a) { a.lse.data = static_cast<float*>(a.out.data) + 3; }, "lse", "that of out",
       "over"},
      {[](Args& a) { a.q_pe.data = a.lse.data; }, "lse", "that of q_pe", "over"},
  };
  PagedAttention attention(good_config());
  Problem problem({.geometry = good_config().geometry,
                   .q_lens = {2, 1},
                   .kv_lens = {8, 1},
                   .pages = {4, 9, 0},
                   .pool_pages = 10});
  attention.plan(problem.batch(), {.sm_scale = 0.5F});
  problem.run(attention);
  for (const RunFault& fault : faults) {
    RunArgs args = problem.args();
    fault.spoil(args);
    problem.spoil_outputs();
    const ErrorParts parts = refusal_of([&] { attention.run(args); });
    EXPECT_EQ(parts.where, "PagedAttention::run");
    EXPECT_EQ(parts.what, fault.what);
    EXPECT_NE(parts.expected.find(fault.expected), std::string::npos) << parts.expected;
    EXPECT_NE(parts.got.find(fault.got), std::string::npos) << fault.what << " " << parts.got;
    EXPECT_TRUE(std::isnan(problem.packed_out()[0])) << "nothing ran";
  }
}

TEST(ArgumentContract, RunBeforePlanIsAnErrorOfState) {
  PagedAttention attention(good_config());
  EXPECT_THROW(attention.run({}), InvalidState);
}

MLA_CONTRACT_SUITE(RawInputContract);

// flashinfer-ai/flashinfer issue 730: the kernel rotated with a base of its own. The
// reference takes inputs as they are, and far positions would show a rotation.
TEST_P(RawInputContract, InputsAreNeverRotated) {
  AttentionCase c{.q_lens = {2}, .kv_lens = {3000}, .causal = true};
  c.geometry.num_heads = 1;
  c.geometry.kv_lora_rank = 16;
  expect_holds(c);
}

}  // namespace
}  // namespace mla::contract
