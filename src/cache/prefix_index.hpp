#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "mla/page_key.hpp"

namespace mla::cache {

inline constexpr int32_t kNoPage = -1;

/// Which full page holds the content of a key, and in which order the pages that nobody else holds
/// may be evicted. Knows keys and pages only: who holds a page is for PageCache to say.
///
/// A page is indexed below its parent, the page before it in the prefix, which must be indexed
/// already. Parked pages form a list, the least recently parked first.
class PrefixIndex {
 public:
  explicit PrefixIndex(int32_t num_pages) : nodes_(num_pages) {}

  /// The page of `key` below `parent` (kNoPage: the first of a prefix); kNoPage where there is
  /// none. A key that is known below another parent is not this key: such keys collide.
  int32_t find(const PageKey& key, int32_t parent) const;
  /// Indexes `page`. False, and nothing changes, where the key is known.
  bool insert(const PageKey& key, int32_t parent, int32_t page);
  /// Forgets a page; it must not be parked, nor be the parent of an indexed page.
  void erase(int32_t page);

  bool contains(int32_t page) const { return nodes_[page].indexed; }
  int32_t parent(int32_t page) const { return nodes_[page].parent; }
  int32_t size() const { return static_cast<int32_t>(page_of_key_.size()); }

  void park(int32_t page);
  void unpark(int32_t page);
  bool is_parked(int32_t page) const { return nodes_[page].parked; }
  int32_t num_parked() const { return num_parked_; }
  /// The page that was parked longest ago; kNoPage where none is.
  int32_t oldest() const { return oldest_; }
  /// The next one in the list.
  int32_t younger(int32_t page) const { return nodes_[page].younger; }

 private:
  struct Node {
    PageKey key;
    int32_t parent = kNoPage;
    int32_t older = kNoPage;
    int32_t younger = kNoPage;
    bool indexed = false;
    bool parked = false;
  };

  std::vector<Node> nodes_;  // [num_pages]
  std::unordered_map<PageKey, int32_t, PageKeyHash> page_of_key_;
  int32_t oldest_ = kNoPage;
  int32_t youngest_ = kNoPage;
  int32_t num_parked_ = 0;
};

}  // namespace mla::cache
