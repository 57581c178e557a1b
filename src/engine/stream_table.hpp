#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cache/prefix_index.hpp"
#include "mla/kv_resource.hpp"
#include "mla/page_key.hpp"

namespace mla::engine {

/// What one cache stream holds.
struct StreamState {
  RequestId request = 0;
  int32_t label = 0;
  int64_t length = 0;                // tokens stored
  std::vector<int32_t> pages{};      // those of `length`, then the ones taken for the current step
  std::vector<PageKey> page_keys{};  // as the prefix index knows them: the label is part of them
  int64_t num_indexed = 0;           // leading pages that the index has under these keys
  int32_t step_span = 0;             // rows that the current step appends
  bool in_step = false;              // the current step reads, extends or forks it
  bool in_early = false;             // the pre-admitted step does
  bool forks_at_commit = false;      // the current step forks it, or makes it, at its commit
  bool pending = false;              // target of a fork that is not made yet: unknown to callers
  uint64_t seen_in = 0;              // the last list of segments that named it
};

/// The open streams by request and label. Labels become small numbers at their first use. A
/// stream's address stays until it is erased.
class StreamTable {
  struct Key {
    RequestId request = 0;
    int32_t label = 0;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const noexcept {
      return detail::mix_bits(key.request + 0x9e3779b97f4a7c15U * static_cast<uint64_t>(key.label));
    }
  };
  using Map = std::unordered_map<Key, StreamState, KeyHash>;

 public:
  /// A stream outside the table.
  using Node = Map::node_type;

  StreamState* find(RequestId request, std::string_view label);
  const StreamState* find(RequestId request, std::string_view label) const;
  StreamState* find(RequestId request, int32_t label);
  /// The stream must not exist.
  StreamState& insert(RequestId request, std::string_view label);
  /// The label's number; a new one at its first use.
  int32_t number_of(std::string_view label);
  void erase(const StreamState& stream);
  /// Takes the stream out of the table, at its address, and puts it back: which cannot fail where
  /// the table has not grown meanwhile.
  Node take_out(const StreamState& stream);
  void put_back(Node stream);

  int32_t num_labels() const { return static_cast<int32_t>(labels_.size()); }
  /// Lives as long as the table.
  std::string_view label_name(int32_t label) const { return labels_[label]; }

  template <class Fn>
  void for_each(const Fn& fn) {
    for (auto& [key, stream] : streams_) fn(stream);
  }
  template <class Fn>
  void for_each(const Fn& fn) const {
    for (const auto& [key, stream] : streams_) fn(stream);
  }

 private:
  int32_t find_label(std::string_view label) const;  // -1: never used

  std::deque<std::string> labels_;  // a deque, so that names keep their addresses
  Map streams_;
};

}  // namespace mla::engine
