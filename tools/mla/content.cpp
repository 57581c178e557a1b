#include "mla/content.hpp"

#include "cases/random.hpp"

namespace mla::cli {
namespace {

// Each layer has a stream of latent rows and one of queries.
uint64_t stream_of(uint64_t seed, int32_t layer, bool query) {
  return cases::row_key(seed, static_cast<uint64_t>(layer), query ? 1 : 0);
}

}  // namespace

void Content::latent_row(uint64_t content, int64_t position, int32_t layer, void* out) const {
  const uint64_t key =
      cases::row_key(stream_of(seed_, layer, false), content, static_cast<uint64_t>(position));
  cases::fill_uniform(key, dtype_, out, latent_width_);
}

void Content::query(uint64_t content, int64_t position, int32_t layer, void* out) const {
  const uint64_t key =
      cases::row_key(stream_of(seed_, layer, true), content, static_cast<uint64_t>(position));
  cases::fill_uniform(key, dtype_, out, num_heads_ * latent_width_);
}

}  // namespace mla::cli
