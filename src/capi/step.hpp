#pragma once

#include <set>
#include <string>
#include <string_view>

#include "capi/handle.hpp"
#include "mla/attention_resource.hpp"
#include "mla/kv_step.hpp"
#include "mla/step.hpp"

struct mla_step  // NOLINT(readability-identifier-naming): declared by mla_engine.h
    : mla::capi::Handle<mla_step> {
  static constexpr const char* kName = "mla_step";

  /// A copy of the name that lives as long as the step, whose parts lend their names.
  std::string_view keep(const char* name);

  mla::Step step;
  std::set<std::string, std::less<>> names;
  // The next part, until all of it is in order; then the last one's memory.
  mla::KvStep kv;
  mla::AttentionStep attention;
};
