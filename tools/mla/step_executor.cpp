#include "mla/step_executor.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "cases/error_bound.hpp"
#include "mla/clock.hpp"
#include "mla/supports.hpp"

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
    pages.push_back(pages_of(request.peak_tokens(options.num_drafts), options.page_size));
  }
  std::ranges::sort(pages, std::greater<>());
  int64_t total = 0;
  const int64_t rows = std::min(options.max_running, static_cast<int64_t>(pages.size()));
  for (int64_t i = 0; i < rows; ++i) total += pages[static_cast<size_t>(i)];
  return std::min(total, kMaxListedPages);
}

AttentionOptions attention_options(const ReplayOptions& options,
                                   const std::vector<Request>& requests,
                                   std::shared_ptr<Executor> executor) {
  AttentionOptions attention;
  attention.geometry = geometry_of(options);
  attention.sm_scale = static_cast<float>(options.sm_scale);
  attention.limits = {.max_rows = options.max_running,
                      .max_tokens = options.token_budget,
                      .max_listed_pages = most_listed_pages(options, requests)};
  attention.kernel = options.kernel;
  attention.executor = std::move(executor);
  return attention;
}

double probability_rounding(const ReplayOptions& options, const std::string& kernel) {
  const Support support = supports(geometry_of(options), options.device, {}, kernel);
  return cases::probability_rounding(options.dtype, support.rounds_probabilities);
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
                           const LatentPool& pool, KvResource& kv)
    : requests_(requests),
      kv_(kv),
      num_layers_(options.num_layers),
      geometry_(geometry_of(options)),
      executor_(options.num_threads == 0 ? Executor::shared()
                                         : std::make_shared<Executor>(options.num_threads)),
      stream_(options.device),
      attention_(pool, kv.key(), attention_options(options, requests, executor_)),
      runner_({&kv, &attention_}),
      content_(options.seed, options.dtype, geometry_.latent_width(), options.num_heads),
      checker_(options, geometry_, content_, *executor_,
               probability_rounding(options, attention_.kernel())),
      tensors_(geometry_, options.token_budget, options.device) {
  step_.part<AttentionStep>(attention_.key());  // one causal pass over all rows of the step
}

int64_t StepExecutor::buffer_bytes(const ReplayOptions& options) {
  return StepTensors::bytes(geometry_of(options), options.token_budget);
}

AdmitResult StepExecutor::admit(const std::vector<StepItem>& items) {
  std::vector<Segment>& segments = step_.part<KvStep>(kv_.key()).segments;
  segments.clear();
  for (const StepItem& item : items) {
    segments.push_back({.request = static_cast<RequestId>(item.request), .span = item.span});
  }
  return runner_.admit(step_);
}

double StepExecutor::run(const std::vector<StepItem>& items, ReplayStats& stats) {
  lay_out_tokens(items);
  checker_.choose(items);
  count_work(items, stats);
  ReplayStats times;  // of this step
  timed(times.plan_s, [&] { runner_.plan(step_, {}, stream_); });
  const StepViews views = tensors_.views(static_cast<int64_t>(tokens_.size()));
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    run_layer(layer, views, times);
    timed(times.check_s, [&] { checker_.check(requests_, layer, tensors_, stream_, stats); });
  }
  timed(times.append_s, [&] { commit(items); });

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
    const Request& request = requests_[static_cast<size_t>(item.request)];
    for (int64_t position = item.begin; position < item.begin + item.span; ++position) {
      tokens_.push_back({content_key(request, item, position), position});
    }
  }
}

void StepExecutor::draw(int32_t layer) {
  keys_.clear();
  for (const auto& [content, position] : tokens_) {
    keys_.push_back({.row = content_.latent_key(content, position, layer),
                     .query = content_.query_key(content, position, layer)});
  }
  tensors_.draw(keys_, *executor_, stream_);
}

void StepExecutor::run_layer(int32_t layer, const StepViews& views, ReplayStats& times) {
  const int64_t rank = geometry_.kv_lora_rank;
  const int64_t rope = geometry_.qk_rope_head_dim;
  timed(times.generate_s, [&] {
    draw(layer);
    stream_.synchronize();
  });
  timed(times.append_s, [&] {
    kv_.write(layer, "main", columns(views.rows, 0, rank), columns(views.rows, rank, rope),
              stream_);
    stream_.synchronize();
  });
  timed(times.attention_s, [&] {
    attention_.run({.q_nope = columns(views.queries, 0, rank),
                    .q_pe = columns(views.queries, rank, rope),
                    .out = views.out,
                    .lse = views.lse,
                    .layer = layer},
                   stream_);
    stream_.synchronize();
  });
}

void StepExecutor::commit(const std::vector<StepItem>& items) {
  runner_.commit();
  for (const StepItem& item : items) {
    if (item.num_rejected() == 0) continue;
    kv_.trim({.request = static_cast<RequestId>(item.request)}, item.num_rejected());
  }
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
