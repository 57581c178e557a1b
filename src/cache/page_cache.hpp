#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/page_allocator.hpp"
#include "cache/prefix_index.hpp"

namespace mla::cache {

/// Pages with counted holders, of which the prefix index is one: a full page that was entered
/// outlives its streams, cached, until pages run out.
///
/// Whoever holds an indexed page holds the pages before it in its prefix too, and drops them after
/// it. So a parent has never fewer holders than its child and is parked after it, and the oldest
/// cached page is always the last one of its prefix: evicting it orphans nothing.
class PageCache {
 public:
  explicit PageCache(int32_t num_pages) : allocator_(num_pages), index_(num_pages) {}

  int32_t num_pages() const { return allocator_.num_pages(); }
  int32_t num_free() const { return allocator_.num_free(); }
  int32_t num_cached() const { return index_.num_parked(); }
  int32_t num_available() const { return num_free() + num_cached(); }
  /// Holders of the page, the index included.
  int32_t refs(int32_t page) const { return allocator_.refs(page); }
  bool is_indexed(int32_t page) const { return index_.contains(page); }
  /// The page before an indexed page in its prefix.
  int32_t parent(int32_t page) const { return index_.parent(page); }

  /// A page with one holder: a free one, else the oldest cached one is evicted. One must be
  /// available.
  int32_t take();
  void hold(int32_t page);
  void drop(int32_t page);
  /// Drops the pages from the last to the first, as a prefix must be.
  void drop_backwards(std::span<const int32_t> pages);

  /// The page of `key` after the page `parent`, kNoPage where it is not known. Holds nothing.
  int32_t find(const PageKey& key, int32_t parent) const { return index_.find(key, parent); }
  /// Indexes the full page `page`. False where the key is known already, or collides.
  bool enter(const PageKey& key, int32_t parent, int32_t page);
  /// Takes a page out of the index that somebody holds. No page below it may be indexed.
  void forget(int32_t page);
  void forget_all();

  /// Throws InvalidState unless reference counts equal `holders` ([num_pages], without the index)
  /// plus the index's own, exactly the pages without any are free, and the index is whole.
  void check(std::span<const int32_t> holders) const;

 private:
  PageAllocator allocator_;
  PrefixIndex index_;
};

}  // namespace mla::cache
