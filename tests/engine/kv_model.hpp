#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/kv_rows.hpp"
#include "mla/kv_resource.hpp"

namespace mla::engine {

/// What KvResource does, told plainly: pages are shared_ptrs whose use counts are the reference
/// counts, and every question is answered by looking through everything. No page numbers.
class KvModel {
 public:
  struct Page {};
  using PagePtr = std::shared_ptr<Page>;
  using StreamName = std::pair<RequestId, std::string>;
  using IndexKey = std::pair<std::string, std::pair<uint64_t, uint64_t>>;  // label, key
  struct Stream {
    std::vector<Token> tokens;
    std::vector<PagePtr> pages;
    PagePtr copy;  // reserved for the copy of the page that the next row goes to
    std::vector<PageKey> keys;
  };
  struct Planned {
    StreamName name;
    int32_t span = 0;
  };
  /// What happened so far, so that a test can tell that it was not idle.
  struct Tally {
    int64_t copies = 0, last_holders = 0, evictions = 0, forgotten = 0, merged = 0, matched = 0;
    int64_t refusals = 0;
  };

  KvModel(int64_t num_pages, int32_t page_size) : num_pages_(num_pages), page_size_(page_size) {}

  std::map<StreamName, Stream> streams;
  std::vector<Planned> step;
  Tally tally;

  bool in_step(const StreamName& name) const {
    return std::ranges::any_of(step, [&](const Planned& p) { return p.name == name; });
  }

  int64_t open(const StreamName& name, const std::vector<Token>& prompt,
               const std::vector<PageKey>& keys) {
    Stream& stream = streams[name];
    stream.keys = keys;
    const size_t num_full = prompt.size() / page_size_;
    for (size_t i = 0; i < std::min(num_full, keys.size()); ++i) {
      const auto found = index_.find(index_key(name, keys[i]));
      if (found == index_.end()) break;
      stream.pages.push_back(found->second.page);
      ++tally.matched;
    }
    const size_t known = stream.pages.size() * page_size_;
    stream.tokens = {prompt.begin(),
                     prompt.begin() + std::min(known, prompt.empty() ? 0 : prompt.size() - 1)};
    stream.pages.resize(pages_of(stream.tokens.size()));
    return static_cast<int64_t>(stream.tokens.size());
  }

  void fork(const StreamName& source, const StreamName& target) {
    Stream copy = streams.at(source);
    copy.keys.resize(source.second == target.second
                         ? std::min(copy.keys.size(), copy.tokens.size() / page_size_)
                         : 0);
    streams[target] = std::move(copy);
  }

  /// Pages short for each segment; nothing is reserved unless all are 0.
  std::vector<int64_t> admit(const std::vector<Planned>& segments) {
    std::map<const Page*, long> leavers;
    std::vector<int64_t> lacking;
    std::vector<Stream*> needed_copies;
    std::vector<Stream*> optional_copies;
    int64_t available = num_pages_ - static_cast<int64_t>(held_pages().size());
    for (const Planned& segment : segments) {
      Stream& stream = streams.at(segment.name);
      int64_t need = new_pages(stream, segment.span);
      if (segment.span > 0 && stream.tokens.size() % page_size_ != 0) {
        const PagePtr& tail = stream.pages.back();
        const long others = tail.use_count() - leavers[tail.get()] - 1;
        if (others == 0 && tail.use_count() > 1) ++tally.last_holders;
        if (others > 0) ++leavers[tail.get()];
        if (others == 1 && is_indexed(tail)) {
          optional_copies.push_back(&stream);
        } else if (others > 0) {
          needed_copies.push_back(&stream);
          ++need;
        }
      }
      lacking.push_back(std::max<int64_t>(need - std::max<int64_t>(available, 0), 0));
      available -= need;
    }
    if (available < 0) {
      ++tally.refusals;
      return lacking;
    }
    for (const Planned& segment : segments) {
      Stream& stream = streams.at(segment.name);
      for (int64_t i = new_pages(stream, segment.span); i > 0; --i) stream.pages.push_back(take());
    }
    for (Stream* stream : needed_copies) stream->copy = take();
    for (Stream* stream : optional_copies) {
      if (static_cast<int64_t>(held_pages().size()) < num_pages_) {
        stream->copy = take();
      } else {
        const PagePtr tail = stream->pages[stream->tokens.size() / page_size_];
        std::erase_if(index_, [&](const auto& entry) { return entry.second.page == tail; });
        ++tally.forgotten;
      }
    }
    step = segments;
    return lacking;
  }

  void plan() {
    for (const Planned& planned : step) {
      Stream& stream = streams.at(planned.name);
      if (!stream.copy) continue;
      ++tally.copies;
      std::swap(stream.pages[stream.tokens.size() / page_size_], stream.copy);
      drop(stream.copy);
    }
  }

