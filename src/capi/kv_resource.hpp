#pragma once

#include <memory>
#include <utility>

#include "capi/handle.hpp"
#include "mla/kv_resource.hpp"

namespace mla::capi {

/// A KV resource and the pool that it needs, shared by all handles that were made from it.
struct SharedKv {
  SharedKv(std::shared_ptr<LatentPool> lent, const KvOptions& options)
      : pool(std::move(lent)), kv(*pool, options) {}

  std::shared_ptr<LatentPool> pool;
  KvResource kv;
  bool has_runner = false;
};

void write_label_plan(const LabelPlan& plan, mla_label_plan* given, const char* where);

}  // namespace mla::capi

struct mla_kv_resource  // NOLINT(readability-identifier-naming): declared by mla_cache.h
    : mla::capi::Handle<mla_kv_resource> {
  static constexpr const char* kName = "mla_kv_resource";
  explicit mla_kv_resource(std::shared_ptr<mla::capi::SharedKv> kv) : shared(std::move(kv)) {}

  std::shared_ptr<mla::capi::SharedKv> shared;
};
