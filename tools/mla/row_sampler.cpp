#include "mla/row_sampler.hpp"

#include <algorithm>
#include <numeric>

#include "cases/random.hpp"

namespace mla::cli {
namespace {

constexpr uint64_t kSampleStream = 0x5a4d504c45;  // keys the choice of samples

}  // namespace

std::vector<RowSample> RowSampler::choose(const std::vector<StepItem>& items, int64_t count) {
  std::vector<RowSample> samples;
  const std::vector<int64_t> shares = share_out(items, count);
  int64_t first_token = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const StepItem& item = items[i];
    if (shares[i] > 0) seen_.insert(item.request);
    for (const int64_t row : draw_set(shares[i], num_rows(item))) {
      const int64_t offset = row / num_heads_ % item.span;
      samples.push_back({.item = item,
                         .position = item.begin + offset,
                         .token = first_token + offset,
                         .layer = static_cast<int32_t>(row / num_heads_ / item.span),
                         .head = static_cast<int32_t>(row % num_heads_)});
    }
    first_token += item.span;
  }
  return samples;
}

int64_t RowSampler::num_rows(const StepItem& item) const {
  return int64_t{item.span} * num_layers_ * num_heads_;
}

std::vector<int64_t> RowSampler::share_out(const std::vector<StepItem>& items, int64_t count) {
  std::vector<int64_t> shares(items.size());
  std::vector<size_t> open(items.size());  // those with rows left
  std::iota(open.begin(), open.end(), 0);
  std::ranges::rotate(open, open.begin() + draw(static_cast<int64_t>(items.size())));
  std::ranges::stable_partition(open, [&](size_t i) { return !seen_.contains(items[i].request); });
  for (int64_t left = count; left > 0 && !open.empty();) {
    for (const size_t i : open) {
      if (left-- > 0) ++shares[i];
    }
    std::erase_if(open, [&](size_t i) { return shares[i] == num_rows(items[i]); });
  }
  return shares;
}

std::set<int64_t> RowSampler::draw_set(int64_t count, int64_t below) {
  std::set<int64_t> drawn;  // Floyd's sampling
  for (int64_t last = below - count; last < below; ++last) {
    if (!drawn.insert(draw(last + 1)).second) drawn.insert(last);
  }
  return drawn;
}

int64_t RowSampler::draw(int64_t below) {
  const uint64_t bits = cases::row_key(seed_, kSampleStream, num_drawn_++);
  return static_cast<int64_t>(bits % static_cast<uint64_t>(below));
}

}  // namespace mla::cli
