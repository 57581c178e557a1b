#include <sys/resource.h>

#include "cases/problem.hpp"
#include "contract/contract.hpp"

namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE(PoolSizeContract);

int64_t touched_pages() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

// flashinfer/mla/_core.py, run() of one backend: latents and ropes were joined into a new tensor,
// so that the whole pool was copied by every run. Copying the pool of 4 GB here would touch a
// million pages of memory.
TEST_P(PoolSizeContract, RunTouchesTheRequestsOwnPagesOnly) {
  AttentionCase c{.q_lens = {1},
                  .kv_lens = {64},
                  .pool_pages = 60000,
                  .kernel = GetParam(),
                  .device = device()};
  cases::Problem problem(c);
  PagedAttention attention(problem.config());
  attention.plan(problem.batch(), cases::Problem::options_of(c));
  const int64_t before = touched_pages();
  problem.run(attention);
  EXPECT_LT(touched_pages() - before, 2000);
}

}  // namespace
}  // namespace mla::contract
