#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "device/runtime.hpp"
#include "mla/error.hpp"
#include "mla/pool.hpp"
#include "mla/recording_device.hpp"

// The pool on a device that does its work later.
namespace mla {
namespace {

using testing::Each;

struct QueuedPoolUnit : testing::Test {
  RecordingDevice device;
  device::Runtime& runtime = device::runtime_of(device.device());
  LatentPool pool{{.num_layers = 2,
                   .num_pages = 4,
                   .page_size = 2,
                   .kv_lora_rank = 3,
                   .qk_rope_head_dim = 0,
                   .dtype = DType::kFloat32,
                   .device = device.device(),
                   .memory = {}}};
  std::vector<float> rows = std::vector<float>(4 * 3);

  ConstTensor<2> view(int64_t num_rows) {
    return contiguous_view(rows.data(), std::array<int64_t, 2>{num_rows, 3}, device.device());
  }
  float at(int32_t layer, int64_t slot) const {
    return static_cast<const float*>(std::as_const(pool).layer(layer).data)[slot * 3];
  }
};

TEST_F(QueuedPoolUnit, WorkIsDoneInTheOrderOfTheStream) {
  std::fill(rows.begin(), rows.end(), 7.0F);
  pool.append(0, std::vector<int64_t>{2, -1}, view(2), {});
  pool.copy_pages(std::array{PageCopy{.from = 1, .to = 3}});
  std::vector<float> back(3, 0.0F);
  pool.gather(0, std::array<int64_t, 1>{6},
              contiguous_view(back.data(), std::array<int64_t, 2>{1, 3}, device.device()));
  EXPECT_EQ(at(0, 2), 0) << "queued only";
  device.finish_all();
  EXPECT_EQ(at(0, 2), 7);
  EXPECT_THAT(back, Each(7.0F));
}

TEST_F(QueuedPoolUnit, CapturedAppendReadsItsSlotsAnewAtEachReplay) {
  std::vector<int64_t> slots = {0, -1};
  const auto on_device =
      contiguous_view<const int64_t>(slots.data(), std::array<int64_t, 1>{2}, device.device());
  runtime.begin_capture({});
  pool.append_at(1, on_device, view(2), {});
  const device::Graph graph = runtime.end_capture({});
  const std::vector<int64_t> places = {3, 0, 5, 7};
  for (const int64_t place : places) {
    slots[0] = place;
    slots[1] = 1000;  // outside the pool: skipped
    rows[0] = static_cast<float>(place) + 1;
    runtime.replay(graph, {});
    device.finish_all();
    EXPECT_EQ(at(1, place), static_cast<float>(place) + 1);
  }
  EXPECT_EQ(at(1, 1), 0);
  runtime.destroy_graph(graph);
}

TEST_F(QueuedPoolUnit, SlotsThatAreNotThereAreRefused) {
  const auto slots = [&](int64_t count) {
    return contiguous_view<const int64_t>(nullptr, std::array<int64_t, 1>{count}, device.device());
  };
  EXPECT_THROW(pool.append_at(0, slots(1), view(1), {}), InvalidArgument);
  EXPECT_THROW(pool.append_at(0, slots(-1), view(-1), {}), InvalidArgument);
  EXPECT_NO_THROW(pool.append_at(0, slots(0), view(0), {}));
}

TEST_F(QueuedPoolUnit, SlotsOnAnotherDeviceAreRefused) {
  const std::vector<int64_t> slots = {0};
  EXPECT_THROW(
      pool.append_at(0, contiguous_view(slots.data(), std::array<int64_t, 1>{1}), view(1), {}),
      InvalidArgument);
}

}  // namespace
}  // namespace mla
