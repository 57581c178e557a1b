#pragma once

#include <cstdint>

#include "cuda/sm90/attention/work.cuh"
#include "cuda/sm90/ptx.cuh"

// The load group: queries and keys to shared memory, as room comes free.
namespace mla::cuda::sm90 {

// Of copies by threads: each copies the same 16-byte chunk of every strip, in every 16th row.

template <class Traits, bool kAligned>
struct Copier {
  using T = typename Traits::Element;

  static constexpr int kChunkElements = 16 / sizeof(T);
  static constexpr int kChunks = Traits::kRowBytes / 16;            // of a row of a strip
  static constexpr int kRowStep = Traits::kGroupThreads / kChunks;  // 16
  static constexpr int kRowsOfThread = Traits::kRows / kRowStep;    // 4

  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }
  __device__ static int first_row() {
    return static_cast<int>(threadIdx.x) % Traits::kGroupThreads / kChunks;
  }
  /// The ith of the thread's rows.
  __device__ static int row(int i) { return first_row() + i * kRowStep; }
  /// Of the thread's chunk of row(i) in a strip whose next eight rows are `row_stride` bytes on:
  /// the last summand is known at compile time.
  __device__ static uint32_t offset_in_strip(int i, int row_stride) {
    constexpr int kAtomRows = Traits::kAtomRows;
    const int row = first_row() % kAtomRows;
    return first_row() / kAtomRows * row_stride + row * Traits::kRowBytes + (chunk() ^ row) * 16 +
           i * (kRowStep / kAtomRows) * row_stride;
  }

  /// One chunk, zeros where it is not valid.
  __device__ static void copy(uint32_t to, const T* from, bool valid) {
    if constexpr (kAligned) {
      copy_async(to, from, valid);
    } else {
      uint32_t words[4] = {};
      if (valid) {
        const auto* bits = reinterpret_cast<const uint16_t*>(from);
        for (int i = 0; i < 4; ++i) words[i] = bits[2 * i] | uint32_t{bits[2 * i + 1]} << 16;
      }
      store_shared(to, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }

  /// Announces the thread's copies so far.
  __device__ static void arrive(uint32_t barrier) {
    if constexpr (kAligned) {
      barrier_arrive_after_copies(barrier);
    } else {
      fence_async_proxy();
      barrier_arrive(barrier);
    }
  }
};

/// One row's values and rope part, from the thread's chunk on.
template <class T>
struct RowSource {
  const T* latent;
  const T* rope;
  bool valid;
};

/// The rows of one thread; source_of(i) says where its ith lies. Aligned rows are looked up at
/// once, before there is room for them.
template <class Traits, bool kAligned, class SourceOf>
struct RowCopies {
  using Copy = Copier<Traits, kAligned>;
  using T = typename Traits::Element;

  const SourceOf& source_of;
  RowSource<T> sources[kAligned ? Copy::kRowsOfThread : 1];

  __device__ explicit RowCopies(const SourceOf& of) : source_of(of) {
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < Copy::kRowsOfThread; ++i) sources[i] = of(i);
    }
  }

  /// Strips [begin, end) of a matrix at `matrix`; the rope strip comes after the value strips.
  template <class Layout>
  __device__ void copy_strips(uint32_t matrix, int begin, int end) const {
    const auto copy = [&](const RowSource<T>& source, int s, int i) {
      const T* from =
          s < Traits::kValueStrips ? source.latent + s * Traits::kStripColumns : source.rope;
      Copy::copy(matrix + Layout::strip(s) + Copy::offset_in_strip(i, Layout::row_stride(s)), from,
                 source.valid);
    };
    if constexpr (kAligned) {
#pragma unroll
      for (int s = begin; s < end; ++s) {
#pragma unroll
        for (int i = 0; i < Copy::kRowsOfThread; ++i) copy(sources[i], s, i);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < Copy::kRowsOfThread; ++i) {
        const RowSource<T> source = source_of(i);
#pragma unroll 1
        for (int s = begin; s < end; ++s) copy(source, s, i);
      }
    }
  }
};

template <class Traits, bool kAligned>
__device__ inline void copy_queries(const AttentionArgs& args, const PlanView& plan,
                                    const Work& work, SharedStorage<Traits>& shared) {
  using Copy = Copier<Traits, kAligned>;
  using T = typename Traits::Element;
  const AttentionParams& tensors = args.tensors;
  const auto source_of = [&](int i) -> RowSource<T> {
    const int row = Copy::row(i);
    const bool valid = row < work.num_rows;
    const RowPlace at = place_of(plan, tensors.geometry.num_heads, work.request,
                                 work.row_begin + (valid ? row : 0));
    const int64_t column = Copy::chunk() * Copy::kChunkElements;
    return {static_cast<const T*>(tensors.q_nope) + column +
                at.token * tensors.q_nope_token_stride + at.head * tensors.q_nope_head_stride,
            static_cast<const T*>(tensors.q_pe) + column + at.token * tensors.q_pe_token_stride +
                at.head * tensors.q_pe_head_stride,
            valid};
  };
  const RowCopies<Traits, kAligned, decltype(source_of)> rows(source_of);
  rows.template copy_strips<QueryLayout<Traits>>(shared_address(shared.queries), 0,
                                                 Traits::kStrips);
  Copy::arrive(shared_address(&shared.queries_full));
}

