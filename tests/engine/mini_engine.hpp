#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cases/random.hpp"
#include "device/test_device.hpp"
#include "mla/mla.hpp"

namespace mla::engine {

using StreamName = std::pair<RequestId, std::string>;
// Names a cached row: its bytes follow from this number and the layer.
using RowId = uint64_t;

/// One row of a plan, as it should be: what its queries see, in order.
struct ExpectedRow {
  std::vector<RowId> keys;
  int32_t num_queries = 0;
};

struct MiniEngineOptions {
  int64_t num_pages = 32;
  int32_t page_size = 4;
  int32_t num_layers = 2;
  int32_t num_heads = 2;
  Device device = test::test_device();
  bool capture = false;
  Limits limits{.max_rows = 16, .max_tokens = 64, .max_listed_pages = 256};
};

/// A pool, the two resources and their runner, and a plain account of what each stream should hold,
/// so that tests can compare what the attention sees with what it ought to see.
class MiniEngine {
 public:
  static constexpr float kScale = 0.3F;
  static constexpr int32_t kRank = 8, kRope = 4;

  explicit MiniEngine(const MiniEngineOptions& options = {});

  LatentPool pool;
  KvResource kv;
  AttentionResource attention;
  StepRunner runner;

  /// A step over these segments with one causal pass.
  static Step step_of(std::vector<Segment> segments);
  static KvStep& kv_part(Step& step) { return step.part<KvStep>("kv"); }
  static AttentionStep& attention_part(Step& step) { return step.part<AttentionStep>("attention"); }

  /// Writes the new rows of every planned label to all layers, each with a RowId of its own.
  void write_new_rows();
  /// Gives the plan's new rows RowIds, without writing them.
  std::vector<RowId> name_new_rows(const LabelPlan& plan);
  static void fill_row(RowId row, int32_t layer, float* out);
  /// [T, H, rank + rope] queries: always the same for the same token.
  static std::vector<float> queries(int64_t num_tokens, int32_t num_heads);
  /// Writes these rows instead, to the one label that is planned.
  void write_row_ids(const std::vector<RowId>& ids);
  /// Abandons the runner's step and what was written for it.
  void abandon();
  /// Commits the runner's step; the rows that were written are stored.
  void commit();
  /// admit, plan, write_new_rows, commit.
  void serve(std::vector<Segment> segments);

  /// What the stream holds; with the rows that the planned step wrote, if wanted.
  std::vector<RowId> rows(const StreamName& name) const { return stored_.at(name); }
  std::vector<RowId> rows_with_new(const StreamName& name) const;
  void forget_last(const StreamName& name, size_t count);
  void set_rows(const StreamName& name, std::vector<RowId> rows) {
    stored_[name] = std::move(rows);
  }

  struct Output {
    int64_t num_tokens = 0;
    std::vector<float> out, lse;  // [T, H, rank], [T, H]
  };
  /// Runs the current plan of a label and pass. num_tokens: the plan's, or the bucket's if given.
  Output attend(std::string_view label, int32_t pass = 0, int32_t layer = 0,
                std::optional<int64_t> bucket_tokens = std::nullopt);
  /// Runs it and compares with the reference over exactly the expected keys, in every layer. Under
  /// a bucket it is run with all the bucket's tokens, whose others must come out empty.
  void expect_attends(std::string_view label, int32_t pass, bool causal,
                      const std::vector<ExpectedRow>& expected,
                      std::optional<Bucket> bucket = std::nullopt);

  /// Compares one layer's output: the rows in turn, then padding, which must be empty.
  void expect_output(const Output& got, int32_t layer, bool causal,
                     const std::vector<ExpectedRow>& expected) const;

  std::vector<int32_t> qo_indptr(std::string_view label, int32_t pass = 0) const;
  std::vector<int32_t> kv_len(std::string_view label, int32_t pass = 0) const;

 private:
  void write_rows(const LabelPlan& plan, const std::vector<RowId>& ids);
  void expect_row(const Output& got, int32_t layer, int64_t first_token, const ExpectedRow& row,
                  bool causal) const;

  const MiniEngineOptions options_;
  test::DeviceArray<float> rows_{options_.device}, query_{options_.device}, out_{options_.device},
      lse_{options_.device};  // of one call
  std::map<StreamName, std::vector<RowId>> stored_;
  std::vector<std::pair<StreamName, std::vector<RowId>>> written_;
  RowId next_row_ = 1;
};

}  // namespace mla::engine
