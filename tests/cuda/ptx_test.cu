#include <cuda.h>

#include <random>
#include <stdexcept>
#include <string>

#include "cuda/named_barrier.cuh"
#include "cuda/ptx_test.cuh"

// Barriers, copies and clusters. Where a broken instruction would make a wait endless the kernel
// gives up and the test fails, but for what only waits: barrier_wait(), cluster_sync() and
// the named barriers.
namespace mla::cuda::sm90 {
namespace {

// Barriers.

constexpr int kPhases = 9;
constexpr int kArrivals = 3;

// Of every phase after every arrival: what the barrier says of parities 0 and 1.
__global__ void phases_kernel(uint32_t* ended) {
  __shared__ uint64_t storage;
  const uint32_t barrier = shared_address(&storage);
  barrier_init(barrier, kArrivals);
  fence_barrier_init();
  for (int phase = 0; phase < kPhases; ++phase) {
    for (int arrived = 0; arrived <= kArrivals; ++arrived) {
      if (arrived > 0) barrier_arrive(barrier);
      for (uint32_t parity = 0; parity < 2; ++parity) *ended++ = barrier_test(barrier, parity);
    }
  }
}

TEST_F(Ptx, APhaseEndsWithItsLastArrivalAndIsToldByItsParity) {
  auto ended = results<uint32_t>(kPhases * (kArrivals + 1) * 2);
  launch(&phases_kernel, 1, 1, ended.data());
  ended.read();
  size_t i = 0;
  for (int phase = 0; phase < kPhases; ++phase) {
    for (int arrived = 0; arrived <= kArrivals; ++arrived) {
      // Of the phase under way nothing has ended; the one before it has, the first one's too.
      const int under_way = phase + (arrived == kArrivals);
      for (int parity = 0; parity < 2; ++parity, ++i) {
        EXPECT_EQ(ended.host[i], under_way % 2 != parity)
            << "parity " << parity << " in phase " << phase << " after " << arrived << " arrivals";
      }
    }
  }
}

// The first warp hands values to the second, phase by phase; now the one is late, now the other.
__global__ void handover_kernel(uint32_t* received) {
  __shared__ uint32_t values[kLanes];
  __shared__ uint64_t storage[2];
  const uint32_t full = shared_address(&storage[0]), empty = shared_address(&storage[1]);
  if (threadIdx.x == 0) {
    barrier_init(full, kLanes);
    barrier_init(empty, kLanes);
    fence_barrier_init();
  }
  __syncthreads();
  const uint32_t lane = threadIdx.x % kLanes;
  for (uint32_t phase = 0; phase < kPhases; ++phase) {
    const uint32_t parity = phase % 2;
    if (threadIdx.x < kLanes) {
      barrier_wait(empty, parity ^ 1);
      if (phase % 3 == 0) __nanosleep(kLateNs);
      values[lane] = phase * kLanes + lane;
      barrier_arrive(full);
    } else {
      barrier_wait(full, parity);
      if (phase % 3 == 1) __nanosleep(kLateNs);
      received[phase * kLanes + lane] = values[kLanes - 1 - lane];
      barrier_arrive(empty);
    }
  }
}

TEST_F(Ptx, AWaitSeesWhatWasWrittenBeforeThePhaseEnded) {
  auto received = results<uint32_t>(kPhases * kLanes);
  launch(&handover_kernel, 1, 2 * kLanes, received.data());
  received.read();
  for (uint32_t i = 0; i < received.host.size(); ++i) {
    EXPECT_EQ(received.host[i], i / kLanes * kLanes + kLanes - 1 - i % kLanes) << "value " << i;
  }
}

constexpr int kRoleThreads = 64;

// Two roles swap values twice a round; the third warp pair stays away.
__global__ void named_barrier_kernel(uint32_t* received) {
  __shared__ uint32_t values[2][kRoleThreads];
  const uint32_t thread = threadIdx.x % kRoleThreads;
  const auto act = [&](uint32_t role) {
    for (uint32_t round = 0; round < kPhases; ++round) {
      if (round % 2 == role) __nanosleep(kLateNs);
      const uint32_t place = (round * 2 + role) * kRoleThreads + thread;
      values[role][thread] = place;
      named_barrier_sync(1, 2 * kRoleThreads);
      received[place] = values[role ^ 1][kRoleThreads - 1 - thread];
      named_barrier_sync(2, 2 * kRoleThreads);
    }
  };
  switch (threadIdx.x / kRoleThreads) {
    case 0:
      return act(0);
    case 1:
      return act(1);
  }
}

TEST_F(Ptx, ANamedBarrierJoinsTwoRolesAndNobodyElse) {
  auto received = results<uint32_t>(kPhases * 2 * kRoleThreads);
  launch(&named_barrier_kernel, 1, 3 * kRoleThreads, received.data());
  received.read();
  for (uint32_t i = 0; i < received.host.size(); ++i) {
    const uint32_t others = (i / kRoleThreads ^ 1) * kRoleThreads;
    EXPECT_EQ(received.host[i], others + kRoleThreads - 1 - i % kRoleThreads) << "value " << i;
  }
}

// Of each warp: whether all had the value, in rounds where none lacks it or warp round - 1 does.
__global__ void named_barrier_all_kernel(uint32_t* all) {
  const uint32_t warp = threadIdx.x / kLanes, num_warps = blockDim.x / kLanes;
  for (uint32_t round = 0; round <= num_warps; ++round) {
    if (round % num_warps == warp) __nanosleep(kLateNs);
    const bool held = named_barrier_all(3, static_cast<int>(blockDim.x), warp + 1 != round);
    if (threadIdx.x % kLanes == 0) all[round * num_warps + warp] = held;
  }
}

TEST_F(Ptx, ANamedBarrierTellsAllWarpsWhetherEachHadTheValue) {
  constexpr uint32_t kWarps = kGroupThreads / kLanes;
  auto all = results<uint32_t>((kWarps + 1) * kWarps);
  launch(&named_barrier_all_kernel, 1, kGroupThreads, all.data());
  all.read();
  for (uint32_t i = 0; i < all.host.size(); ++i) {
    EXPECT_EQ(all.host[i], i < kWarps ? 1U : 0U)
        << "round " << i / kWarps << ", warp " << i % kWarps;
  }
}

// Copies by threads.

constexpr int kCopies = 4 * kLanes;

__host__ __device__ constexpr bool is_valid(int copy) { return copy % 3 != 0; }

// The first warp copies, the second waits.
__global__ void copy_async_kernel(const uint4* from, uint4* to, uint32_t* ended) {
  __shared__ uint4 copies[kCopies];
  __shared__ uint64_t storage;
  const uint32_t barrier = shared_address(&storage);
  if (threadIdx.x == 0) {
    barrier_init(barrier, kLanes);
    fence_barrier_init();
  }
  fill_shared(copies, sizeof(copies));
  if (threadIdx.x < kLanes) {
    for (uint32_t i = threadIdx.x; i < kCopies; i += kLanes) {
      // What is not read may lie nowhere.
      copy_async(shared_address(&copies[i]), is_valid(i) ? from + (kCopies - 1 - i) : nullptr,
                 is_valid(i));
    }
    barrier_arrive_after_copies(barrier);
  } else {
    ended[0] = ends_in_time(barrier, 0);
    ended[1] = barrier_test(barrier, 1);
    for (uint32_t i = threadIdx.x - kLanes; i < kCopies; i += kLanes) to[i] = copies[i];
  }
}

TEST_F(Ptx, CopiesByThreadsArriveBeforeTheirPhaseEndsAndAreZeroWhereNotValid) {
  std::vector<uint4> values;
  for (uint32_t i = 0; i < kCopies; ++i) {
    values.push_back({4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4});
  }
  const DeviceArray<uint4> from(kCuda, values);
  auto to = results<uint4>(kCopies);
  auto ended = results<uint32_t>(2);
  launch(&copy_async_kernel, 1, 2 * kLanes, from.data(), to.data(), ended.data());
  to.read();
  ended.read();
  EXPECT_EQ(ended.host[0], 1U) << "each thread arrives once";
  EXPECT_EQ(ended.host[1], 0U) << "each thread arrives once only";
  for (int i = 0; i < kCopies; ++i) {
    const uint4 expected = is_valid(i) ? values[kCopies - 1 - i] : uint4{};
    const uint4 got = to.host[i];
    EXPECT_TRUE(got.x == expected.x && got.y == expected.y && got.z == expected.z &&
                got.w == expected.w)
        << "copy " << i << " begins with " << got.x << ", expected " << expected.x;
  }
}

// A tensor for boxes: [pages, groups of eight rows, strips, 8 rows, 64 columns], with gaps after
// rows and pages. Boxes are two strips of 64 rows, which lie there as the tensor has them.

constexpr int kPages = 3, kPageRows = 128, kStrips = 4, kBoxStrips = 2, kGroupRows = 8;
constexpr int64_t kRowStride = kStrips * kStripColumns + 8;
constexpr int64_t kPageStride = kPageRows * kRowStride + 16;
constexpr int kBoxElements = kBoxStrips * kStripElements;
constexpr int kBoxBytes = kBoxStrips * kStripBytes;
constexpr int kBoxColumns = kBoxStrips * kStripColumns;

class Boxes {
 public:
  Boxes() : elements_(kCuda, random_elements()) {
    constexpr unsigned kCudaVersion = 12000;
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    MLA_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kCudaVersion,
                                                    cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    }
    const cuuint64_t shape[] = {kStripColumns, kGroupRows, kStrips, kPageRows / kGroupRows, kPages};
    const cuuint64_t strides[] = {kRowStride * 2, kStripColumns * 2, kGroupRows * kRowStride * 2,
                                  kPageStride * 2};
    const cuuint32_t box[] = {kStripColumns, kGroupRows, kBoxStrips, kRows / kGroupRows, 1};
    const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, elements_.data(), shape, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
      throw std::runtime_error("cuTensorMapEncodeTiled: " + std::to_string(result));
    }
  }

