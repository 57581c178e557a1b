#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

#include "capi/error.hpp"
#include "mla/error.hpp"
#include "mla/mla_engine.h"

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
  EXPECT_EQ(status_of(CudaError(parts, 700)), MLA_DEVICE_ERROR);
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

// Zeroed memory behind every pointer, and null.
struct Blank {
  alignas(16) std::array<unsigned char, 4096> bytes{};
  mla_executor* executor = nullptr;  // a living handle that is none of those asked for

  Blank() { EXPECT_EQ(mla_executor_create(1, &executor), MLA_OK); }
  Blank(const Blank&) = delete;
  Blank& operator=(const Blank&) = delete;
  ~Blank() { mla_executor_destroy(executor); }
};

template <class T>
T argument(void* pointer) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(pointer);
  } else {
    return T{};
  }
}

// What the call says with one thing behind all of its pointers.
template <class... Args>
mla_status status_with(mla_status (*call)(Args...) noexcept, const void* pointer) {
  return call(argument<Args>(const_cast<void*>(pointer))...);
}

template <class... Args>
void expect_refusals(const char* name, mla_status (*call)(Args...) noexcept) {
  const auto expect_refusal = [&](const void* pointer, const char* kind) {
    EXPECT_EQ(status_with(call, pointer), MLA_INVALID_ARGUMENT) << name << " with " << kind;
    const std::string text = mla_last_error();
    EXPECT_EQ(text.substr(0, text.find(':')), name) << text;
    EXPECT_NE(text.find(": expected "), std::string::npos) << text;
    EXPECT_NE(text.find(", got "), std::string::npos) << text;
  };
  const Blank blank;
  expect_refusal(nullptr, "null");
  expect_refusal(blank.bytes.data(), "zeroed memory");
  expect_refusal(blank.executor, "another handle");
}

