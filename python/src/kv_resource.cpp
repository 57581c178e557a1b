#include <vector>

#include "config.hpp"
#include "export.hpp"
#include "pool.hpp"
#include "resources.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

Answer answer_of(const AdmitResult& result) {
  Answer answer{result.pages_short};
  for (const Shortage& shortage : result.shortages) {
    answer.push_back(static_cast<int64_t>(shortage.request));
    answer.push_back(ffi::String(shortage.label));
    answer.push_back(shortage.pages);
  }
  return answer;
}

namespace {

KvStream stream_of(int64_t request, const ffi::String& label) {
  return {.request = static_cast<RequestId>(request), .label = text_of(label)};
}

/// keys: high and low half of each, as signed numbers of the same bits.
std::vector<PageKey> keys_from(const Fields& keys) {
  std::vector<PageKey> page_keys;
  page_keys.reserve(keys.size() / 2);
  for (size_t i = 0; i + 1 < keys.size(); i += 2) {
    page_keys.push_back(
        {.high = static_cast<uint64_t>(keys[i]), .low = static_cast<uint64_t>(keys[i + 1])});
  }
  return page_keys;
}

KvBox kv_make(const PoolBox& pool, const ffi::String& key) {
  return KvBox::make({pool}, *pool, KvOptions{.key = std::string(key)});
}

int64_t kv_open(const KvBox& kv, int64_t request, const ffi::String& label, int64_t num_tokens,
                const Fields& page_keys) {
  return (*kv).open(stream_of(request, label), num_tokens, keys_from(page_keys));
}

void kv_add_page_keys(const KvBox& kv, int64_t request, const ffi::String& label,
                      const Fields& page_keys) {
  (*kv).add_page_keys(stream_of(request, label), keys_from(page_keys));
}

void kv_fork(const KvBox& kv, int64_t source, const ffi::String& source_label, int64_t target,
             const ffi::String& target_label) {
  (*kv).fork(stream_of(source, source_label), stream_of(target, target_label));
}

void kv_trim(const KvBox& kv, int64_t request, const ffi::String& label, int64_t num_tokens) {
  (*kv).trim(stream_of(request, label), num_tokens);
}

void kv_remove(const KvBox& kv, int64_t request) { (*kv).remove(static_cast<RequestId>(request)); }

void kv_drop_prefixes(const KvBox& kv) { (*kv).drop_prefixes(); }

bool kv_contains(const KvBox& kv, int64_t request, const ffi::String& label) {
  return (*kv).contains(stream_of(request, label));
}

int64_t kv_length(const KvBox& kv, int64_t request, const ffi::String& label) {
  return (*kv).length(stream_of(request, label));
}

ffi::Tensor kv_pages(const KvBox& kv, int64_t request, const ffi::String& label) {
  return copy((*kv).pages(stream_of(request, label)));
}

/// free, owned, shared, cached, reserved.
Fields kv_check(const KvBox& kv) {
  const PageCounts counts = (*kv).check();
  return {counts.free, counts.owned, counts.shared, counts.cached, counts.reserved};
}

/// The arrays of a label's plan, as in LabelPlan, and of its views request, start, to_compute.
ffi::Array<ffi::Tensor> kv_label_plan(const KvBox& kv, const ffi::String& label) {
  const LabelPlan& plan = (*kv).label_plan(text_of(label));
  std::vector<int64_t> requests, starts, to_compute;
  for (const KvView& row : plan.views) {
    requests.push_back(static_cast<int64_t>(row.request));
    starts.push_back(row.start);
    to_compute.push_back(row.to_compute);
  }
  return {copy(plan.qo_indptr),
          copy(plan.kv_indptr),
          copy(plan.kv_indices),
          copy(plan.kv_len),
          copy(plan.kv_last_page_len),
          copy(plan.slots),
          copy(std::span<const int64_t>(requests)),
          copy(std::span<const int64_t>(starts)),
          copy(std::span<const int64_t>(to_compute))};
}

/// On the CPU a copy: the library's own goes with the next plan.
ffi::Tensor kv_slots_buf(const KvBox& kv, const ffi::String& label, int64_t stream) {
  const TensorView<const int64_t, 1> slots = (*kv).slots_buf(text_of(label), stream_from(stream));
  if (slots.device.kind == DeviceKind::kCuda) return share(slots, kv);
  return copy(std::span(slots.data, static_cast<size_t>(slots.shape[0])));
}

void kv_write(const KvBox& kv, int64_t layer, const ffi::String& label, ffi::TensorView ckv,
              const ffi::Optional<ffi::TensorView>& kpe, int64_t stream) {
  constexpr const char* kWhere = "KvResource::write";
  (*kv).write(narrow(layer, {"layer", kWhere}), text_of(label), view_of<2>(ckv, {"ckv", kWhere}),
              view_of<2>(kpe, {"kpe", kWhere}), stream_from(stream));
}

}  // namespace

MLA_PY_EXPORT(kv_make)
MLA_PY_EXPORT(kv_open)
MLA_PY_EXPORT(kv_add_page_keys)
MLA_PY_EXPORT(kv_fork)
MLA_PY_EXPORT(kv_trim)
MLA_PY_EXPORT(kv_remove)
MLA_PY_EXPORT(kv_drop_prefixes)
MLA_PY_EXPORT(kv_contains)
MLA_PY_EXPORT(kv_length)
MLA_PY_EXPORT(kv_pages)
MLA_PY_EXPORT(kv_check)
MLA_PY_EXPORT(kv_label_plan)
MLA_PY_EXPORT(kv_slots_buf)
MLA_PY_EXPORT(kv_write)

}  // namespace mla::py
