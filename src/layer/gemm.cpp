#include "layer/gemm.hpp"

#include <algorithm>
#include <atomic>
#include <dnnl.hpp>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "layer/rows.hpp"

// Of libgomp, which oneDNN runs on; clang does not find gcc's <omp.h>.
extern "C" int omp_get_max_threads();
extern "C" void omp_set_num_threads(int num_threads);

namespace mla::layer {
namespace {

using dnnl::memory;

constexpr int64_t kAny = DNNL_RUNTIME_DIM_VAL;
// Rows of x in one unit where heads are many: x, w and y of a head (128 x 512) then stay in a 2 MiB
// second-level cache. T = 512, 16 heads, one thread: see the table in docs/layer.md.
constexpr int64_t kUnitRows = 128;
// Columns of y in one unit are a multiple of this: whole cache lines, and whole tiles of oneDNN.
constexpr int64_t kUnitColumns = 64;
// Below this, waking the other threads takes longer than the work (about 10 us).
constexpr int64_t kSerialFlops = 1'000'000;

memory::data_type type_of(DType dtype) {
  return dtype == DType::kFloat32 ? memory::data_type::f32 : memory::data_type::bf16;
}

// oneDNN is run by our own crew, one thread each: its OpenMP threads would spin beside ours after
// every product. The setting belongs to the calling thread.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

// oneDNN's matrix products with all sizes and strides given at execution: one for each kind, made
// once a process, so that no shape costs a compilation. With sizes known at creation it chose a
// slower kernel for one row, and the same one for more.
class Primitives {
 public:
  static const Primitives& get() {
    static const Primitives primitives;
    return primitives;
  }

  bool has_bf16() const { return static_cast<bool>(bf16_[0]); }

  // One unit: x [m, k], w [n, k], y [m, n].
  void run(const ConstTensor<2>& x, const ConstTensor<2>& w, const Tensor<2>& y) const {
    const bool rows_contiguous = w.stride[1] != 1;
    const size_t kind = (rows_contiguous ? 2 : 0) + (y.dtype == DType::kFloat32 ? 0 : 1);
    const dnnl::matmul& product = x.dtype == DType::kFloat32 ? fp32_[kind / 2] : bf16_[kind];
    const memory source = rows(x.data, x.dtype, x.shape, x.stride[0]);
    const memory weights = rows_contiguous
                               ? rows(w.data, w.dtype, {w.shape[1], w.shape[0]}, w.stride[1])
                               : transposed_rows(w.data, w.dtype, w.shape, w.stride[0]);
    const memory target = rows(y.data, y.dtype, y.shape, y.stride[0]);
    dnnl::stream stream(engine_);
    product.execute(stream,
                    {{DNNL_ARG_SRC, source}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, target}});
    stream.wait();
  }

 private:
  Primitives() : engine_(dnnl::engine::kind::cpu, 0) {
    const OneThread one_thread;
    for (const bool rows_contiguous : {false, true}) {
      fp32_.push_back(make(DType::kFloat32, DType::kFloat32, rows_contiguous));
      for (const DType out : {DType::kFloat32, DType::kBFloat16}) {
        bf16_.push_back(make(DType::kBFloat16, out, rows_contiguous));
      }
    }
  }

  // Empty where the processor has no such product, which is so for bf16 before AVX-512.
  dnnl::matmul make(DType in, DType out, bool rows_contiguous) const {
    const memory::desc x({kAny, kAny}, type_of(in), memory::dims{kAny, 1});
    const memory::desc w({kAny, kAny}, type_of(in),
                         rows_contiguous ? memory::dims{kAny, 1} : memory::dims{1, kAny});
    const memory::desc y({kAny, kAny}, type_of(out), memory::dims{kAny, 1});
    try {
      return dnnl::matmul(dnnl::matmul::primitive_desc(dnnl::matmul::desc(x, w, y), engine_));
    } catch (const dnnl::error& error) {
      if (in == DType::kFloat32 || error.status != dnnl_unimplemented) throw;
      return {};
    }
  }

  // oneDNN takes non-const pointers also of what it only reads, and wants rows of at least their
  // width also where there is one.
  memory rows(const void* data, DType dtype, std::array<int64_t, 2> shape, int64_t stride) const {
    return {{{shape[0], shape[1]}, type_of(dtype), {std::max(stride, shape[1]), 1}},
            engine_,
            const_cast<void*>(data)};
  }
  memory transposed_rows(const void* data, DType dtype, std::array<int64_t, 2> shape,
                         int64_t stride) const {
    return {{{shape[1], shape[0]}, type_of(dtype), {1, std::max(stride, shape[1])}},
            engine_,
            const_cast<void*>(data)};
  }

