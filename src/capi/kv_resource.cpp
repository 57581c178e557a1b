#include "capi/kv_resource.hpp"

#include <vector>

#include "capi/error.hpp"
#include "capi/from_c.hpp"
#include "capi/pool.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

namespace {

mla::KvOptions options_from_c(const mla_kv_options* options, const char* where) {
  mla::KvOptions read;
  if (options == nullptr) return read;
  const mla_kv_options given = read_struct(options, "options", where);
  read.key = name_from_c(given.key, read.key.c_str());
  if (flag_from_c(given.check_every_call, "options.check_every_call", where)) {
    read.check_every_call = true;
  }
  return read;
}

mla::KvResource& kv_from_c(const mla_kv_resource* kv, const char* where) {
  return handle_from_c(kv, "kv", where).shared->kv;
}

std::vector<mla::PageKey> keys_from_c(const mla_page_key* keys, int64_t num_keys,
                                      const char* where) {
  std::vector<mla::PageKey> read;
  for (const mla_page_key& key : array_from_c(keys, num_keys, "page_keys", where)) {
    read.push_back({.high = key.high, .low = key.low});
  }
  return read;
}

}  // namespace

namespace mla::capi {

void write_label_plan(const LabelPlan& plan, mla_label_plan* given, const char* where) {
  write_struct({.struct_size = 0,
                .label = plan.label.data(),  // the whole of a string of the resource's
                .num_rows = static_cast<int64_t>(plan.views.size()),
                .num_new_rows = plan.num_new_rows(),
                .qo_indptr = plan.qo_indptr.data(),
                .kv_indptr = plan.kv_indptr.data(),
                .kv_indices = plan.kv_indices.data(),
                .num_kv_indices = static_cast<int64_t>(plan.kv_indices.size()),
                .kv_len = plan.kv_len.data(),
                .kv_last_page_len = plan.kv_last_page_len.data(),
                .slots = plan.slots.data(),
                .num_slots = static_cast<int64_t>(plan.slots.size()),
                .views = plan.views.data()},
               given, "plan", where);
}

}  // namespace mla::capi

mla_status mla_kv_resource_create(mla_pool* pool, const mla_kv_options* options,
                                  mla_kv_resource** kv) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_create";
    mla_pool& of = handle_from_c(pool, "pool", kWhere);
    not_null(kv, "kv", kWhere);
    const mla::KvOptions wanted = options_from_c(options, kWhere);
    *kv =
        std::make_unique<mla_kv_resource>(std::make_shared<SharedKv>(of.shared, wanted)).release();
  });
}

void mla_kv_resource_destroy(mla_kv_resource* kv) noexcept { destroy(kv); }

mla_status mla_chain_page_key(const mla_page_key* previous, const uint64_t* ids, int64_t num_ids,
                              mla_page_key* key) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_chain_page_key";
    const auto content = array_from_c(ids, num_ids, "ids", kWhere);
    mla::PageKey before;
    if (previous != nullptr) before = {.high = previous->high, .low = previous->low};
    const mla::PageKey chained = mla::chain_key(before, content);
    not_null(key, "key", kWhere) = {.high = chained.high, .low = chained.low};
  });
}

mla_status mla_kv_resource_open(mla_kv_resource* kv, mla_kv_stream stream, int64_t num_tokens,
                                const mla_page_key* page_keys, int64_t num_page_keys,
                                int64_t* num_stored) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_open";
    auto& resource = kv_from_c(kv, kWhere);
    const auto keys = keys_from_c(page_keys, num_page_keys, kWhere);
    const int64_t stored = resource.open(stream_from_c(stream), num_tokens, keys);
    if (num_stored != nullptr) *num_stored = stored;
  });
}

mla_status mla_kv_resource_add_page_keys(mla_kv_resource* kv, mla_kv_stream stream,
                                         const mla_page_key* page_keys,
                                         int64_t num_page_keys) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_add_page_keys";
    auto& resource = kv_from_c(kv, kWhere);
    resource.add_page_keys(stream_from_c(stream), keys_from_c(page_keys, num_page_keys, kWhere));
  });
}

mla_status mla_kv_resource_fork(mla_kv_resource* kv, mla_kv_stream source,
                                mla_kv_stream target) noexcept {
  return guard([&] {
    kv_from_c(kv, "mla_kv_resource_fork").fork(stream_from_c(source), stream_from_c(target));
  });
}

mla_status mla_kv_resource_trim(mla_kv_resource* kv, mla_kv_stream stream,
                                int64_t num_tokens) noexcept {
  return guard(
      [&] { kv_from_c(kv, "mla_kv_resource_trim").trim(stream_from_c(stream), num_tokens); });
}

