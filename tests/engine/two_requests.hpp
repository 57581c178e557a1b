#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "engine/mini_engine.hpp"
#include "mla/error.hpp"

namespace mla::engine {

inline SlotLease lease(int32_t slot, int64_t num_rows, int64_t num_tokens,
                       const char* walk = "decode") {
  return {.slot = slot,
          .bucket = GraphBucket{walk, {.num_rows = num_rows, .num_tokens = num_tokens}}};
}

/// What a call is refused with.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

/// Pages of 4 tokens; request 1 has 6 stored, request 2 has 3.
struct TwoRequests : testing::Test {
  MiniEngine engine;
  KvResource& kv = engine.kv;
  AttentionResource& attention = engine.attention;
  StepRunner& runner = engine.runner;

  void SetUp() override {
    kv.open({.request = 1});
    kv.open({.request = 2});
    engine.serve({{.request = 1, .span = 6}, {.request = 2, .span = 3}});
  }
};

}  // namespace mla::engine
