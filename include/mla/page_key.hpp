#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mla {

/// Names the content of one full page together with everything before it: two pages with equal
/// keys hold equal rows after equal prefixes. 128 bits, so that a chance collision among 2^32 pages
/// has a probability below 2^-64.
struct PageKey {
  uint64_t high = 0;
  uint64_t low = 0;

  bool operator==(const PageKey&) const = default;
};

/// Hash of a key, for maps: the key is uniform already.
struct PageKeyHash {
  size_t operator()(const PageKey& key) const noexcept { return key.low; }
};

namespace detail {

/// Bijective mixing of 64 bits: every input bit reaches every output bit.
constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace detail

/// Key of the page that follows the page `previous` (the default key before the first page) and
/// whose content `ids` name: its token ids, or the ids of all the blocks that reach into it, in
/// order. Chaining makes the position and the whole prefix part of the key. Not a cryptographic
/// hash: where clients may choose ids so that keys collide, give keys of your own.
constexpr PageKey chain_key(PageKey previous, std::span<const uint64_t> ids) {
  PageKey key{.high = detail::mix_bits(previous.high + 0x9e3779b97f4a7c15U + ids.size()),
              .low = detail::mix_bits(previous.low + 0xd1b54a32d192ed03U)};
  for (const uint64_t id : ids) {
    key.high = detail::mix_bits((key.high ^ id) + 0x9e3779b97f4a7c15U);
    key.low = detail::mix_bits((key.low + id) ^ key.high);
  }
  return key;
}

}  // namespace mla
