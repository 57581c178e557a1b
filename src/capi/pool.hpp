#pragma once

#include <memory>

#include "capi/handle.hpp"
#include "mla/pool.hpp"

struct mla_pool  // NOLINT(readability-identifier-naming): declared by mla_cache.h
    : mla::capi::Handle<mla_pool> {
  static constexpr const char* kName = "mla_pool";
  explicit mla_pool(const mla::PoolConfig& config)
      : shared(std::make_shared<mla::LatentPool>(config)) {}

  std::shared_ptr<mla::LatentPool> shared;
};
