#include "mla/bench_cell.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "mla/bench_spread.hpp"
#include "mla/recording_device.hpp"
#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

cases::AttentionCase small_case(Device device, int32_t num_heads = 4) {
  cases::AttentionCase c;
  c.geometry.num_heads = num_heads;
  c.geometry.kv_lora_rank = 32;
  c.geometry.qk_rope_head_dim = 16;
  c.geometry.page_size = 8;
  c.q_lens = {1, 3, 2};
  c.kv_lens = {17, 40, 5};
  c.causal = true;
  c.device = device;
  return c;
}

constexpr CellOptions kShort{.rounds = 3, .round_seconds = 1e-4, .cold_bytes = 1 << 16};

std::vector<PeerLibrary> peers_of(std::initializer_list<const char*> files) {
  return {files.begin(), files.end()};
}

TEST(BenchCellTools, EveryContenderIsTimedInEveryRound) {
  RecordingDevice recording;
  const auto peers = peers_of({FAKE_PEER, FAKE_PEER});
  const CellTimes times = time_cell(small_case(recording.device()), peers, kShort);
  EXPECT_EQ(times.round_us.size(), 3U);
  EXPECT_GT(spread_of(times.round_us).median, 0);
  EXPECT_GT(times.plan_us, 0);
  ASSERT_EQ(times.peers.size(), 2U);
  for (const PeerTimes& peer : times.peers) {
    EXPECT_EQ(peer.name, "fake 1.0");
    EXPECT_EQ(peer.fault, "");
    EXPECT_EQ(peer.round_us.size(), 3U);
    EXPECT_GT(peer.plan_us, 0);
    EXPECT_LT(peer.max_difference, 0.02);
  }
  EXPECT_THAT(recording.violations(), IsEmpty());
}

TEST(BenchCellTools, AWrongPeerIsNamedAndNotTimed) {
  RecordingDevice recording;
  const auto peers = peers_of({FAKE_PEER_WRONG, FAKE_PEER});
  const CellTimes times = time_cell(small_case(recording.device()), peers, kShort);
  ASSERT_EQ(times.peers.size(), 2U);
  EXPECT_THAT(times.peers[0].fault, HasSubstr("differs"));
  EXPECT_NEAR(times.peers[0].max_difference, 0.25, 0.02);
  EXPECT_THAT(times.peers[0].round_us, IsEmpty());
  EXPECT_EQ(times.peers[1].fault, "");
  EXPECT_EQ(times.peers[1].round_us.size(), 3U);
}

TEST(BenchCellTools, APeerIsLeftOutOfWhatItDoesNotServe) {
  RecordingDevice recording;
  const auto peers = peers_of({FAKE_PEER});
  EXPECT_THAT(time_cell(small_case(recording.device(), 9), peers, kShort).peers, IsEmpty());
  cases::AttentionCase fp32 = small_case(recording.device());
  fp32.geometry.dtype = fp32.geometry.kv_dtype = DType::kFloat32;
  EXPECT_THAT(time_cell(fp32, peers, kShort).peers, IsEmpty());
}

TEST(BenchCellTools, DifferencesAreJudgedByTheirRow) {
  const std::vector<BFloat16> ours = {BFloat16(4.0F), BFloat16(2.0F), BFloat16(0.5F),
                                      BFloat16(0.25F)};
  std::vector<BFloat16> theirs = ours;
  EXPECT_EQ(compare_rows(ours, theirs, 2).largest, 0);
  theirs[1] = BFloat16(2.5F);
  theirs[3] = BFloat16(0.5F);
  const Difference difference = compare_rows(ours, theirs, 2);
  EXPECT_EQ(difference.largest, 0.5);
  EXPECT_EQ(difference.largest_share, 0.5);  // of the second row
  theirs[2] = BFloat16(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isinf(compare_rows(ours, theirs, 2).largest));
}

std::string refusal_of(const char* file) {
  try {
    const PeerLibrary library(file);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(PeerLibraryTools, WhatCannotBeUsedIsRefusedInWords) {
  EXPECT_THAT(refusal_of("no/such/peer.so"), HasSubstr("--peer no/such/peer.so: "));
  EXPECT_THAT(refusal_of("no/such/peer.so"), HasSubstr("No such file"));
  EXPECT_THAT(refusal_of(FAKE_PEER_INCOMPLETE), HasSubstr("it has no function mla_peer_run"));
  EXPECT_EQ(refusal_of(FAKE_PEER), "");
}

}  // namespace
}  // namespace mla::cli