  void abandon() {
    for (const Planned& planned : step) {
      Stream& stream = streams.at(planned.name);
      stream.pages.resize(pages_of(stream.tokens.size()));
      stream.copy.reset();
    }
    step.clear();
  }

  /// new_tokens[i] are those of the i-th segment.
  void commit(const std::vector<std::vector<Token>>& new_tokens) {
    for (size_t s = 0; s < step.size(); ++s) {
      Stream& stream = streams.at(step[s].name);
      stream.tokens.insert(stream.tokens.end(), new_tokens[s].begin(), new_tokens[s].end());
      const size_t num_full = stream.tokens.size() / page_size_;
      for (size_t i = 0; i < std::min(num_full, stream.keys.size()); ++i) {
        const auto known = index_.find(index_key(step[s].name, stream.keys[i]));
        if (known != index_.end() && known->second.page == stream.pages[i]) continue;
        if (known == index_.end()) {
          if (is_indexed(stream.pages[i])) break;  // for another label
          index_[index_key(step[s].name, stream.keys[i])] = {stream.pages[i], 0};
          continue;
        }
        if (stream.pages[i].use_count() > 1) break;
        stream.pages[i] = known->second.page;
        ++tally.merged;
      }
    }
    step.clear();
  }

  void trim(const StreamName& name, size_t num_tokens) {
    if (num_tokens == 0) return;
    Stream& stream = streams.at(name);
    stream.tokens.resize(stream.tokens.size() - num_tokens);
    stream.keys.resize(std::min(stream.keys.size(), stream.tokens.size() / page_size_));
    while (stream.pages.size() > pages_of(stream.tokens.size())) {
      drop(stream.pages.back());
      stream.pages.pop_back();
    }
  }

  void remove(RequestId request) {
    for (const char* label : {"main", "draft"}) {
      const auto found = streams.find({request, label});
      if (found == streams.end()) continue;
      while (!found->second.pages.empty()) {
        drop(found->second.pages.back());
        found->second.pages.pop_back();
      }
      streams.erase(found);
    }
  }

  void drop_prefixes() { index_.clear(); }

  PageCounts counts() const {
    PageCounts counts;
    std::set<const Page*> seen;
    const auto count = [&](const PagePtr& page, int64_t PageCounts::*kind) {
      if (seen.insert(page.get()).second) ++(counts.*kind);
    };
    for (const auto& [name, stream] : streams) {
      const size_t num_used = pages_of(stream.tokens.size());
      for (size_t i = 0; i < stream.pages.size(); ++i) {
        count(stream.pages[i], i >= num_used                      ? &PageCounts::reserved
                               : stream.pages[i].use_count() == 1 ? &PageCounts::owned
                                                                  : &PageCounts::shared);
      }
      if (stream.copy) count(stream.copy, &PageCounts::reserved);
    }
    for (const auto& [key, entry] : index_) count(entry.page, &PageCounts::cached);
    counts.free = num_pages_ - static_cast<int64_t>(seen.size());
    return counts;
  }

 private:
  struct Entry {
    PagePtr page;
    uint64_t cached_since = 0;
  };

  static IndexKey index_key(const StreamName& name, const PageKey& key) {
    return {name.second, {key.high, key.low}};
  }
  size_t pages_of(size_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }
  int64_t new_pages(const Stream& stream, int32_t span) const {
    return static_cast<int64_t>(pages_of(stream.tokens.size() + span) - stream.pages.size());
  }
  bool is_indexed(const PagePtr& page) const {
    return std::ranges::any_of(index_, [&](const auto& e) { return e.second.page == page; });
  }
  /// Pages that streams hold.
  std::set<const Page*> held_pages() const {
    std::set<const Page*> held;
    for (const auto& [name, stream] : streams) {
      for (const PagePtr& page : stream.pages) held.insert(page.get());
      if (stream.copy) held.insert(stream.copy.get());
    }
    return held;
  }
  PagePtr take() {
    std::set<const Page*> held = held_pages();
    for (const auto& [key, entry] : index_) held.insert(entry.page.get());
    if (static_cast<int64_t>(held.size()) == num_pages_) {
      auto oldest = index_.end();
      for (auto it = index_.begin(); it != index_.end(); ++it) {
        if (it->second.page.use_count() > 1) continue;
        if (oldest == index_.end() || it->second.cached_since < oldest->second.cached_since) {
          oldest = it;
        }
      }
      index_.erase(oldest);
      ++tally.evictions;
    }
    return std::make_shared<Page>();
  }
  void drop(PagePtr& page) {
    for (auto& [key, entry] : index_) {
      if (entry.page == page) entry.cached_since = ++clock_;
    }
    page.reset();
  }

  int64_t num_pages_;
  size_t page_size_;
  std::map<IndexKey, Entry> index_;
  uint64_t clock_ = 0;
};

}  // namespace mla::engine
