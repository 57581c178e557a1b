#pragma once

#include <cassert>
#include <cstdint>
#include <vector>

namespace mla::cache {

/// Pages 0 .. num_pages - 1 with a count of holders each; a page without holders is free. All
/// calls are O(1) and allocate nothing. The page freed last is handed out first: its rows are the
/// likeliest to be in a cache.
class PageAllocator {
 public:
  explicit PageAllocator(int32_t num_pages);

  int32_t num_pages() const { return static_cast<int32_t>(refs_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t refs(int32_t page) const { return refs_[page]; }
  const std::vector<int32_t>& free_pages() const { return free_; }

  /// A free page, now with one holder. There must be one.
  int32_t take() {
    assert(!free_.empty());
    const int32_t page = free_.back();
    free_.pop_back();
    refs_[page] = 1;
    return page;
  }
  /// One more holder of a page that has some.
  void hold(int32_t page) {
    assert(refs_[page] > 0);
    ++refs_[page];
  }
  /// One holder less. Returns how many are left; at 0 the page is free.
  int32_t drop(int32_t page) {
    assert(refs_[page] > 0);
    if (--refs_[page] == 0) free_.push_back(page);
    return refs_[page];
  }

 private:
  std::vector<int32_t> refs_;
  std::vector<int32_t> free_;  // a stack; its capacity is num_pages from the start
};

}  // namespace mla::cache
