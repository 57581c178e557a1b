#include "mla/page_reads.hpp"

#include <algorithm>

#include "cuda/card.hpp"
#include "mla/bench_kernels.hpp"

namespace mla::cli {
namespace {

constexpr int64_t kUnitBytes = 16;
constexpr int64_t kMostPartTokens = 16;

int64_t row_bytes(const cases::AttentionCase& c) {
  return c.geometry.latent_width() * size_of(c.geometry.kv_dtype);
}

}  // namespace

ReadList list_reads(const cases::AttentionCase& c, std::span<const int32_t> kv_indptr,
                    std::span<const int32_t> kv_indices, int32_t num_blocks) {
  const int64_t page_size = c.geometry.page_size;
  const int64_t row_units = row_bytes(c) / kUnitBytes;
  int64_t total = 0;
  for (const int32_t kv_len : c.kv_lens) total += kv_len;
  const int64_t part_tokens =
      std::clamp((total + num_blocks - 1) / num_blocks, int64_t{1}, kMostPartTokens);
  const int64_t run_tokens = std::min(part_tokens, page_size);
  ReadList list;
  // A part that begins inside a page may end in one page more than fit into it.
  list.runs_of_a_part = static_cast<int32_t>(
      page_size % part_tokens == 0 ? 1 : (part_tokens + page_size - 2) / page_size + 1);
  list.most_units = static_cast<int32_t>(run_tokens * row_units);
  for (size_t row = 0; row < c.kv_lens.size(); ++row) {
    const int64_t kv_len = c.kv_lens[row];
    for (int64_t begin = 0; begin < kv_len; begin += part_tokens, ++list.num_parts) {
      const int64_t end = std::min(begin + part_tokens, kv_len);
      list.runs.resize(static_cast<size_t>(list.num_parts + 1) *
                       static_cast<size_t>(list.runs_of_a_part));
      ReadRun* run = &list.runs[static_cast<size_t>(list.num_parts) *
                                static_cast<size_t>(list.runs_of_a_part)];
      for (int64_t token = begin; token < end; ++run) {
        const int64_t page = token / page_size;
        const int64_t stop = std::min(end, (page + 1) * page_size);
        const int64_t slot =
            kv_indices[static_cast<size_t>(kv_indptr[row] + page)] * page_size + token % page_size;
        *run = {.begin = static_cast<uint32_t>(slot * row_units),
                .count = static_cast<uint32_t>((stop - token) * row_units)};
        token = stop;
      }
    }
  }
  return list;
}

PageReads::PageReads(const cases::AttentionCase& c, std::span<const int32_t> kv_indptr,
                     std::span<const int32_t> kv_indices, Stream stream)
    : list_(list_reads(c, kv_indptr, kv_indices, cuda::describe_card(c.device.index).num_sms)),
      runs_(c.device, list_.runs.size() * sizeof(ReadRun)) {
  runs_.copy_from_host(list_.runs.data(), runs_.bytes(), stream);
  synchronize(c.device, stream);
}

bool PageReads::serves(const cases::AttentionCase& c) {
  return c.device.kind == DeviceKind::kCuda && row_bytes(c) % kUnitBytes == 0;
}

void PageReads::run(const void* cache, Stream stream) const {
  queue_page_reads({.runs = static_cast<const ReadRun*>(runs_.data()),
                    .num_parts = list_.num_parts,
                    .runs_of_a_part = list_.runs_of_a_part,
                    .most_units = list_.most_units},
                   cache, runs_.device(), stream);
}

}  // namespace mla::cli
