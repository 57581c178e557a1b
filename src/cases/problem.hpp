#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cases/attention_case.hpp"
#include "cases/buffer.hpp"
#include "mla/attention.hpp"

namespace mla::cases {

/// Columns of one latent row of a problem: `kpe` is null at rope width 0.
struct LatentRow {
  void* ckv = nullptr;
  void* kpe = nullptr;
};

/// All tensors and index arrays of a case in host memory, and their copies on the case's device,
/// with everything around them poisoned. Values are those of random.hpp: key p of request i and the
/// query at position p of request i are keyed by (i, p), so that cases which differ only in
/// lengths, pages or memory share their data.
class Problem {
 public:
  /// Allocates what bytes_needed() says. Throws InvalidArgument as check_consistent,
  /// std::bad_alloc.
  explicit Problem(const AttentionCase& attention_case);

  const AttentionCase& attention_case() const { return case_; }
  /// Of an object that takes exactly this case: limits as large as the case, no scratch.
  AttentionConfig config() const { return config_of(case_); }
  static AttentionConfig config_of(const AttentionCase& attention_case);
  static PlanOptions options_of(const AttentionCase& attention_case);
  Batch batch() const;
  /// The tensors on the device, and in host memory.
  RunArgs args() const;
  const RunArgs& host_args() const { return args_; }

  /// Copies the host's tensors, outputs included, to the device. Nothing on the CPU.
  void upload() const;
  /// Waits for the stream and copies everything back. Nothing on the CPU.
  void download(Stream stream = {});
  /// One run between the two.
  void run(PagedAttention& attention, Stream stream = {});

  /// Where key `position` of request `request` is stored.
  LatentRow latent_row(int64_t request, int64_t position) const;
  /// The start of page `page`; null where the pool has no such page.
  LatentRow page_start(int64_t page) const;

  /// Fills out and lse, padding included, with NaN.
  void spoil_outputs();
  /// The rows of out [T * H * rank] and lse [T * H], packed, out widened to fp32.
  std::vector<float> packed_out() const;
  std::vector<float> packed_lse() const;
  /// Names the first memory that run may not write and that has changed since spoil_outputs;
  /// empty where there is none.
  std::string find_stray_write() const;

 private:
  void choose_pages();
  void lay_out();
  void fill_queries();
  void fill_cache();
  uint64_t inputs_fingerprint() const;

  AttentionCase case_;
  int64_t num_tokens_ = 0;  ///< rows of the tensors: the bucket's under a lease
  std::vector<int32_t> qo_indptr_, kv_indptr_, kv_indices_, kv_last_page_len_;
  Buffer q_nope_, q_pe_, ckv_, kpe_, out_, lse_;
  RunArgs args_;
  uint64_t inputs_ = 0;
};

}  // namespace mla::cases
