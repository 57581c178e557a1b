#include "contract/contract.hpp"

// Offsets beyond 32 bits, in sparse mappings of which only the pages in use take memory.
namespace mla::contract {
namespace {

MLA_CONTRACT_SUITE(AddressingContract);

// flashinfer-ai/flashinfer PR 3136: page times page stride in 32 bits.
TEST_P(AddressingContract, ElementOffsetsBeyond32BitsReadTheSameData) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {40}, .pages = {0, 1}};
  c.geometry.page_size = 32;
  const CheckReport near = expect_holds(c);
  c.pages = {233100, 233099};  // elements from 4.29e9 on
  c.pool_pages = 233101;
  const CheckReport far = expect_holds(c);
  EXPECT_EQ(near.out, far.out);
  EXPECT_EQ(near.lse, far.lse);
}

// vllm-project/vllm, csrc/cpu/mla_decode.cpp: page number times page stride as int.
TEST_P(AddressingContract, ElementOffsetsBeyond31BitsOfFp32ReadTheSameData) {
  AttentionCase c{.q_lens = {2}, .kv_lens = {20}, .pages = {1, 0}};
  c.geometry.page_size = 16;
  c.geometry.num_heads = 4;
  c.geometry.dtype = c.geometry.kv_dtype = DType::kFloat32;
  const CheckReport near = expect_holds(c);
  c.pages = {233100, 233016};
  c.pool_pages = 233101;
  EXPECT_EQ(near.out, expect_holds(c).out);
}

// ROCm/aiter issues 2768 and 5765: byte offsets beyond 4 GiB, for some head counts only.
TEST_P(AddressingContract, ByteOffsetsBeyond4GiBReadTheSameDataForEveryHeadCount) {
  for (const int32_t heads : {16, 32, 64, 128}) {
    AttentionCase c{.q_lens = {1}, .kv_lens = {24}, .pool_pages = 3728330};
    c.geometry.page_size = 1;
    c.geometry.num_heads = heads;
    for (int32_t slot = 0; slot < 24; ++slot) c.pages.push_back(3728300 + slot);
    expect_holds(c, 16);
  }
}

// flashinfer-ai/flashinfer PR 3136 with a padded page stride; kvcached issue 321.
TEST_P(AddressingContract, PageStridesMayBeFarLargerThanPages) {
  AttentionCase c{.q_lens = {1}, .kv_lens = {100}, .pages = {2, 0}, .pool_pages = 3};
  c.geometry.num_heads = 4;
  c.layout.page_pad = 2064384 - 64 * 576;
  expect_holds(c);
  c.layout.page_pad = int64_t{1} << 31;
  expect_holds(c);
  c.layout.separate_cache = true;
  expect_holds(c);
}

TEST_P(AddressingContract, QueryAndOutputStridesMayExceed31Bits) {
  AttentionCase c{.q_lens = {2}, .kv_lens = {9}};
  c.geometry.num_heads = 2;
  c.layout.q_pad = 1 << 30;
  c.layout.out_pad = 1 << 30;
  expect_holds(c);
  c.layout.head_major = true;
  c.layout.joined_q = true;
  expect_holds(c);
}

}  // namespace
}  // namespace mla::contract
