#include "capi/pool.hpp"

#include "capi/error.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

namespace {

// All but the memory.
mla::PoolConfig config_from_c(const mla_pool_config& given, const char* where) {
  return {.num_layers = given.num_layers == 0 ? 1 : given.num_layers,
          .num_pages = given.num_pages,
          .page_size = given.page_size,
          .kv_lora_rank = given.kv_lora_rank,
          .qk_rope_head_dim = given.qk_rope_head_dim,
          .dtype = dtype_from_c(given.dtype, "config", ".dtype", where),
          .device = device_from_c(given.device, "config", where),
          .memory = {}};
}

mla::LatentPool& pool_from_c(const mla_pool* pool, const char* where) {
  return *handle_from_c(pool, "pool", where).shared;
}

}  // namespace

mla_status mla_pool_bytes(const mla_pool_config* config, size_t* bytes) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_pool_bytes";
    const mla_pool_config given = read_struct(config, "config", kWhere);
    not_null(bytes, "bytes", kWhere) = mla::LatentPool::bytes(config_from_c(given, kWhere));
  });
}

mla_status mla_pool_create(const mla_pool_config* config, mla_pool** pool) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_pool_create";
    not_null(pool, "pool", kWhere);
    const mla_pool_config given = read_struct(config, "config", kWhere);
    mla::PoolConfig wanted = config_from_c(given, kWhere);
    wanted.memory = lent_from_c(given.memory, given.memory_bytes, "config.memory", kWhere);
    *pool = std::make_unique<mla_pool>(wanted).release();
  });
}

void mla_pool_destroy(mla_pool* pool) noexcept { destroy(pool); }

int64_t mla_pool_total_pages(const mla_pool* pool) noexcept {
  return is_handle(pool) ? pool->shared->total_pages() : 0;
}

mla_status mla_pool_layer(const mla_pool* pool, int32_t layer, mla_tensor* view) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_pool_layer";
    not_null(view, "view", kWhere) = tensor_to_c(pool_from_c(pool, kWhere).layer(layer));
  });
}

mla_status mla_pool_append(mla_pool* pool, int32_t layer, const int64_t* slots, int64_t num_slots,
                           const mla_tensor* ckv, const mla_tensor* kpe, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_pool_append";
    pool_from_c(pool, kWhere)
        .append(layer, array_from_c(slots, num_slots, "slots", kWhere),
                tensor_from_c<2>(ckv, "ckv", kWhere), optional_from_c<2>(kpe, "kpe", kWhere),
                {.handle = stream});
  });
}

mla_status mla_pool_append_at(mla_pool* pool, int32_t layer, const mla_tensor* slots,
                              const mla_tensor* ckv, const mla_tensor* kpe, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_pool_append_at";
    pool_from_c(pool, kWhere)
        .append_at(layer,
                   typed_from_c<int64_t, 1>(not_null(slots, "slots", kWhere), "slots", kWhere),
                   tensor_from_c<2>(ckv, "ckv", kWhere), optional_from_c<2>(kpe, "kpe", kWhere),
                   {.handle = stream});
  });
}

mla_status mla_pool_gather(const mla_pool* pool, int32_t layer, const int64_t* slots,
                           int64_t num_slots, const mla_tensor* rows, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_pool_gather";
    pool_from_c(pool, kWhere)
        .gather(layer, array_from_c(slots, num_slots, "slots", kWhere),
                tensor_from_c<2>(rows, "rows", kWhere), {.handle = stream});
  });
}

mla_status mla_pool_copy_pages(mla_pool* pool, const mla_page_copy* copies, int64_t num_copies,
                               void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_pool_copy_pages";
    thread_local std::vector<mla::PageCopy> wanted;  // kept, so that it stops allocating
    wanted.clear();
    for (const mla_page_copy& copy : array_from_c(copies, num_copies, "copies", kWhere)) {
      wanted.push_back({.from = copy.from, .to = copy.to});
    }
    pool_from_c(pool, kWhere).copy_pages(wanted, {.handle = stream});
  });
}