mla_status mla_kv_resource_remove(mla_kv_resource* kv, uint64_t request) noexcept {
  return guard([&] { kv_from_c(kv, "mla_kv_resource_remove").remove(request); });
}

mla_status mla_kv_resource_drop_prefixes(mla_kv_resource* kv) noexcept {
  return guard([&] { kv_from_c(kv, "mla_kv_resource_drop_prefixes").drop_prefixes(); });
}

mla_status mla_kv_resource_contains(const mla_kv_resource* kv, mla_kv_stream stream,
                                    int32_t* is_open) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_contains";
    const auto& resource = kv_from_c(kv, kWhere);
    not_null(is_open, "is_open", kWhere) = resource.contains(stream_from_c(stream)) ? 1 : 0;
  });
}

mla_status mla_kv_resource_length(const mla_kv_resource* kv, mla_kv_stream stream,
                                  int64_t* num_tokens) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_length";
    const auto& resource = kv_from_c(kv, kWhere);
    not_null(num_tokens, "num_tokens", kWhere) = resource.length(stream_from_c(stream));
  });
}

mla_status mla_kv_resource_pages(const mla_kv_resource* kv, mla_kv_stream stream,
                                 const int32_t** pages, int64_t* num_pages) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_pages";
    const auto& resource = kv_from_c(kv, kWhere);
    not_null(pages, "pages", kWhere);
    not_null(num_pages, "num_pages", kWhere);
    const auto held = resource.pages(stream_from_c(stream));
    *pages = held.data();
    *num_pages = static_cast<int64_t>(held.size());
  });
}

int64_t mla_kv_resource_num_pages(const mla_kv_resource* kv) noexcept {
  return is_handle(kv) ? kv->shared->kv.num_pages() : 0;
}

int64_t mla_kv_resource_free_pages(const mla_kv_resource* kv) noexcept {
  return is_handle(kv) ? kv->shared->kv.free_pages() : 0;
}

int64_t mla_kv_resource_cached_pages(const mla_kv_resource* kv) noexcept {
  return is_handle(kv) ? kv->shared->kv.cached_pages() : 0;
}

mla_status mla_kv_resource_check(const mla_kv_resource* kv, mla_page_counts* counts) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_check";
    const mla::PageCounts found = kv_from_c(kv, kWhere).check();
    if (counts == nullptr) return;
    write_struct({.struct_size = 0,
                  .free = found.free,
                  .owned = found.owned,
                  .shared = found.shared,
                  .cached = found.cached,
                  .reserved = found.reserved},
                 counts, "counts", kWhere);
  });
}

mla_status mla_kv_resource_label_plan(const mla_kv_resource* kv, const char* label,
                                      mla_label_plan* plan) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_label_plan";
    write_label_plan(kv_from_c(kv, kWhere).label_plan(name_from_c(label, kMainLabel)), plan,
                     kWhere);
  });
}

mla_status mla_label_plan_view(const mla_label_plan* plan, int64_t row,
                               mla_kv_view* view) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_label_plan_view";
    const mla_label_plan given = read_struct(plan, "plan", kWhere);
    if (row < 0 || row >= given.num_rows) {
      mla::throw_invalid({.what = "row",
                          .where = kWhere,
                          .expected = "0 to num_rows - 1 = " + std::to_string(given.num_rows - 1),
                          .got = std::to_string(row)});
    }
    const auto* views = static_cast<const mla::KvView*>(given.views);
    const mla::KvView& found = (&not_null(views, "plan->views", kWhere))[row];
    write_struct({.struct_size = 0,
                  .request = found.request,
                  .label = found.label.data(),  // the whole of a string of the resource's
                  .pages = found.pages.data(),
                  .num_pages = static_cast<int64_t>(found.pages.size()),
                  .start = found.start,
                  .to_compute = found.to_compute,
                  .length = found.length},
                 view, "view", kWhere);
  });
}

mla_status mla_kv_resource_write(mla_kv_resource* kv, int32_t layer, const char* label,
                                 const mla_tensor* ckv, const mla_tensor* kpe,
                                 void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_write";
    kv_from_c(kv, kWhere)
        .write(layer, name_from_c(label, kMainLabel), tensor_from_c<2>(ckv, "ckv", kWhere),
               optional_from_c<2>(kpe, "kpe", kWhere), {.handle = stream});
  });
}

mla_status mla_kv_resource_slots_buf(mla_kv_resource* kv, const char* label, mla_tensor* buffer,
                                     void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_kv_resource_slots_buf";
    mla::KvResource& of = kv_from_c(kv, kWhere);
    not_null(buffer, "buffer", kWhere) =
        tensor_to_c(of.slots_buf(name_from_c(label, kMainLabel), {.handle = stream}));
  });
}
