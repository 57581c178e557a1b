#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cases/attention_case.hpp"
#include "mla/device_memory.hpp"

namespace mla::cli {

/// Bytes of a cache that lie together, in units of 16 bytes.
struct ReadRun {
  uint32_t begin = 0;
  uint32_t count = 0;
};

/// The keys of a batch as parts of a few tokens, each a fixed number of runs (some empty), so that
/// blocks can share them out evenly.
struct ReadList {
  std::vector<ReadRun> runs;  ///< [num_parts, runs_of_a_part]
  int32_t num_parts = 0;
  int32_t runs_of_a_part = 0;
  int32_t most_units = 0;  ///< of one run
};

/// Every cached token of the case once, for `num_blocks` blocks. A row of the cache is a multiple
/// of 16 bytes.
ReadList list_reads(const cases::AttentionCase& attention_case, std::span<const int32_t> kv_indptr,
                    std::span<const int32_t> kv_indices, int32_t num_blocks);

/// The list of a case on its device, which is a GPU: reads what attention must read, and does
/// nothing with it.
class PageReads {
 public:
  PageReads(const cases::AttentionCase& attention_case, std::span<const int32_t> kv_indptr,
            std::span<const int32_t> kv_indices, Stream stream);

  /// Whether the case's device and rows can be read so.
  static bool serves(const cases::AttentionCase& attention_case);
  /// Queues one pass over a cache [pages, page_size, latent].
  void run(const void* cache, Stream stream) const;

 private:
  ReadList list_;
  DeviceMemory runs_;
};

}  // namespace mla::cli
