#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "capi/error.hpp"
#include "mla/error.hpp"
#include "mla/mla.h"

// What a C program cannot show: which exception becomes which status, and what each thread sees.
namespace mla::capi {
namespace {

template <class Exception>
mla_status status_of(Exception exception) {
  return guard([&] { throw exception; });
}

TEST(CapiUnit, EveryExceptionBecomesAStatusAndAText) {
  const ErrorParts parts{.what = "x", .where = "f", .expected = "1", .got = "2"};
  EXPECT_EQ(status_of(InvalidArgument(parts)), MLA_INVALID_ARGUMENT);
  EXPECT_STREQ(mla_last_error(), "f: x: expected 1, got 2");
  EXPECT_EQ(status_of(InvalidState(parts)), MLA_INVALID_STATE);
  EXPECT_EQ(status_of(std::bad_alloc()), MLA_OUT_OF_MEMORY);
  EXPECT_STREQ(mla_last_error(), "out of memory");
  EXPECT_EQ(status_of(std::logic_error("broken")), MLA_INTERNAL_ERROR);
  EXPECT_STREQ(mla_last_error(), "broken");
  EXPECT_EQ(status_of(7), MLA_INTERNAL_ERROR);
  EXPECT_STREQ(mla_last_error(), "an exception of an unknown type");
  EXPECT_EQ(guard([] {}), MLA_OK);
  EXPECT_STREQ(mla_last_error(), "an exception of an unknown type") << "a success keeps it";
}

TEST(CapiUnit, LastErrorIsTheThreadsOwn) {
  EXPECT_EQ(mla_executor_create(-1, nullptr), MLA_INVALID_ARGUMENT);
  const std::string mine = mla_last_error();
  std::thread([] {
    EXPECT_STREQ(mla_last_error(), "");
    mla_executor* executor = nullptr;
    EXPECT_EQ(mla_executor_create(-1, &executor), MLA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(mla_last_error()).find("num_threads"), std::string::npos);
  }).join();
  EXPECT_EQ(mla_last_error(), mine);
}

mla_status create_with_size(size_t struct_size, unsigned char beyond) {
  mla_geometry geometry{};
  geometry.struct_size = sizeof geometry;
  geometry.num_heads = geometry.kv_lora_rank = geometry.page_size = 1;
  mla_attention_config config{};
  config.struct_size = struct_size;
  config.geometry = &geometry;
  config.num_pages = 1;
  // An older header ends before this field, which would be refused.
  if (struct_size == offsetof(mla_attention_config, kernel)) config.kernel = "no such kernel";
  alignas(mla_attention_config) std::array<unsigned char, sizeof config + 16> memory;
  memory.fill(beyond);
  std::memcpy(memory.data(), &config, sizeof config);
  size_t bytes = 0;
  return mla_attention_scratch_bytes(reinterpret_cast<const mla_attention_config*>(memory.data()),
                                     &bytes);
}

TEST(CapiUnit, StructOfAnotherVersionIsReadAsFarAsBothKnowIt) {
  EXPECT_EQ(create_with_size(sizeof(mla_attention_config), 0xff), MLA_OK);
  EXPECT_EQ(create_with_size(offsetof(mla_attention_config, kernel), 0xff), MLA_OK) << "older";
  EXPECT_EQ(create_with_size(sizeof(mla_attention_config) + 16, 0), MLA_OK) << "newer, not used";
  EXPECT_EQ(create_with_size(sizeof(mla_attention_config) + 16, 1), MLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(mla_last_error()).find("newer than the library"), std::string::npos);
  for (const size_t never_set : {size_t{0}, size_t{7}, std::numeric_limits<size_t>::max()}) {
    EXPECT_EQ(create_with_size(never_set, 0), MLA_INVALID_ARGUMENT) << never_set;
  }
}

TEST(CapiUnit, AnswerFillsTheRoomThatTheCallerHas) {
  mla_geometry geometry{};
  geometry.struct_size = sizeof geometry;
  struct Guarded {
    mla_support support{};
    int64_t beyond = -1;
  } older, newer;
  older.support.struct_size = offsetof(mla_support, considered);
  older.support.num_considered = -1;
  EXPECT_EQ(mla_supports(&geometry, {MLA_CPU, 0}, nullptr, nullptr, &older.support), MLA_OK);
  EXPECT_EQ(older.support.num_considered, -1) << "a field that the caller does not have";
  newer.support.struct_size = sizeof(mla_support) + sizeof(int64_t);
  EXPECT_EQ(mla_supports(&geometry, {MLA_CPU, 0}, nullptr, nullptr, &newer.support), MLA_OK);
  EXPECT_EQ(newer.beyond, 0) << "a field that the library does not have";
  EXPECT_EQ(newer.support.struct_size, sizeof(mla_support) + sizeof(int64_t));
}

TEST(CapiUnit, ContiguousTensorOfNoShapeIsRefused) {
  const std::array<int64_t, 4> huge = {std::numeric_limits<int64_t>::max(), 4, 4, 4};
  float value = 0;
  mla_tensor part{};
  for (const mla_tensor& layer : {mla_contiguous_tensor(&value, MLA_FLOAT32, 0, huge.data()),
                                  mla_contiguous_tensor(&value, MLA_FLOAT32, 5, huge.data()),
                                  mla_contiguous_tensor(&value, MLA_FLOAT32, 4, huge.data()),
                                  mla_contiguous_tensor(&value, MLA_FLOAT32, 3, nullptr)}) {
    EXPECT_EQ(mla_split_latent(&layer, 1, &part, &part), MLA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(mla_last_error()).find("layer.rank"), std::string::npos);
  }
}

}  // namespace
}  // namespace mla::capi