  CUtensorMap map{};

  /// The box as it should lie in shared memory; zeros past the tensor's columns and a group's rows.
  std::vector<uint16_t> image(BoxAt at) const {
    std::vector<uint16_t> matrix;
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kBoxColumns; ++i) {
        const int column = at.column + i % kStripColumns;
        const int row_of_group = at.row + row % kGroupRows;
        const int row_of_page = (at.row_group + row / kGroupRows) * kGroupRows + row_of_group;
        const int64_t element = at.page * kPageStride + row_of_page * kRowStride +
                                (at.strip + i / kStripColumns) * kStripColumns + column;
        const bool is_there = column < kStripColumns && row_of_group < kGroupRows;
        matrix.push_back(is_there ? elements_.host[element] : 0);
      }
    }
    return swizzled(matrix, kBoxColumns, by_rows(kBoxColumns));
  }

 private:
  static std::vector<uint16_t> random_elements() {
    std::mt19937 random(1);
    std::vector<uint16_t> elements(kPages * kPageStride);
    for (uint16_t& element : elements) element = static_cast<uint16_t>(random());
    return elements;
  }

  DeviceArray<uint16_t> elements_;
};

// Two boxes one after the other, in phases 0 and 1 of a barrier. `ended`: of each phase, before its
// copy and after.
__global__ void copy_box_kernel(const __grid_constant__ CUtensorMap tensor, BoxAt first,
                                BoxAt second, uint16_t* to, uint32_t* ended) {
  __shared__ __align__(kSwizzleAlignment) uint16_t box[kBoxElements];
  __shared__ uint64_t storage;
  const uint32_t barrier = shared_address(&storage);
  if (threadIdx.x == 0) {
    prefetch_tensor(tensor);
    prefetch_box(tensor, second, evict_first_policy());  // changes nothing
    barrier_init(barrier, 1);
    fence_barrier_init();
  }
  for (uint32_t phase = 0; phase < 2; ++phase) {
    fill_shared(box, kBoxBytes);
    if (threadIdx.x == 0) {
      barrier_arrive_expecting(barrier, kBoxBytes);
      ended[phase * 2] = barrier_test(barrier, phase);
      copy_box(shared_address(box), tensor, phase == 0 ? first : second, barrier,
               evict_first_policy());
    }
    const bool is_here = ends_in_time(barrier, phase);
    if (threadIdx.x == 0) ended[phase * 2 + 1] = is_here;
    from_shared(to + phase * kBoxElements, box, kBoxBytes);
    __syncthreads();
  }
}

