#include "cpu/machine_limits.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "cpu/simd_impls.hpp"

namespace mla::cpu {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kReadUnit = 128;  // floats: what read_probe takes at a time
constexpr int64_t kL2Floats = (int64_t{1} << 20) / 4;
constexpr int64_t kDramFloats = (int64_t{512} << 20) / 4;  // more than the caches of one socket
constexpr size_t kHugePage = size_t{2} << 20;

const MachineProbes& probes_of(std::string_view kernel) {
#if defined(__x86_64__)
  if (kernel == kAvx512Impl.name) return kAvx512Probes;
  if (kernel == kAvx2Impl.name) return kAvx2Probes;
#elif defined(__aarch64__)
  if (kernel == kNeonImpl.name) return kNeonProbes;
#endif
  return kScalarProbes;
}

struct FreeFloats {
  void operator()(float* floats) const { std::free(floats); }
};
using Floats = std::unique_ptr<float[], FreeFloats>;

// On huge pages where the system gives them, so that address translation is not what is measured.
Floats make_floats(int64_t count) {
  const size_t bytes = (static_cast<size_t>(count) * 4 + kHugePage - 1) / kHugePage * kHugePage;
  Floats floats(static_cast<float*>(std::aligned_alloc(kHugePage, bytes)));
  if (floats == nullptr) throw std::bad_alloc();
  madvise(floats.get(), bytes, MADV_HUGEPAGE);
  return floats;
}

// One number a thread, on a cache line of its own; what it holds does not matter.
struct alignas(64) Sink {
  float value = 1;
};

double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Best rate of `rounds` calls of work(), each of which does `units`, in 1e9 units a second.
double best_rate(int rounds, double units, const auto& work) {
  double best = 0;
  for (int i = 0; i < rounds; ++i) best = std::max(best, units / seconds_of(work));
  return best * 1e-9;
}

double l2_rate(const MachineProbes& probes, Executor& executor, Sink* sinks) {
  const int threads = executor.num_threads();
  const Floats buffers = make_floats(threads * kL2Floats);
  executor.run(
      [&](int worker) { std::fill_n(buffers.get() + worker * kL2Floats, kL2Floats, 1.0F); });
  constexpr int kPasses = 2000;  // about 15 ms
  const double bytes = 4.0 * static_cast<double>(kL2Floats) * kPasses * threads;
  return best_rate(10, bytes, [&] {
    executor.run([&](int worker) {
      for (int pass = 0; pass < kPasses; ++pass) {
        probes.read(buffers.get() + worker * kL2Floats, kL2Floats, &sinks[worker].value);
      }
    });
  });
}

double dram_rate(const MachineProbes& probes, Executor& executor, Sink* sinks) {
  const int threads = executor.num_threads();
  const int64_t share = kDramFloats / threads / kReadUnit * kReadUnit;
  const Floats buffer = make_floats(kDramFloats);
  executor.run([&](int worker) { std::fill_n(buffer.get() + worker * share, share, 1.0F); });
  return best_rate(5, 4.0 * static_cast<double>(share) * threads, [&] {
    executor.run([&](int worker) {
      probes.read(buffer.get() + worker * share, share, &sinks[worker].value);
    });
  });
}

}  // namespace

double measure_fma_gflops(std::string_view kernel, Executor& executor) {
  const MachineProbes& probes = probes_of(kernel);
  Sink sinks[kMaxThreads];
  constexpr int64_t kTrial = 1 << 20;
  const double flop = probes.multiply_add(kTrial, &sinks[0].value);  // and wakes the units up
  const double trial_seconds = seconds_of([&] { probes.multiply_add(kTrial, &sinks[0].value); });
  const auto rounds = static_cast<int64_t>(static_cast<double>(kTrial) * 0.02 / trial_seconds) + 1;
  const double work = flop / static_cast<double>(kTrial) * static_cast<double>(rounds);
  return best_rate(10, work * executor.num_threads(), [&] {
    executor.run([&](int worker) { probes.multiply_add(rounds, &sinks[worker].value); });
  });
}

MachineLimits measure_limits(std::string_view kernel, Executor& executor) {
  const MachineProbes& probes = probes_of(kernel);
  Sink sinks[kMaxThreads];
  return {.threads = executor.num_threads(),
          .fma_gflops = measure_fma_gflops(kernel, executor),
          .dram_read_gbps = dram_rate(probes, executor, sinks),
          .l2_read_gbps = l2_rate(probes, executor, sinks)};
}

}  // namespace mla::cpu
