// Matrix products of the MLA layer, at the widths of DeepSeek-V3 with 16 heads on a rank.
#include <benchmark/benchmark.h>

#include <vector>

#include "layer/gemm.hpp"

namespace mla::layer {
namespace {

struct Product {
  const char* name;
  int64_t batch, k, n;
  bool rows_contiguous;  // of the weights, as in the absorbed half of kv_b_proj
};
constexpr Product kProducts[] = {
    {"q_a_proj", 1, 7168, 1536, false},
    {"q_b_proj", 1, 1536, 3072, false},
    {"absorb", 16, 128, 512, true},
    {"values", 16, 512, 128, false},
};

void run(benchmark::State& state, const Product& product, DType dtype) {
  const int64_t m = state.range(0);
  Executor executor(static_cast<int>(state.range(1)));
  const auto bytes = [&](int64_t count, DType type) {
    return std::vector<std::byte>(static_cast<size_t>(count * size_of(type)));
  };
  const auto [name, batch, k, n, rows_contiguous] = product;
  // Zeros: the time of a product does not depend on its values, but for subnormal ones.
  auto x = bytes(m * batch * k, dtype);
  auto w = bytes(batch * n * k, dtype);
  auto y = bytes(m * batch * n, dtype);
  const ConstTensor<3> weights{w.data(),
                               {batch, n, k},
                               {n * k, rows_contiguous ? 1 : k, rows_contiguous ? n : 1},
                               {},
                               dtype};
  for (auto _ : state) {
    gemm(contiguous_view(static_cast<const void*>(x.data()), std::array{m, batch, k}, dtype),
         weights, contiguous_view(static_cast<void*>(y.data()), std::array{m, batch, n}, dtype),
         executor);
    benchmark::ClobberMemory();
  }
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(m * batch * k * n),
                                                 benchmark::Counter::kIsIterationInvariantRate);
}

const bool kRegistered = [] {
  for (const Product& product : kProducts) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      benchmark::RegisterBenchmark(
          (std::string(product.name) + "/" + std::string(name_of(dtype))).c_str(),
          [&product, dtype](benchmark::State& state) { run(state, product, dtype); })
          ->ArgNames({"tokens", "threads"})
          ->ArgsProduct({{1, 4, 16, 64, 512}, {1, 2}})
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  return true;
}();

}  // namespace
}  // namespace mla::layer
