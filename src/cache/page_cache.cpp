#include "cache/page_cache.hpp"

#include <cassert>
#include <string>

#include "mla/error.hpp"

namespace mla::cache {

int32_t PageCache::take() {
  if (allocator_.num_free() == 0) {
    const int32_t oldest = index_.oldest();
    assert(oldest != kNoPage);
    index_.unpark(oldest);
    forget(oldest);
  }
  return allocator_.take();
}

void PageCache::hold(int32_t page) {
  if (index_.is_parked(page)) index_.unpark(page);
  allocator_.hold(page);
}

void PageCache::drop(int32_t page) {
  const int32_t left = allocator_.drop(page);
  if (left == 1 && index_.contains(page)) index_.park(page);
}

void PageCache::drop_backwards(std::span<const int32_t> pages) {
  for (size_t i = pages.size(); i-- > 0;) drop(pages[i]);
}

bool PageCache::enter(const PageKey& key, int32_t parent, int32_t page) {
  if (!index_.insert(key, parent, page)) return false;
  allocator_.hold(page);
  return true;
}

void PageCache::forget(int32_t page) {
  index_.erase(page);
  allocator_.drop(page);
}

void PageCache::forget_all() {
  for (int32_t page = 0; page < num_pages(); ++page) {
    if (!index_.contains(page)) continue;
    if (index_.is_parked(page)) index_.unpark(page);
    forget(page);
  }
}

namespace {

[[noreturn]] void refuse(int32_t page, const char* expected, const std::string& got) {
  throw_state({.what = "page " + std::to_string(page),
               .where = "KvResource::check",
               .expected = expected,
               .got = got});
}

}  // namespace

void PageCache::check(std::span<const int32_t> holders) const {
  std::vector<int32_t> times_free(num_pages(), 0);
  for (const int32_t page : allocator_.free_pages()) ++times_free[page];
  std::vector<int32_t> place(num_pages(), kNoPage);  // in the order of eviction
  int32_t num_listed = 0;
  for (int32_t page = index_.oldest(); page != kNoPage && num_listed <= index_.num_parked();
       page = index_.younger(page)) {
    place[page] = num_listed++;
  }

  int32_t num_indexed = 0;
  for (int32_t page = 0; page < num_pages(); ++page) {
    const bool indexed = index_.contains(page);
    num_indexed += indexed ? 1 : 0;
    const int32_t refs = holders[page] + (indexed ? 1 : 0);
    if (refs != allocator_.refs(page)) {
      refuse(page, "as many references as holders",
             std::to_string(allocator_.refs(page)) + " references, " + std::to_string(refs) +
                 " holders");
    }
    if (times_free[page] != (refs == 0 ? 1 : 0)) {
      refuse(
          page, "to be free once without holders, else never",
          std::to_string(refs) + " holders, free " + std::to_string(times_free[page]) + " times");
    }
    if ((place[page] != kNoPage) != (indexed && refs == 1)) {
      refuse(page, "to be evictable if the prefix index alone holds it", "the contrary");
    }
    const int32_t parent = indexed ? index_.parent(page) : kNoPage;
    if (parent == kNoPage) continue;
    if (!index_.contains(parent)) {
      refuse(page, "an indexed page before it in its prefix",
             "page " + std::to_string(parent) + ", which is not");
    }
    if (place[parent] != kNoPage && (place[page] == kNoPage || place[page] > place[parent])) {
      refuse(page, "to be evicted before the page before it in its prefix", "the contrary");
    }
  }
  if (num_indexed != index_.size() || num_listed != index_.num_parked()) {
    throw_state({.what = "prefix index",
                 .where = "KvResource::check",
                 .expected = std::to_string(index_.size()) + " pages, " +
                             std::to_string(index_.num_parked()) + " of them evictable",
                 .got = std::to_string(num_indexed) + ", " + std::to_string(num_listed)});
  }
}

}  // namespace mla::cache
