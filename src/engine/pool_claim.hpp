#pragma once

#include "mla/error.hpp"
#include "mla/pool.hpp"

namespace mla::engine {

/// Says for as long as it lives that somebody decides over the pool's pages: two who did would give
/// one page to two streams.
class PoolClaim {
 public:
  /// Throws InvalidState where the pool is claimed.
  PoolClaim(LatentPool& pool, const char* where) : pool_(pool) {
    if (pool.is_claimed_) {
      throw_state(
          {"pool", where, "one that no living KvResource decides over", "one with a KvResource"});
    }
    pool.is_claimed_ = true;
  }
  ~PoolClaim() { pool_.is_claimed_ = false; }
  PoolClaim(const PoolClaim&) = delete;
  PoolClaim& operator=(const PoolClaim&) = delete;

 private:
  LatentPool& pool_;
};

}  // namespace mla::engine