TEST(CapiUnit, EveryCallRefusesNullBlankMemoryAndForeignHandles) {
#define EXPECT_REFUSALS(call) expect_refusals(#call, &call)
  EXPECT_REFUSALS(mla_supports);
  EXPECT_REFUSALS(mla_split_latent);
  EXPECT_REFUSALS(mla_attention_scratch_bytes);
  EXPECT_REFUSALS(mla_attention_create);
  EXPECT_REFUSALS(mla_attention_plan);
  EXPECT_REFUSALS(mla_attention_run);
  EXPECT_REFUSALS(mla_attention_info);
  EXPECT_REFUSALS(mla_attention_qo_indptr_buf);
  EXPECT_REFUSALS(mla_attention_kv_len_buf);
  EXPECT_REFUSALS(mla_pool_bytes);
  EXPECT_REFUSALS(mla_pool_create);
  EXPECT_REFUSALS(mla_pool_layer);
  EXPECT_REFUSALS(mla_pool_append);
  EXPECT_REFUSALS(mla_pool_append_at);
  EXPECT_REFUSALS(mla_pool_gather);
  EXPECT_REFUSALS(mla_pool_copy_pages);
  EXPECT_REFUSALS(mla_kv_resource_create);
  EXPECT_REFUSALS(mla_kv_resource_open);
  EXPECT_REFUSALS(mla_kv_resource_add_page_keys);
  EXPECT_REFUSALS(mla_kv_resource_fork);
  EXPECT_REFUSALS(mla_kv_resource_trim);
  EXPECT_REFUSALS(mla_kv_resource_remove);
  EXPECT_REFUSALS(mla_kv_resource_drop_prefixes);
  EXPECT_REFUSALS(mla_kv_resource_contains);
  EXPECT_REFUSALS(mla_kv_resource_length);
  EXPECT_REFUSALS(mla_kv_resource_pages);
  EXPECT_REFUSALS(mla_kv_resource_check);
  EXPECT_REFUSALS(mla_kv_resource_label_plan);
  EXPECT_REFUSALS(mla_kv_resource_write);
  EXPECT_REFUSALS(mla_kv_resource_slots_buf);
  EXPECT_REFUSALS(mla_label_plan_view);
  EXPECT_REFUSALS(mla_attention_resource_scratch_bytes);
  EXPECT_REFUSALS(mla_attention_resource_create);
  EXPECT_REFUSALS(mla_attention_resource_set_cursor);
  EXPECT_REFUSALS(mla_attention_resource_run);
  EXPECT_REFUSALS(mla_attention_resource_qo_indptr_buf);
  EXPECT_REFUSALS(mla_attention_resource_kv_len_buf);
  EXPECT_REFUSALS(mla_attention_resource_select_last_hidden);
  EXPECT_REFUSALS(mla_step_set_kv);
  EXPECT_REFUSALS(mla_step_set_attention);
  EXPECT_REFUSALS(mla_step_runner_create);
  EXPECT_REFUSALS(mla_step_runner_admit);
  EXPECT_REFUSALS(mla_step_runner_plan);
  EXPECT_REFUSALS(mla_step_runner_commit);
  EXPECT_REFUSALS(mla_step_runner_abandon);
  EXPECT_REFUSALS(mla_step_runner_pre_admit);
  EXPECT_REFUSALS(mla_step_runner_pre_plan);
  EXPECT_REFUSALS(mla_step_runner_clear_preplan);
  EXPECT_REFUSALS(mla_step_runner_early_label_plan);
  EXPECT_REFUSALS(mla_step_runner_order_replay);
  EXPECT_REFUSALS(mla_step_runner_size_graph_buffers);
#undef EXPECT_REFUSALS
  // The rest can only miss where to write to.
  EXPECT_EQ(mla_executor_create(1, nullptr), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(mla_step_create(nullptr), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(mla_chain_page_key(nullptr, nullptr, 0, nullptr), MLA_INVALID_ARGUMENT);
  EXPECT_EQ(mla_merge_states(nullptr, 0, nullptr, nullptr, 0, nullptr, nullptr),
            MLA_INVALID_ARGUMENT);
}

TEST(CapiUnit, WhatIsNoHandleIsNeitherReadNorDestroyed) {
  const Blank blank;
  for (const void* pointer :
       {static_cast<const void*>(nullptr), static_cast<const void*>(blank.bytes.data()),
        static_cast<const void*>(blank.executor)}) {
    void* const foreign = const_cast<void*>(pointer);
    EXPECT_EQ(mla_attention_kernel(static_cast<mla_attention*>(foreign)), nullptr);
    EXPECT_EQ(mla_pool_total_pages(static_cast<mla_pool*>(foreign)), 0);
    EXPECT_EQ(mla_kv_resource_num_pages(static_cast<mla_kv_resource*>(foreign)), 0);
    EXPECT_EQ(mla_kv_resource_free_pages(static_cast<mla_kv_resource*>(foreign)), 0);
    EXPECT_EQ(mla_kv_resource_cached_pages(static_cast<mla_kv_resource*>(foreign)), 0);
    auto* attention = static_cast<mla_attention_resource*>(foreign);
    EXPECT_EQ(mla_attention_resource_kernel(attention), nullptr);
    EXPECT_EQ(mla_attention_resource_uses_kernel(attention), 0);
    EXPECT_EQ(mla_step_runner_force_double_buffer(static_cast<mla_step_runner*>(foreign)), 0);
    mla_attention_destroy(static_cast<mla_attention*>(foreign));
    mla_pool_destroy(static_cast<mla_pool*>(foreign));
    mla_kv_resource_destroy(static_cast<mla_kv_resource*>(foreign));
    mla_attention_resource_destroy(attention);
    mla_step_destroy(static_cast<mla_step*>(foreign));
    mla_step_runner_destroy(static_cast<mla_step_runner*>(foreign));
  }
  EXPECT_EQ(mla_executor_num_threads(nullptr), 0);
  EXPECT_EQ(mla_executor_num_threads(blank.executor), 1) << "it lives";
}

}  // namespace
}  // namespace mla::capi