  dnnl::engine engine_;
  std::vector<dnnl::matmul> fp32_;  // [rows_contiguous]
  std::vector<dnnl::matmul> bf16_;  // [rows_contiguous][out is bf16]
};

// How a product is cut: unit i is matrix i / (row_units * column_units), and so on.
struct Units {
  int64_t rows, columns;  // of y in one unit
  int64_t row_units, column_units, count;
};

Units cut(const ConstTensor<3>& x, const ConstTensor<3>& w, int64_t num_workers) {
  const int64_t m = x.shape[0];
  const int64_t batch = w.shape[0];
  const int64_t n = w.shape[1];
  Units units{};
  units.rows = batch > 1 ? kUnitRows : m;
  units.columns = n;
  if (batch < num_workers) {
    const int64_t shares = (num_workers + batch - 1) / batch;
    const int64_t lines = ((n + shares - 1) / shares + kUnitColumns - 1) / kUnitColumns;
    units.columns = std::min(n, lines * kUnitColumns);
  }
  units.row_units = (m + units.rows - 1) / units.rows;
  units.column_units = (n + units.columns - 1) / units.columns;
  units.count = batch * units.row_units * units.column_units;
  return units;
}

// Matrix `index` of the middle dimension's rows [begin, begin + count).
template <class T>
TensorView<T, 2> rows_of(const TensorView<T, 3>& view, int batch_dim, int64_t index, int64_t begin,
                         int64_t count) {
  const int row_dim = 1 - batch_dim;
  const int64_t offset = index * view.stride[batch_dim] + begin * view.stride[row_dim];
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return {static_cast<Byte*>(view.data) + offset * size_of(view.dtype),
          {count, view.shape[2]},
          {view.stride[row_dim], view.stride[2]},
          view.device,
          view.dtype};
}

// A unit in fp32 whatever its dtype.
void run_widened(const ConstTensor<2>& x, const ConstTensor<2>& w, const Tensor<2>& y) {
  const auto widen = [](const ConstTensor<2>& from, std::vector<float>& to) {
    to.resize(static_cast<size_t>(from.shape[0] * from.shape[1]));
    const auto view = contiguous_view(to.data(), from.shape);
    convert_rows(from, view);
    return ConstTensor<2>(TensorView<const float, 2>(view));
  };
  std::vector<float> wide_x, wide_w, wide_y(static_cast<size_t>(y.shape[0] * y.shape[1]));
  const auto result = contiguous_view(wide_y.data(), y.shape);
  Primitives::get().run(widen(x, wide_x), widen(w, wide_w), result);
  convert_rows(TensorView<const float, 2>(result), y);
}

}  // namespace

bool has_native_bf16() { return Primitives::get().has_bf16(); }

void gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y, Executor& executor,
          Bf16Math math) {
  if (y.empty()) return;
  const Primitives& primitives = Primitives::get();
  const bool widened =
      x.dtype == DType::kBFloat16 && (math == Bf16Math::kWidened || !primitives.has_bf16());
  const int64_t flops = 2 * x.shape[0] * w.shape[0] * w.shape[1] * w.shape[2];
  const bool serial = flops < kSerialFlops;
  const Units units = cut(x, w, serial ? 1 : executor.num_threads());

  const auto run_unit = [&](int64_t unit) {
    const int64_t column_begin = unit % units.column_units * units.columns;
    const int64_t row_begin = unit / units.column_units % units.row_units * units.rows;
    const int64_t batch = unit / (units.column_units * units.row_units);
    const int64_t num_columns = std::min(units.columns, w.shape[1] - column_begin);
    const int64_t num_rows = std::min(units.rows, x.shape[0] - row_begin);
    const auto unit_x = rows_of(x, 1, batch, row_begin, num_rows);
    const auto unit_w = rows_of(w, 0, batch, column_begin, num_columns);
    const auto unit_y =
        columns(rows_of(y, 1, batch, row_begin, num_rows), column_begin, num_columns);
    if (widened) {
      run_widened(unit_x, unit_w, unit_y);
    } else {
      primitives.run(unit_x, unit_w, unit_y);
    }
  };

  std::atomic<int64_t> next_unit{0};
  std::exception_ptr failure;
  std::once_flag failed;
  const auto work = [&](int) noexcept {
    try {
      const OneThread one_thread;
      for (int64_t unit = next_unit++; unit < units.count; unit = next_unit++) run_unit(unit);
    } catch (...) {
      std::call_once(failed, [&] { failure = std::current_exception(); });
    }
  };
  if (serial) {
    work(0);
  } else {
    executor.run(work);
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace mla::layer
