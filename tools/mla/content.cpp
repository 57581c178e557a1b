#include "mla/content.hpp"

#include "cases/random.hpp"

namespace mla::cli {
namespace {

// Each layer has a stream of latent rows and one of queries.
uint64_t stream_of(uint64_t seed, int32_t layer, bool query) {
  return cases::row_key(seed, static_cast<uint64_t>(layer), query ? 1 : 0);
}

}  // namespace

uint64_t Content::latent_key(uint64_t content, int64_t position, int32_t layer) const {
  return cases::row_key(stream_of(seed_, layer, false), content, static_cast<uint64_t>(position));
}

uint64_t Content::query_key(uint64_t content, int64_t position, int32_t layer) const {
  return cases::row_key(stream_of(seed_, layer, true), content, static_cast<uint64_t>(position));
}

void Content::latent_row(uint64_t content, int64_t position, int32_t layer, void* out) const {
  cases::fill_uniform(latent_key(content, position, layer), dtype_, out, latent_width_);
}

void Content::query(uint64_t content, int64_t position, int32_t layer, void* out) const {
  cases::fill_uniform(query_key(content, position, layer), dtype_, out, num_heads_ * latent_width_);
}

}  // namespace mla::cli