/// Element by element; the first that differs is told.
void expect_box(const uint16_t* got, const std::vector<uint16_t>& expected) {
  for (int i = 0; i < kBoxElements; ++i) {
    ASSERT_EQ(got[i], expected[i])
        << "strip " << i / kEightRows % kBoxStrips << ", row "
        << i / (kBoxStrips * kEightRows) * kGroupRows + i % kEightRows / kStripColumns << ", byte "
        << i % kStripColumns * 2 << " of the row";
  }
}

TEST_F(Ptx, ABoxLiesInItsSwizzleOnceThePhaseOfItsBytesHasEnded) {
  const Boxes boxes;
  const BoxAt places[] = {{.strip = 2, .row_group = 8, .page = 1},
                          {.column = 40, .row = 3, .strip = 1, .row_group = 1, .page = 2}};
  auto to = results<uint16_t>(2 * kBoxElements);
  auto ended = results<uint32_t>(4);
  launch(&copy_box_kernel, 1, kGroupThreads, boxes.map, places[0], places[1], to.data(),
         ended.data());
  EXPECT_EQ(ended.read(), (std::vector<uint32_t>{0, 1, 0, 1}));
  to.read();
  for (int i = 0; i < 2; ++i) {
    SCOPED_TRACE("box " + std::to_string(i));
    expect_box(&to.host[i * kBoxElements], boxes.image(places[i]));
  }
}