/// Queries of the block's `num_works`th work with keys.
template <class Traits>
__device__ inline void load_queries(const AttentionArgs& args, const PlanView& plan,
                                    const Work& work, uint32_t num_works,
                                    SharedStorage<Traits>& shared) {
  barrier_wait(shared_address(&shared.queries_free), num_works % 2 ^ 1);
  if (args.queries_aligned) {
    copy_queries<Traits, true>(args, plan, work, shared);
  } else {
    copy_queries<Traits, false>(args, plan, work, shared);
  }
}

/// Keys by the threads of the load group.
template <class Traits, bool kAligned>
__device__ inline void load_by_threads(const AttentionArgs& args, SharedStorage<Traits>& shared) {
  using Copy = Copier<Traits, kAligned>;
  using T = typename Traits::Element;
  const AttentionParams& tensors = args.tensors;
  const CacheStrides strides = tensors.cache;
  const int32_t page_size = tensors.geometry.page_size;
  const int64_t column = Copy::chunk() * Copy::kChunkElements;
  RingPlace ring;
  uint32_t num_works = 0;  // that have keys

  for_each_work<Traits>(args, [&](const Work& work) {
    const PlanView plan = plan_of(args);
    const int32_t* pages = plan.kv_indices + plan.kv_indptr[work.request];
    const auto end = static_cast<uint32_t>(work.kv_end);
    const auto key_of = [&](int32_t step, int i) -> uint32_t {
      return static_cast<uint32_t>(work.kv_begin) + step * Traits::kKeys + Copy::row(i);
    };
    // The numbers of the pages of aligned rows are asked for a step ahead.
    int32_t page_of_row[Copy::kRowsOfThread];
    const auto ask_for_pages = [&](int32_t step) {
      if constexpr (kAligned) {
#pragma unroll
        for (int i = 0; i < Copy::kRowsOfThread; ++i) {
          const uint32_t key = key_of(step, i);
          page_of_row[i] = key < end ? pages[page_of_key(key, page_size)] : 0;
        }
      }
    };
    ask_for_pages(0);
    for (int32_t step = 0; step < work.num_steps; ++step, ++ring.step) {
      const auto place_of_row = [&](uint32_t key, int i) -> KeyPlace {
        if constexpr (kAligned) {
          return place_in_page(page_of_row[i], key, page_size);
        } else {
          return place_of_key(pages, key, page_size);
        }
      };
      const auto source_of = [&](int i) -> RowSource<T> {
        const uint32_t key = key_of(step, i);
        const bool valid = key < end;
        const KeyPlace at = valid ? place_of_row(key, i) : KeyPlace{};
        return {static_cast<const T*>(tensors.ckv) + column + at.page * strides.ckv_page +
                    at.slot * strides.ckv_row,
                static_cast<const T*>(tensors.kpe) + column + at.page * strides.kpe_page +
                    at.slot * strides.kpe_row,
                valid};
      };
      const RowCopies<Traits, kAligned, decltype(source_of)> rows(source_of);
      ask_for_pages(step + 1);
      const uint32_t stage = ring.stage();
      const uint32_t matrix = shared_address(shared.keys[stage]);
#pragma unroll
      for (int half = 0; half < Traits::kHalves; ++half) {
        barrier_wait(shared_address(&shared.keys_free[stage][half]), ring.parity() ^ 1);
        rows.template copy_strips<KeyLayout<Traits>>(
            matrix, half * Traits::kHalfStrips, half == 0 ? Traits::kHalfStrips : Traits::kStrips);
        Copy::arrive(shared_address(&shared.keys_full[stage][half]));
      }
      // The first keys of a work find room sooner than its queries do.
      if (step == 0) load_queries<Traits>(args, plan, work, num_works++, shared);
    }
  });
}

