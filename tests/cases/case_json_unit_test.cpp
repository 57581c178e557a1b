#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "cases/case_json.hpp"
#include "cases/check.hpp"
#include "mla/error.hpp"

namespace mla::cases {
namespace {

using Json = nlohmann::json;

Json smallest() {
  return {{"geometry",
           {{"num_heads", 2},
            {"kv_lora_rank", 8},
            {"qk_rope_head_dim", 4},
            {"page_size", 4},
            {"dtype", "fp32"}}},
          {"q_lens", {1, 2}},
          {"kv_lens", {5, 0}},
          {"sm_scale", 0.5}};
}

// What the reader refuses of a text, and the whole message.
ErrorParts refusal_of(const std::string& text) {
  try {
    parse_case(text);
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.parts().where == "case file" || error.parts().where == "attention case", true);
    return error.parts();
  }
  return {.what = "not refused", .where = {}, .expected = {}, .got = {}};
}

TEST(CaseJsonUnit, DefaultsAreThoseOfTheStruct) {
  const AttentionCase c = parse_case(smallest().dump());
  const AttentionCase defaults;
  EXPECT_EQ(c.geometry.num_heads, 2);
  EXPECT_EQ(c.geometry.dtype, DType::kFloat32);
  EXPECT_EQ(c.geometry.kv_dtype, DType::kFloat32);
  EXPECT_EQ(c.kv_lens, (std::vector<int32_t>{5, 0}));
  EXPECT_EQ(c.causal, defaults.causal);
  EXPECT_EQ(c.lse, defaults.lse);
  EXPECT_EQ(c.poison, defaults.poison);
  EXPECT_EQ(c.page_order, defaults.page_order);
  EXPECT_EQ(c.seed, defaults.seed);
  EXPECT_FALSE(c.bucket.has_value());
}

TEST(CaseJsonUnit, EveryKeyIsRead) {
  Json json = smallest();
  json["name"] = "all of them";
  json["causal"] = true;
  json["lse"] = "base2";
  json["page_order"] = "reversed";
  json["pages"] = {3, 1};
  json["pool_pages"] = 7;
  json["spare_entries"] = 2;
  json["last_page_lens"] = false;
  json["layout"] = {
      {"joined_q", true}, {"separate_cache", true}, {"head_major", true}, {"misaligned", true},
      {"q_pad", 1},       {"out_pad", 2},           {"lse_pad", 3},       {"row_pad", 4},
      {"page_pad", 5}};
  json["poison"] = "inf";
  json["data"] = "large";
  json["peak_position"] = 4;
  json["equal_requests"] = true;
  json["equal_heads"] = true;
  json["seed"] = 99;
  json["splits"] = {{"fixed_tokens", 0}, {"forced_count", 3}};
  json["bucket"] = {{"num_rows", 4}, {"num_tokens", 9}};
  json["kernel"] = "reference";
  const AttentionCase c = parse_case(json.dump());
  EXPECT_EQ(c.name, "all of them");
  EXPECT_TRUE(c.causal);
  EXPECT_EQ(c.lse, LseBase::kTwo);
  EXPECT_EQ(c.page_order, PageOrder::kReversed);
  EXPECT_EQ(c.pages, (std::vector<int32_t>{3, 1}));
  EXPECT_EQ(c.pool_pages, 7);
  EXPECT_EQ(c.spare_entries, 2);
  EXPECT_TRUE(c.layout.joined_q && c.layout.separate_cache && c.layout.head_major &&
              c.layout.misaligned);
  EXPECT_EQ(c.layout.q_pad + 10 * c.layout.out_pad + 100 * c.layout.lse_pad +
                1000 * c.layout.row_pad + 10000 * c.layout.page_pad,
            54321);
  EXPECT_EQ(c.poison, Poison::kInf);
  EXPECT_EQ(c.data, DataKind::kLarge);
  EXPECT_EQ(c.peak_position, 4);
  EXPECT_TRUE(c.equal_requests && c.equal_heads);
  EXPECT_EQ(c.seed, 99U);
  EXPECT_EQ(c.splits.forced_count, 3);
  EXPECT_EQ(c.bucket->num_rows, 4);
  EXPECT_EQ(c.bucket->num_tokens, 9);
  EXPECT_EQ(c.kernel, "reference");
  EXPECT_EQ(check_case(c).fault, "");
}

TEST(CaseJsonUnit, UnknownMissingAndRepeatedKeysAreNamed) {
  Json json = smallest();
  json["kv_len"] = {1};
  EXPECT_EQ(refusal_of(json.dump()).what, "kv_len");
  json = smallest();
  json["layout"] = {{"qpad", 1}};
  EXPECT_EQ(refusal_of(json.dump()).what, "layout.qpad");
  json = smallest();
  json.erase("sm_scale");
  EXPECT_EQ(refusal_of(json.dump()).what, "sm_scale");
  json = smallest();
  json["geometry"].erase("page_size");
  EXPECT_EQ(refusal_of(json.dump()).what, "geometry.page_size");
  const ErrorParts repeated = refusal_of(R"({"seed": 1, "seed": 2})");
  EXPECT_EQ(repeated.what, "seed");
  EXPECT_EQ(repeated.expected, "each key once");
}

TEST(CaseJsonUnit, TypesAndRangesAreChecked) {
  const auto refused = [](const char* key, const Json& value) {
    Json json = smallest();
    json[key] = value;
    return refusal_of(json.dump()).what;
  };
  EXPECT_EQ(refused("q_lens", {1, -2}), "q_lens[1]");
  EXPECT_EQ(refused("q_lens", {1, 2.5}), "q_lens[1]");
  EXPECT_EQ(refused("q_lens", {1, 2147483648}), "q_lens[1]");
  EXPECT_EQ(refused("q_lens", {1}), "kv_lens.size()");
  EXPECT_EQ(refused("q_lens", "1"), "q_lens");
  EXPECT_EQ(refused("causal", 1), "causal");
  EXPECT_EQ(refused("sm_scale", "0.5"), "sm_scale");
  EXPECT_EQ(refused("sm_scale", 1e300), "sm_scale");
  EXPECT_EQ(refused("lse", "log10"), "lse");
  EXPECT_EQ(refused("seed", 18446744073709551615U), "seed");
  EXPECT_EQ(refused("pages", {1}), "pages.size()");
  EXPECT_EQ(refused("pool_pages", 1), "pool_pages");
  EXPECT_EQ(refused("layout", Json::array()), "layout");
  EXPECT_EQ(refused("bucket", {{"num_rows", 1}}), "bucket.num_tokens");
  EXPECT_EQ(refused("kernel", std::string(201, 'x')), "kernel");
}

TEST(CaseJsonUnit, SyntaxErrorsNameTheLine) {
  EXPECT_EQ(refusal_of("{\n\"seed\": 1,\n oops }").what, "line 3");
  EXPECT_EQ(refusal_of("").what, "line 1");
  EXPECT_EQ(refusal_of("[]").what, "the file");
  EXPECT_EQ(refusal_of("{\"name\": \"\xff\"}").what, "line 1");
}

// Nothing is allocated for a case before its size is known to be bearable.
TEST(CaseJsonUnit, CasesThatNoMemoryHoldsAreRefused) {
  Json json = smallest();
  json["kv_lens"] = {2147483647, 2147483647};
  EXPECT_EQ(refusal_of(json.dump()).what, "memory");
  json = smallest();
  json["geometry"]["num_heads"] = 2147483647;
  json["geometry"]["kv_lora_rank"] = 2147483647;
  json["q_lens"] = {2147483647, 2147483647};
  EXPECT_EQ(refusal_of(json.dump()).what, "memory");
  json = smallest();
  json["geometry"]["page_size"] = 2147483647;
  json["pool_pages"] = 2147483647;
  EXPECT_EQ(refusal_of(json.dump()).what, "memory");
  json = smallest();
  json["pool_pages"] = 2147483647;
  json["layout"] = {{"page_pad", 1000000000}};
  EXPECT_EQ(refusal_of(json.dump()).what, "address space");
}

// A large pool of which few pages are used is no large case.
TEST(CaseJsonUnit, SparsePoolsAreTaken) {
  Json json = smallest();
  json["pool_pages"] = 200000000;
  EXPECT_EQ(parse_case(json.dump()).pool_pages, 200000000);
}

}  // namespace
}  // namespace mla::cases