// Clusters of two blocks.

constexpr uint32_t kBlocks = 2;

// Thread 0 of block 0 arrives at barrier 0 of its own block and at barrier 1 of the other one.
__global__ void arrive_in_cluster_kernel(uint32_t* ended) {
  __shared__ uint64_t storage[kBlocks];
  const uint32_t rank = blockIdx.x;
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : storage) barrier_init(shared_address(&barrier), 1);
    fence_barrier_init();
  }
  cluster_sync();
  if (rank == 0 && threadIdx.x == 0) {
    for (uint32_t to = 0; to < kBlocks; ++to) {
      barrier_arrive_in_cluster(address_in_cluster(shared_address(&storage[to]), to));
    }
  }
  const bool is_here = ends_in_time(shared_address(&storage[rank]), 0);
  cluster_sync();
  if (threadIdx.x == 0) {
    ended[rank * kBlocks + rank] = is_here;
    ended[rank * kBlocks + (rank ^ 1)] = barrier_test(shared_address(&storage[rank ^ 1]), 0);
  }
}

TEST_F(Ptx, AnArrivalGoesToTheBlockOfTheClusterThatItsAddressNames) {
  auto ended = results<uint32_t>(kBlocks * kBlocks);
  launch(&arrive_in_cluster_kernel, kBlocks, kLanes, ended.data());
  EXPECT_EQ(ended.read(), (std::vector<uint32_t>{1, 0, 0, 1})) << "by block, then by barrier";
}

// Each block is late once; then every thread reads what its counterpart in the other block wrote.
__global__ void cluster_sync_kernel(uint32_t* written, uint32_t* received) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t threads = kBlocks * blockDim.x;
  for (uint32_t round = 0; round < kBlocks; ++round) {
    if (blockIdx.x == round) __nanosleep(kLateNs);
    written[thread] = round * threads + thread;
    cluster_sync();
    received[round * threads + thread] = written[threads - 1 - thread];
    cluster_sync();
  }
}

TEST_F(Ptx, ClusterSyncWaitsForAllThreadsOfBothBlocks) {
  constexpr uint32_t kThreads = 64, kAll = kBlocks * kThreads;
  auto written = results<uint32_t>(kAll), received = results<uint32_t>(kBlocks * kAll);
  launch(&cluster_sync_kernel, kBlocks, kThreads, written.data(), received.data());
  received.read();
  for (uint32_t i = 0; i < received.host.size(); ++i) {
    EXPECT_EQ(received.host[i], i / kAll * kAll + kAll - 1 - i % kAll) << "value " << i;
  }
}

// Block `from` sends a box to `blocks`. `ended`: of each block.
__global__ void copy_box_to_cluster_kernel(const __grid_constant__ CUtensorMap tensor, BoxAt at,
                                           uint32_t from, uint32_t blocks, uint16_t* to,
                                           uint32_t* ended) {
  __shared__ __align__(kSwizzleAlignment) uint16_t box[kBoxElements];
  __shared__ uint64_t storage;
  const uint32_t barrier = shared_address(&storage);
  const uint32_t rank = blockIdx.x;
  const bool receives = blocks >> rank & 1;
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    fence_barrier_init();
    if (receives) barrier_arrive_expecting(barrier, kBoxBytes);
  }
  fill_shared(box, kBoxBytes);
  cluster_sync();
  if (rank == from && threadIdx.x == 0) {
    copy_box_to_cluster(shared_address(box), tensor, at, barrier, static_cast<uint16_t>(blocks),
                        evict_first_policy());
  }
  if (receives) {
    const bool is_here = ends_in_time(barrier, 0);
    if (threadIdx.x == 0) ended[rank] = is_here;
  }
  cluster_sync();
  if (!receives && threadIdx.x == 0) ended[rank] = barrier_test(barrier, 0);
  from_shared(to + rank * kBoxElements, box, kBoxBytes);
}

