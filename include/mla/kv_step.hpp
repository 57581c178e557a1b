#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "mla/batch.hpp"
#include "mla/export.hpp"
#include "mla/resource.hpp"
#include "mla/step.hpp"

namespace mla {

/// One cache stream: a request may have several, told apart by their label.
struct KvStream {
  RequestId request = 0;
  std::string_view label = "main";
};

/// What a step does to one stream.
struct Segment {
  RequestId request = 0;
  std::string_view label = "main";
  int32_t span = 0;  ///< rows appended, >= 0; 0 reads without extending
};

/// Makes `target`, which must not be open, a stream with the content of `source`; all pages are
/// shared until one of the two appends.
struct Fork {
  KvStream source{};
  KvStream target{};
};

/// Several labels packed as one plan under a name of its own.
struct CombinedLabel {
  std::string_view name;
  std::vector<std::string_view> labels;
};

/// What a step does to the KV streams. Names are lent for the calls that get the step.
struct MLA_API KvStep : ResourceStep {
  static constexpr const char* kKind = "KvStep";
  KvStep() : ResourceStep(kKind) {}

  std::vector<Segment> segments;
  /// Made in this order before the segments, whose streams their targets may be.
  std::vector<Fork> forks_before;
  /// Made in this order at commit, of streams as the step leaves them.
  std::vector<Fork> forks_after;
  /// A label in none of them has a plan of its own.
  std::vector<CombinedLabel> combined;
  /// Labels that are planned even where no segment names them, for graphs that replay them.
  std::vector<std::string_view> labels;
};

/// One stream's part of a plan.
struct KvView {
  RequestId request = 0;
  std::string_view label{};
  std::span<const int32_t> pages{};  ///< those that hold its `length` tokens, in token order
  int64_t start = 0;       ///< tokens stored before the step: position of its first new row
  int64_t to_compute = 0;  ///< rows that the step appends
  int64_t length = 0;      ///< start + to_compute
};

/// One label's part of a plan (B streams, T new rows), in packed order: the order of the step's
/// segments; of a combined label all rows of its first label, then of the second, and so on. The
/// arrays are those of Batch.
struct LabelPlan {
  std::string_view label{};
  std::span<const KvView> views{};              ///< [B]
  std::span<const int32_t> qo_indptr{};         ///< [B + 1]
  std::span<const int32_t> kv_indptr{};         ///< [B + 1]
  std::span<const int32_t> kv_indices{};        ///< [kv_indptr[B]]
  std::span<const int32_t> kv_len{};            ///< [B], new rows included
  std::span<const int32_t> kv_last_page_len{};  ///< [B], 0 for a stream without tokens
  /// [T], where each new row lands in the pool; under a bucket as many as it has tokens, -1 past T.
  std::span<const int64_t> slots{};

  int64_t num_new_rows() const { return qo_indptr.back(); }  ///< T
  Batch batch() const { return {qo_indptr, kv_indptr, kv_indices, kv_len, {}}; }
};

/// The KV resource's plan of a step, valid until the next one (of an early step: until it is
/// promoted or dropped).
struct MLA_API KvPlan : ResourcePlan {
  static constexpr const char* kKind = "KvPlan";
  KvPlan() : ResourcePlan(kKind) {}

  /// In the order in which labels first appear in the step.
  std::span<const LabelPlan> labels;
  int32_t page_size = 0;  ///< tokens, of the pool that the pages are in
  /// Different for every plan; an early one keeps it when it is promoted.
  uint64_t id = 0;
};

}  // namespace mla
