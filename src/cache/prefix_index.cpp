#include "cache/prefix_index.hpp"

#include <cassert>

namespace mla::cache {

int32_t PrefixIndex::find(const PageKey& key, int32_t parent) const {
  const auto found = page_of_key_.find(key);
  if (found == page_of_key_.end() || nodes_[found->second].parent != parent) return kNoPage;
  return found->second;
}

bool PrefixIndex::insert(const PageKey& key, int32_t parent, int32_t page) {
  assert(!nodes_[page].indexed);
  assert(parent == kNoPage || nodes_[parent].indexed);
  if (!page_of_key_.try_emplace(key, page).second) return false;
  nodes_[page] = {.key = key, .parent = parent, .indexed = true};
  return true;
}

void PrefixIndex::erase(int32_t page) {
  assert(nodes_[page].indexed && !nodes_[page].parked);
  page_of_key_.erase(nodes_[page].key);
  nodes_[page] = {};
}

void PrefixIndex::park(int32_t page) {
  Node& node = nodes_[page];
  assert(node.indexed && !node.parked);
  node.parked = true;
  node.older = youngest_;
  node.younger = kNoPage;
  (youngest_ == kNoPage ? oldest_ : nodes_[youngest_].younger) = page;
  youngest_ = page;
  ++num_parked_;
}

void PrefixIndex::unpark(int32_t page) {
  Node& node = nodes_[page];
  assert(node.parked);
  node.parked = false;
  (node.older == kNoPage ? oldest_ : nodes_[node.older].younger) = node.younger;
  (node.younger == kNoPage ? youngest_ : nodes_[node.younger].older) = node.older;
  --num_parked_;
}

}  // namespace mla::cache
