#pragma once

#include <memory>
#include <utility>

#include "capi/handle.hpp"
#include "capi/kv_resource.hpp"
#include "mla/attention_resource.hpp"

namespace mla::capi {

/// An attention resource and the KV resource that it reads, shared by all handles made from it.
struct SharedAttention {
  SharedAttention(std::shared_ptr<SharedKv> streams, const AttentionOptions& options)
      : kv(std::move(streams)), attention(*kv->pool, kv->kv.key(), options) {}

  std::shared_ptr<SharedKv> kv;
  AttentionResource attention;
  bool has_runner = false;
};

}  // namespace mla::capi

struct mla_attention_resource  // NOLINT(readability-identifier-naming): declared by mla_engine.h
    : mla::capi::Handle<mla_attention_resource> {
  static constexpr const char* kName = "mla_attention_resource";
  mla_attention_resource(std::shared_ptr<mla::capi::SharedKv> kv,
                         const mla::AttentionOptions& options)
      : shared(std::make_shared<mla::capi::SharedAttention>(std::move(kv), options)) {}

  std::shared_ptr<mla::capi::SharedAttention> shared;
};
