#include "engine/mini_engine.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

namespace mla::engine {
namespace {

constexpr int32_t kRank = MiniEngine::kRank, kRope = MiniEngine::kRope, kLatent = kRank + kRope;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

MiniEngine::MiniEngine(const MiniEngineOptions& options)
    : pool({.num_layers = options.num_layers,
            .num_pages = options.num_pages,
            .page_size = options.page_size,
            .kv_lora_rank = kRank,
            .qk_rope_head_dim = kRope,
            .dtype = DType::kFloat32,
            .device = options.device,
            .memory = {}}),
      kv(pool, {.check_every_call = true}),
      attention(pool, "kv",
                {.geometry = AttentionResource::geometry_of(pool, options.num_heads),
                 .sm_scale = kScale,
                 .limits = options.limits,
                 .capture = options.capture,
                 .kernel = test::test_kernel(options.device),
                 .executor = std::make_shared<Executor>(1)}),
      runner({&kv, &attention}),
      options_(options) {}

Step MiniEngine::step_of(std::vector<Segment> segments) {
  Step step;
  kv_part(step).segments = std::move(segments);
  attention_part(step);
  return step;
}

void MiniEngine::fill_row(RowId row, int32_t layer, float* out) {
  cases::fill_uniform(cases::row_key(1, row, static_cast<uint64_t>(layer)), DType::kFloat32, out,
                      kLatent);
}

std::vector<float> MiniEngine::queries(int64_t num_tokens, int32_t num_heads) {
  std::vector<float> values(num_tokens * num_heads * kLatent);
  for (int64_t row = 0; row < num_tokens * num_heads; ++row) {
    cases::fill_uniform(cases::row_key(2, static_cast<uint64_t>(row), 0), DType::kFloat32,
                        &values[row * kLatent], kLatent);
  }
  return values;
}

void MiniEngine::write_rows(const LabelPlan& plan, const std::vector<RowId>& ids) {
  std::vector<float> values(ids.size() * kLatent);
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    for (size_t i = 0; i < ids.size(); ++i) fill_row(ids[i], layer, &values[i * kLatent]);
    rows_.assign(values);
    const auto view = rows_.view(std::array<int64_t, 2>{std::ssize(ids), kLatent});
    kv.write(layer, plan.label, columns(view, 0, kRank), columns(view, kRank, kRope));
  }
}

std::vector<RowId> MiniEngine::name_new_rows(const LabelPlan& plan) {
  std::vector<RowId> ids;
  for (const KvView& view : plan.views) {
    std::vector<RowId>& rows =
        written_.emplace_back(StreamName{view.request, view.label}, std::vector<RowId>{}).second;
    for (int64_t i = 0; i < view.to_compute; ++i) rows.push_back(next_row_++);
    ids.insert(ids.end(), rows.begin(), rows.end());
  }
  return ids;
}

void MiniEngine::write_new_rows() {
  for (const LabelPlan& plan : runner.results().get<KvPlan>("kv").labels) {
    write_rows(plan, name_new_rows(plan));
  }
}

void MiniEngine::write_row_ids(const std::vector<RowId>& ids) {
  write_rows(runner.results().get<KvPlan>("kv").labels[0], ids);
}

void MiniEngine::abandon() {
  runner.abandon();
  written_.clear();
}

void MiniEngine::commit() {
  runner.commit();
  for (auto& [name, rows] : written_) {
    stored_[name].insert(stored_[name].end(), rows.begin(), rows.end());
  }
  written_.clear();
}

void MiniEngine::serve(std::vector<Segment> segments) {
  const Step step = step_of(std::move(segments));
  ASSERT_TRUE(runner.admit(step));
  runner.plan(step);
  write_new_rows();
  commit();
}

std::vector<RowId> MiniEngine::rows_with_new(const StreamName& name) const {
  const auto stored = stored_.find(name);
  std::vector<RowId> all = stored == stored_.end() ? std::vector<RowId>{} : stored->second;
  for (const auto& [written, rows] : written_) {
    if (written == name) all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

void MiniEngine::forget_last(const StreamName& name, size_t count) {
  std::vector<RowId>& rows = stored_.at(name);
  rows.resize(rows.size() - count);
}

MiniEngine::Output MiniEngine::attend(std::string_view label, int32_t pass, int32_t layer,
                                      std::optional<int64_t> bucket_tokens) {
  const int64_t tokens = bucket_tokens ? *bucket_tokens : qo_indptr(label, pass).back();
  const int64_t heads = options_.num_heads;
  query_.assign(queries(tokens, options_.num_heads));
  out_.assign(std::vector<float>(tokens * heads * kRank, kNan));
  lse_.assign(std::vector<float>(tokens * heads, kNan));
  const auto q = query_.view(std::array<int64_t, 3>{tokens, heads, kLatent});
  attention.run({.q_nope = columns(q, 0, kRank),
                 .q_pe = columns(q, kRank, kRope),
                 .out = out_.view(std::array<int64_t, 3>{tokens, heads, kRank}),
                 .lse = lse_.view(std::array<int64_t, 2>{tokens, heads}),
                 .label = label,
                 .layer = layer,
                 .pass = pass});
  return {.num_tokens = tokens, .out = out_.read(), .lse = lse_.read()};
}

void MiniEngine::expect_attends(std::string_view label, int32_t pass, bool causal,
                                const std::vector<ExpectedRow>& expected,
                                std::optional<Bucket> bucket) {
  SCOPED_TRACE("label " + std::string(label) + ", pass " + std::to_string(pass));
  std::vector<int32_t> wanted_qo{0}, wanted_len;
  for (const ExpectedRow& row : expected) {
    wanted_qo.push_back(wanted_qo.back() + row.num_queries);
    wanted_len.push_back(static_cast<int32_t>(row.keys.size()));
  }
  const int64_t live_tokens = wanted_qo.back();
  if (bucket) {
    wanted_qo.resize(bucket->num_rows + 1, wanted_qo.back());
    wanted_len.resize(bucket->num_rows, 0);
  }
  ASSERT_EQ(qo_indptr(label, pass), wanted_qo);
  ASSERT_EQ(kv_len(label, pass), wanted_len);

  const int64_t tokens = bucket ? bucket->num_tokens : live_tokens;
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    SCOPED_TRACE("layer " + std::to_string(layer));
    expect_output(attend(label, pass, layer, tokens), layer, causal, expected);
  }
}

void MiniEngine::expect_output(const Output& got, int32_t layer, bool causal,
                               const std::vector<ExpectedRow>& expected) const {
  int64_t token = 0;
  for (size_t r = 0; r < expected.size(); ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    expect_row(got, layer, token, expected[r], causal);
    token += expected[r].num_queries;
  }
  for (size_t i = token * options_.num_heads; i < got.lse.size(); ++i) {
    ASSERT_EQ(got.lse[i], -std::numeric_limits<float>::infinity()) << "padding";
    for (int32_t c = 0; c < kRank; ++c) ASSERT_EQ(got.out[i * kRank + c], 0.0F) << "padding";
  }
}

// The row by itself, over a cache of one page that holds its keys.
void MiniEngine::expect_row(const Output& got, int32_t layer, int64_t first_token,
                            const ExpectedRow& row, bool causal) const {
  const int64_t heads = options_.num_heads;
  const auto length = static_cast<int32_t>(row.keys.size());
  const int64_t page_size = std::max(length, 1);
  std::vector<float> cache(page_size * kLatent, kNan);
  for (size_t i = 0; i < row.keys.size(); ++i) fill_row(row.keys[i], layer, &cache[i * kLatent]);
  Geometry geometry = AttentionResource::geometry_of(pool, options_.num_heads);
  geometry.page_size = static_cast<int32_t>(page_size);
  const std::array<int32_t, 2> qo = {0, row.num_queries}, pages = {0, length == 0 ? 0 : 1};
  const std::array<int32_t, 1> page = {0}, len = {length};
  const Batch batch{.qo_indptr = qo,
                    .kv_indptr = pages,
                    .kv_indices = page,
                    .kv_len = len,
                    .kv_last_page_len = {}};
  const std::vector<float> query = queries(first_token + row.num_queries, options_.num_heads);
  const TensorView<const float, 3> q =
      contiguous_view(query.data() + first_token * heads * kLatent,
                      std::array<int64_t, 3>{row.num_queries, heads, kLatent});
  const ConstTensor<3> page_view =
      contiguous_view(cache.data(), std::array<int64_t, 3>{1, page_size, kLatent});
  for (int64_t at = 0; at < row.num_queries * heads; ++at) {
    std::array<double, kRank> want{};
    const ReferenceRow reference = reference_row(
        geometry, batch, kScale, causal, columns(q, 0, kRank), columns(q, kRank, kRope),
        split_latent(page_view, kRank), at / heads, at % heads, want);
    const size_t got_at = first_token * heads + at;
    if (std::isinf(reference.lse)) {
      ASSERT_EQ(got.lse[got_at], -std::numeric_limits<float>::infinity());
    } else {
      ASSERT_NEAR(got.lse[got_at], reference.lse, 1e-5) << "query " << at / heads;
    }
    for (int32_t c = 0; c < kRank; ++c) {
      ASSERT_NEAR(got.out[got_at * kRank + c], want[c], 1e-5)
          << "query " << at / heads << " head " << at % heads;
    }
  }
}

std::vector<int32_t> MiniEngine::qo_indptr(std::string_view label, int32_t pass) const {
  return test::read_back(attention.qo_indptr_buf(label, pass));
}

std::vector<int32_t> MiniEngine::kv_len(std::string_view label, int32_t pass) const {
  return test::read_back(attention.kv_len_buf(label, pass));
}

}  // namespace mla::engine