/// Keys by the copy engine, which one warp drives. A step's keys lie in one page or in several
/// whole ones, each brought by a lane, so that the pages' numbers are read side by side. Of two
/// blocks that share keys each brings the half of its rank to both, and has it come to the level-2
/// cache a round before there is room for it: a second warp asks for that, since from the moment
/// that keys are given back until the next are asked for every instruction counts.
template <class Traits>
__device__ inline void load_by_boxes(const AttentionArgs& args, SharedStorage<Traits>& shared) {
  using Layout = KeyLayout<Traits>;
  const bool drives = threadIdx.x % Traits::kGroupThreads < 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t page_size = args.tensors.geometry.page_size;
  const int32_t box_rows = min(page_size, Traits::kKeys);  // a power of two
  const int32_t first_row = lane * box_rows;               // of the lane's box
  constexpr bool kShares = Traits::kBlocks == 2;           // then they are a cluster
  const bool foresees = kShares && threadIdx.x % Traits::kGroupThreads / 32 == 1;
  const auto rank = static_cast<uint32_t>(blockIdx.x % 2);  // in a cluster
  const uint64_t policy = evict_first_policy();
  RingPlace ring;
  uint32_t num_works = 0;  // that have keys
  if (drives && lane == 0) {
    prefetch_tensor(args.ckv_boxes);
    if (Traits::kRope > 0) prefetch_tensor(args.kpe_boxes);
  }

  for_each_work<Traits>(args, [&](const Work& work) {
    const PlanView plan = plan_of(args);
    const int32_t* pages = plan.kv_indices + plan.kv_indptr[work.request];
    const auto has_rope_strip = [](uint32_t half) { return Traits::kRope > 0 && half == 1; };
    // Announces the next keys of a stage, ahead of the room for them: once those before have come.
    const auto expect_half = [&](uint32_t half, int32_t num_rows) {
      const uint32_t full = shared_address(&shared.keys_full[ring.stage()][half]);
      barrier_wait(full, ring.parity() ^ 1);
      const int strips = Traits::kHalfStrips + has_rope_strip(half);
      barrier_arrive_expecting(full, strips * num_rows * Traits::kRowBytes);
    };
    const auto box_at = [](const KeyPlace& place, uint32_t strip) -> BoxAt {
      return {
          .strip = static_cast<int32_t>(strip),
          .row_group = static_cast<int32_t>(static_cast<uint32_t>(place.slot) / Traits::kAtomRows),
          .page = static_cast<int32_t>(place.page)};
    };
    const auto load_half = [&](const KeyPlace& place, uint32_t half) {
      const uint32_t stage = ring.stage();
      const uint32_t full = shared_address(&shared.keys_full[stage][half]);
      const uint32_t matrix = shared_address(shared.keys[stage]);
      const uint32_t first_atom = static_cast<uint32_t>(first_row) / Traits::kAtomRows;
      const auto copy = [&](uint32_t to, const CUtensorMap& boxes, uint32_t strip) {
        const BoxAt at = box_at(place, strip);
        if constexpr (kShares) {
          copy_box_to_cluster(to, boxes, at, full, 0b11, policy);
        } else {
          copy_box(to, boxes, at, full, policy);
        }
      };
      copy(matrix + half * Traits::kHalfBytes + first_atom * Layout::kHalfRowStride, args.ckv_boxes,
           half * Traits::kHalfStrips);
      if (has_rope_strip(half)) {
        copy(matrix + Layout::kRopeStrip + first_atom * Traits::kAtomBytes, args.kpe_boxes, 0);
      }
    };
    const auto keys_of = [&](int32_t step) {
      return min(work.kv_end - work.kv_begin - step * Traits::kKeys, Traits::kKeys);
    };
    // Of the lane's box, if the step has keys there: else the request may have no such page.
    const auto place_of = [&](int32_t step) {
      const int32_t first_key = work.kv_begin + step * Traits::kKeys;
      return place_of_key(pages, first_key + first_row, page_size);
    };
    const auto load_step = [&](int32_t step) {
      const int32_t num_keys = keys_of(step);
      const bool brings = first_row < num_keys;
      const KeyPlace place = brings ? place_of(step) : KeyPlace{};
      const auto wait_until_free = [&](uint32_t half) {
        barrier_wait(shared_address(&shared.keys_free[ring.stage()][half]), ring.parity() ^ 1);
      };
      // Stage s is led by group s, which gives its half back first.
      const uint32_t first = kShares ? rank : ring.stage();
      if (lane == 0) {
        const int32_t num_rows = (num_keys + box_rows - 1) & -box_rows;  // of all boxes
        expect_half(first, num_rows);
        expect_half(first ^ 1, num_rows);
      }
      // Only who fills the room waits for it: for others it might come and go unseen.
      if (!brings) return;
      wait_until_free(first);
      load_half(place, first);
      if constexpr (!kShares) {  // else the other block brings the other half
        wait_until_free(first ^ 1);
        load_half(place, first ^ 1);
      }
    };
    // The step before this one is asked for.
    const auto is_time_for = [&] {
      const auto asked_before = static_cast<int32_t>(atomicAdd(&shared.steps_asked, 0) - ring.step);
      return asked_before >= 0;
    };
    const auto foresee_step = [&](int32_t step) {
      if (first_row >= keys_of(step)) return;
      const KeyPlace place = place_of(step);
      prefetch_box(args.ckv_boxes, box_at(place, rank * Traits::kHalfStrips), policy);
      if (has_rope_strip(rank)) prefetch_box(args.kpe_boxes, box_at(place, 0), policy);
    };
    for (int32_t step = 0; step < work.num_steps; ++step, ++ring.step) {
      if (drives) {
        load_step(step);
        __syncwarp();  // a lane a whole stage ahead would take an older phase for the one it needs
        if (kShares && lane == 0) atomicAdd(&shared.steps_asked, 1);
      }
      if (foresees && step > 0 && step + 1 < work.num_steps) {
        while (!is_time_for()) __nanosleep(200);
        foresee_step(step + 1);
      }
      if (step == 0) load_queries<Traits>(args, plan, work, num_works++, shared);
    }
  });
}

}  // namespace mla::cuda::sm90
