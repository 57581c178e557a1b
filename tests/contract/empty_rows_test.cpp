#include "contract/contract.hpp"

namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE(EmptyRowsContract);

// flashinfer-ai/flashinfer PR 868: an empty cache in the middle of a batch.
TEST_P(EmptyRowsContract, RequestWithoutKeysIsEmptyAmongOthers) {
  AttentionCase c{.q_lens = {1, 1, 1}, .kv_lens = {5, 0, 7}};
  c.geometry.page_size = 4;
  expect_holds(c);
}

// vllm-project/vllm PR 37442: old bytes stayed in skipped rows. (Outputs start as NaN.)
TEST_P(EmptyRowsContract, EveryPlannedRowIsWritten) {
  AttentionCase c{.q_lens = std::vector<int32_t>(8, 1), .kv_lens = {12, 3, 40, 1, 5, 0, 0, 0}};
  expect_holds(c);
}

// vllm-project/vllm PR 57094: the merge of splits divided by a zero sum.
TEST_P(EmptyRowsContract, EmptyRowStaysEmptyWhenSplitsAreForced) {
  AttentionCase c{.q_lens = {1, 1, 1, 1}, .kv_lens = {17, 33, 9, 0}, .splits = {.forced_count = 4}};
  expect_holds(c);
}

// sgl-project/sglang issue 38773: idle ranks and empty micro-batches.
TEST_P(EmptyRowsContract, NothingToDoIsValid) {
  expect_holds({.name = "no requests", .q_lens = {}, .kv_lens = {}});
  expect_holds({.name = "no queries, no keys", .q_lens = {0, 0}, .kv_lens = {0, 0}});
  expect_holds({.name = "no queries", .q_lens = {0, 0}, .kv_lens = {9, 70}});
  expect_holds({.name = "one idle request", .q_lens = {0, 2}, .kv_lens = {9, 9}});
  expect_holds({.name = "idle at the end", .q_lens = {2, 0, 0}, .kv_lens = {9, 9, 0}});
}

// flashinfer-ai/flashinfer issue 4484: no key at all, and all keys masked.
TEST_P(EmptyRowsContract, AllKeysMissingOrMaskedGivesEmptyRows) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    AttentionCase c{.q_lens = {3, 5}, .kv_lens = {0, 0}};
    c.geometry.dtype = c.geometry.kv_dtype = dtype;
    expect_holds(c);
    c.kv_lens = {0, 1};
    c.causal = true;
    expect_holds(c);
    c.splits = {.forced_count = 3};
    expect_holds(c);
  }
}

}  // namespace
}  // namespace mla::contract