TEST_F(Ptx, ABoxSentToTheClusterLiesInTheBlocksNamedAndNoOther) {
  const Boxes boxes;
  const BoxAt at{.strip = 1, .row_group = 2, .page = 1};
  const std::vector<uint16_t> filled(kBoxElements, static_cast<uint16_t>(kFilled));
  for (uint32_t from = 0; from < kBlocks; ++from) {
    for (const uint32_t blocks : {0b11U, 0b01U, 0b10U}) {
      auto to = results<uint16_t>(kBlocks * kBoxElements);
      auto ended = results<uint32_t>(kBlocks);
      launch(&copy_box_to_cluster_kernel, kBlocks, kGroupThreads, boxes.map, at, from, blocks,
             to.data(), ended.data());
      to.read();
      ended.read();
      for (uint32_t rank = 0; rank < kBlocks; ++rank) {
        SCOPED_TRACE("from block " + std::to_string(from) + " to blocks " + std::to_string(blocks) +
                     ": block " + std::to_string(rank));
        const bool receives = blocks >> rank & 1;
        EXPECT_EQ(ended.host[rank], receives);
        expect_box(&to.host[rank * kBoxElements], receives ? boxes.image(at) : filled);
      }
    }
  }
}

// Matrices from registers to shared memory.

constexpr int kMatrices = 4, kMatrixRows = 8;

/// Rows lie anywhere: a permutation of 32 places.
__host__ __device__ constexpr uint32_t place_of_row(uint32_t matrix, uint32_t row) {
  return (matrix * kMatrixRows + row) * 5 % kLanes;
}
__host__ __device__ constexpr uint16_t element_of(uint32_t matrix, uint32_t row, uint32_t column) {
  return static_cast<uint16_t>(matrix << 12 | row << 8 | column);
}

__global__ void store_matrices_kernel(uint16_t* to) {
  __shared__ __align__(16) uint16_t rows[kLanes * 8];
  fill_shared(rows, sizeof(rows));
  const uint32_t lane = threadIdx.x;
  uint32_t values[kMatrices];
  for (uint32_t m = 0; m < kMatrices; ++m) {
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    values[m] = element_of(m, row, column) | uint32_t{element_of(m, row, column + 1)} << 16;
  }
  const uint32_t place = place_of_row(lane / 8, lane % 8);
  store_matrices(shared_address(rows) + place * 16, values);
  __syncthreads();
  from_shared(to, rows, sizeof(rows));
}

TEST_F(Ptx, StoredMatricesLieInTheRowsThatTheLanesNamed) {
  auto to = results<uint16_t>(kLanes * 8);
  launch(&store_matrices_kernel, 1, kLanes, to.data());
  to.read();
  for (uint32_t m = 0; m < kMatrices; ++m) {
    for (uint32_t row = 0; row < kMatrixRows; ++row) {
      for (uint32_t column = 0; column < 8; ++column) {
        EXPECT_EQ(to.host[place_of_row(m, row) * 8 + column], element_of(m, row, column))
            << "matrix " << m << ", row " << row << ", column " << column;
      }
    }
  }
}

constexpr uint32_t kUntouched = 0xdeadbeef;
constexpr uint32_t kWords = 8;  // of a lane: four for each store
__host__ __device__ constexpr bool stores(uint32_t lane, uint32_t of) {
  return lane % (2 + of) == 0;
}

__global__ void store_if_kernel(uint32_t* to) {
  const uint32_t lane = threadIdx.x;
  uint32_t* own = to + lane * kWords;
  for (uint32_t i = 0; i < kWords; ++i) own[i] = kUntouched;
  const auto value = [&](uint32_t i) { return lane * kWords + i; };
  store_if(stores(lane, 0), own, make_uint2(value(0), value(1)));
  store_if(stores(lane, 1), own + 4,
           make_float4(__uint_as_float(value(4)), __uint_as_float(value(5)),
                       __uint_as_float(value(6)), __uint_as_float(value(7))));
}

TEST_F(Ptx, AConditionalStoreWritesItsBytesWhereTheConditionHoldsAndNoOthers) {
  auto to = results<uint32_t>(kLanes * kWords);
  launch(&store_if_kernel, 1, kLanes, to.data());
  to.read();
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    for (uint32_t i = 0; i < kWords; ++i) {
      const bool is_written = i < 4 ? i < 2 && stores(lane, 0) : stores(lane, 1);
      EXPECT_EQ(to.host[lane * kWords + i], is_written ? lane * kWords + i : kUntouched)
          << "lane " << lane << ", word " << i;
    }
  }
}

}  // namespace
}  // namespace mla::cuda::sm90
