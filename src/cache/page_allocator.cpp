#include "cache/page_allocator.hpp"

namespace mla::cache {

PageAllocator::PageAllocator(int32_t num_pages) : refs_(num_pages, 0) {
  free_.reserve(num_pages);
  for (int32_t page = num_pages; page-- > 0;) free_.push_back(page);  // page 0 is taken first
}

}  // namespace mla::cache
