#include "mla/step_executor.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "mla/clock.hpp"

namespace mla::cli {
namespace {

Geometry geometry_of(const ReplayOptions& options) {
  return {.num_heads = options.num_heads,
          .kv_lora_rank = options.kv_lora_rank,
          .qk_rope_head_dim = options.qk_rope_head_dim,
          .page_size = options.page_size,
          .dtype = options.dtype,
          .kv_dtype = options.dtype};
}

// Page ids that the largest step can list: the longest requests at work together. Shared pages
// count once for each request.
int64_t most_listed_pages(const ReplayOptions& options, const std::vector<Request>& requests) {
  std::vector<int64_t> pages;
  pages.reserve(requests.size());
  for (const Request& request : requests) {
    pages.push_back((request.stored_tokens() + options.page_size - 1) / options.page_size);
  }
  std::ranges::sort(pages, std::greater<>());
  int64_t total = 0;
  const int64_t rows = std::min(options.max_running, static_cast<int64_t>(pages.size()));
  for (int64_t i = 0; i < rows; ++i) total += pages[static_cast<size_t>(i)];
  return std::min(total, kMaxListedPages);
}

AttentionConfig config_of(const ReplayOptions& options, const std::vector<Request>& requests,
                          const LatentPool& pool, std::shared_ptr<Executor> executor) {
  AttentionConfig config;
  config.geometry = geometry_of(options);
  config.num_pages = pool.total_pages();
  config.limits = {.max_rows = options.max_running,
                   .max_tokens = options.token_budget,
                   .max_listed_pages = most_listed_pages(options, requests)};
  config.kernel = options.kernel;
  config.executor = std::move(executor);
  return config;
}

// Runs `work` and adds the seconds it took.
template <class Work>
void timed(double& seconds, const Work& work) {
  const double begin = now_s();
  work();
  seconds += now_s() - begin;
}

}  // namespace

StepExecutor::StepExecutor(const ReplayOptions& options, const std::vector<Request>& requests,
                           LatentPool& pool, KvResource& kv)
    : requests_(requests),
      pool_(pool),
      kv_(kv),
      num_layers_(options.num_layers),
      geometry_(geometry_of(options)),
      plan_options_{.sm_scale = static_cast<float>(options.sm_scale), .causal = true},
      executor_(options.num_threads == 0 ? Executor::shared()
                                         : std::make_shared<Executor>(options.num_threads)),
      attention_(config_of(options, requests, pool, executor_)),
      content_(options.seed, options.dtype, geometry_.latent_width(), options.num_heads),
      checker_(options, geometry_, content_) {
  const auto budget = static_cast<size_t>(options.token_budget);
  const auto heads = static_cast<size_t>(options.num_heads);
  rows_.resize(budget * static_cast<size_t>(content_.latent_row_bytes()));
  queries_.resize(budget * static_cast<size_t>(content_.query_bytes()));
  out_.resize(budget * heads * static_cast<size_t>(options.kv_lora_rank * size_of(options.dtype)));
  lse_.resize(budget * heads);
}

int64_t StepExecutor::buffer_bytes(const ReplayOptions& options) {
  const int64_t width = int64_t{options.kv_lora_rank} + options.qk_rope_head_dim;
  const int64_t of_a_head = (width + options.kv_lora_rank) * size_of(options.dtype);
  const int64_t of_a_token =
      width * size_of(options.dtype) + options.num_heads * (of_a_head + int64_t{sizeof(float)});
  return options.token_budget * of_a_token;
}

double StepExecutor::run(const std::vector<StepItem>& items, ReplayStats& stats) {
  lay_out_tokens(items);
  checker_.choose(items);
  count_work(items, stats);
  ReplayStats times;  // of this step
  timed(times.plan_s, [&] {
    kv_.plan();
    attention_.plan(kv_.label_plan().batch(), plan_options_);
  });

  const auto num_tokens = static_cast<int64_t>(tokens_.size());
  const int64_t rank = geometry_.kv_lora_rank;
  const int64_t rope = geometry_.qk_rope_head_dim;
  const int64_t heads = geometry_.num_heads;
  const DType dtype = geometry_.dtype;
  const ConstTensor<2> rows = contiguous_view(static_cast<const void*>(rows_.data()),
                                              std::array{num_tokens, rank + rope}, dtype);
  const ConstTensor<3> queries = contiguous_view(static_cast<const void*>(queries_.data()),
                                                 std::array{num_tokens, heads, rank + rope}, dtype);
  const Tensor<3> out =
      contiguous_view(static_cast<void*>(out_.data()), std::array{num_tokens, heads, rank}, dtype);
  const TensorView<float, 2> lse = contiguous_view(lse_.data(), std::array{num_tokens, heads});

  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    timed(times.generate_s, [&] { draw(layer); });
    timed(times.append_s,
          [&] { kv_.write(layer, "main", columns(rows, 0, rank), columns(rows, rank, rope)); });
    timed(times.attention_s, [&] {
      attention_.run({.q_nope = columns(queries, 0, rank),
                      .q_pe = columns(queries, rank, rope),
                      .cache = std::as_const(pool_).views(layer),
                      .out = out,
                      .lse = lse});
    });
    timed(times.check_s, [&] { checker_.check(requests_, layer, out, lse, stats); });
  }
  timed(times.append_s, [&] { kv_.commit(); });

  stats.plan_s += times.plan_s;
  stats.append_s += times.append_s;
  stats.attention_s += times.attention_s;
  stats.generate_s += times.generate_s;
  stats.check_s += times.check_s;
  return times.plan_s + times.append_s + times.attention_s;
}

void StepExecutor::lay_out_tokens(const std::vector<StepItem>& items) {
  tokens_.clear();
  for (const StepItem& item : items) {
    const Request* request = &requests_[static_cast<size_t>(item.request)];
    for (int64_t i = 0; i < item.span; ++i) tokens_.push_back({request, item.begin + i});
  }
}

void StepExecutor::draw(int32_t layer) {
  const int num_workers = executor_->num_threads();
  executor_->run([&](int worker) {
    for (size_t t = static_cast<size_t>(worker); t < tokens_.size(); t += num_workers) {
      const auto [request, position] = tokens_[t];
      const auto row = static_cast<int64_t>(t);
      content_.latent_row(*request, position, layer,
                          rows_.data() + row * content_.latent_row_bytes());
      content_.query(*request, position, layer, queries_.data() + row * content_.query_bytes());
    }
  });
}

void StepExecutor::count_work(const std::vector<StepItem>& items, ReplayStats& stats) const {
  const auto heads = static_cast<double>(geometry_.num_heads);
  const auto width = static_cast<double>(geometry_.latent_width());
  const auto rank = static_cast<double>(geometry_.kv_lora_rank);
  const auto element_bytes = static_cast<double>(size_of(geometry_.dtype));
  for (const StepItem& item : items) {
    const auto begin = static_cast<double>(item.begin);
    const auto span = static_cast<double>(item.span);
    const double visible = span * begin + span * (span + 1) / 2;  // of (query, key) pairs
    const double elements = (begin + span) * width + span * heads * (width + rank);
    stats.attention_flops += num_layers_ * 2 * heads * (width + rank) * visible;
    stats.attention_bytes += num_layers_ * element_bytes * elements;
  }
}

}  // namespace mla::cli
