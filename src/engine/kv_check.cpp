#include <string>
#include <utility>
#include <vector>

#include "engine/kv_state.hpp"
#include "mla/error.hpp"

namespace mla::engine {

using cache::kNoPage;

PageCounts KvState::check() const {
  std::vector<int32_t> holders(pages.num_pages(), 0);
  PageCounts counts;
  streams.for_each([&](const StreamState& stream) {
    check_stream(stream);
    for (const int32_t page : stream.pages) ++holders[page];
    counts.reserved +=
        static_cast<int64_t>(stream.pages.size()) - pages_of(stream.length, page_size);
  });
  const auto count_taken = [&](int32_t page) {
    if (page == kNoPage) return;
    ++holders[page];
    ++counts.reserved;
  };
  for (const StepEntry& entry : step.entries) count_taken(entry.copy_page);
  for (const StepEntry& entry : early.entries) count_taken(entry.copy_page);
  for (const int32_t page : early.taken) count_taken(page);
  pages.check(holders);
  for (int32_t page = 0; page < pages.num_pages(); ++page) {
    if (holders[page] == 0) {
      ++(pages.is_indexed(page) ? counts.cached : counts.free);
    } else {
      ++(pages.refs(page) == 1 ? counts.owned : counts.shared);
    }
  }
  counts.owned -= counts.reserved;  // each has one holder
  return counts;
}

void KvState::check_stream(const StreamState& stream) const {
  const auto refuse = [&](std::string expected, std::string got) {
    throw_state({name_of_stream(stream.request, streams.label_name(stream.label)),
                 "KvResource::check", std::move(expected), std::move(got)});
  };
  const int64_t num_used = pages_of(stream.length, page_size);
  const auto num_held = static_cast<int64_t>(stream.pages.size());
  if (num_held < num_used || (!stream.in_step && num_held > num_used)) {
    refuse("the pages of its tokens, and more in a step only",
           std::to_string(num_held) + " pages for " + std::to_string(stream.length) + " tokens");
  }
  for (int64_t i = num_used; i < num_held; ++i) {
    if (pages.refs(stream.pages[i]) == 1) continue;
    refuse("reserved pages of its own", "page " + std::to_string(stream.pages[i]) + " with " +
                                            std::to_string(pages.refs(stream.pages[i])) +
                                            " holders");
  }
  for (int64_t i = 0; i < num_held; ++i) {
    const int32_t before = i == 0 ? kNoPage : stream.pages[i - 1];
    if (!pages.is_indexed(stream.pages[i]) || pages.parent(stream.pages[i]) == before) continue;
    refuse("an indexed page behind the page before it in its prefix",
           "page " + std::to_string(stream.pages[i]) + " behind page " + std::to_string(before));
  }
  for (int64_t i = 0; i < stream.num_indexed; ++i) {
    const int32_t parent = i == 0 ? kNoPage : stream.pages[i - 1];
    if (pages.find(stream.page_keys[i], parent) == stream.pages[i]) continue;
    refuse("its first " + std::to_string(stream.num_indexed) + " pages in the prefix index",
           "page " + std::to_string(stream.pages[i]) + ", which is not there");
  }
}

}  // namespace mla::engine
