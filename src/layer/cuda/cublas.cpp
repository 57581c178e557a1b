#include "layer/cuda/cublas.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "cuda/device_guard.hpp"
#include "mla/error.hpp"

namespace mla::layer::cuda {
namespace {

constexpr size_t kScratchBytes = size_t{32} << 20;  // what cuBLAS's manual advises for Hopper

// Both have the interface with 64-bit sizes.
constexpr const char* kLibraries[] = {"libcublas.so.13", "libcublas.so.12"};

// The few functions that are used.
struct Functions {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  decltype(&cublasSetMathMode) set_math_mode = nullptr;
  decltype(&cublasGetStatusString) status_string = nullptr;
  decltype(&cublasGemmEx_64) gemm = nullptr;
  decltype(&cublasGemmStridedBatchedEx_64) batched_gemm = nullptr;
  std::string missing;  // why they are not there

  Functions() {
    for (const char* name : kLibraries) {
      void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr && find_all(library)) {
        missing.clear();
        return;
      }
      missing += (missing.empty() ? "" : "; ") + last_error();
      if (library != nullptr) dlclose(library);
    }
  }

  static const Functions& get() {
    static const Functions functions;
    return functions;
  }

 private:
  static std::string last_error() {
    const char* text = dlerror();
    return text == nullptr ? "unknown" : text;
  }
  template <class Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
  bool find_all(void* library) {
    return find(library, "cublasCreate_v2", create) && find(library, "cublasDestroy_v2", destroy) &&
           find(library, "cublasSetStream_v2", set_stream) &&
           find(library, "cublasSetWorkspace_v2", set_workspace) &&
           find(library, "cublasSetMathMode", set_math_mode) &&
           find(library, "cublasGetStatusString", status_string) &&
           find(library, "cublasGemmEx_64", gemm) &&
           find(library, "cublasGemmStridedBatchedEx_64", batched_gemm);
  }
};

void check(cublasStatus_t status, const char* call, const char* where) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw CudaError({.what = call,
                   .where = where,
                   .expected = "CUBLAS_STATUS_SUCCESS",
                   .got = Functions::get().status_string(status)},
                  status);
}

cudaDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

}  // namespace

void check_cublas() {
  const Functions& functions = Functions::get();
  if (functions.missing.empty()) return;
  throw_invalid({.what = "device",
                 .where = "LayerOptions",
                 .expected = "cuBLAS where the dynamic linker finds it (libcublas.so.13 or .12)",
                 .got = functions.missing});
}

Cublas::Cublas(Device device) : device_(device), scratch_(device, kScratchBytes) {
  check_cublas();
  const mla::cuda::DeviceGuard guard(device.index);
  check(Functions::get().create(&handle_), "cublasCreate", "Cublas");
  try {
    // Partial sums of a split K would otherwise be kept in the dtype of y.
    check(Functions::get().set_math_mode(handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
          "cublasSetMathMode", "Cublas");
    warm_up();
  } catch (...) {
    Functions::get().destroy(handle_);
    throw;
  }
}

Cublas::~Cublas() { Functions::get().destroy(handle_); }

void Cublas::gemm(const ConstTensor<3>& x, const ConstTensor<3>& w, const Tensor<3>& y,
                  Stream stream) {
  if (y.empty()) return;
  const Functions& cublas = Functions::get();
  const mla::cuda::DeviceGuard guard(device_.index);
  check(cublas.set_stream(handle_, static_cast<cudaStream_t>(stream.handle)), "cublasSetStream",
        "gemm");
  // Setting the stream takes the scratch away.
  check(cublas.set_workspace(handle_, scratch_.data(), scratch_.bytes()), "cublasSetWorkspace",
        "gemm");

  // To cuBLAS, which counts down columns first, rows of ours are columns: y^T = w x^T, with w as
  // [K, N] to be transposed, or as [N, K] where it is our columns that are apart.
  const auto [num_rows, batch, num_columns] = y.shape;
  const int64_t depth = x.shape[2];
  const bool apart = w.stride[2] != 1;
  const cublasOperation_t turn_w = apart ? CUBLAS_OP_N : CUBLAS_OP_T;
  const int64_t w_stride =
      apart ? std::max(w.stride[2], num_columns) : std::max(w.stride[1], depth);
  const int64_t x_stride = std::max(x.stride[0], depth);  // of a single row it may be anything
  const int64_t y_stride = std::max(y.stride[0], num_columns);
  const float one = 1;
  const float zero = 0;
  if (batch == 1) {
    check(cublas.gemm(handle_, turn_w, CUBLAS_OP_N, num_columns, num_rows, depth, &one, w.data,
                      type_of(w.dtype), w_stride, x.data, type_of(x.dtype), x_stride, &zero, y.data,
                      type_of(y.dtype), y_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx", "gemm");
  } else {
    check(cublas.batched_gemm(handle_, turn_w, CUBLAS_OP_N, num_columns, num_rows, depth, &one,
                              w.data, type_of(w.dtype), w_stride, w.stride[0], x.data,
                              type_of(x.dtype), x_stride, x.stride[1], &zero, y.data,
                              type_of(y.dtype), y_stride, y.stride[1], batch, CUBLAS_COMPUTE_32F,
                              CUBLAS_GEMM_DEFAULT),
          "cublasGemmStridedBatchedEx", "gemm");
  }
}

void Cublas::warm_up() {
  constexpr int64_t kSide = 64;
  constexpr int64_t kMatrix = kSide * kSide;
  constexpr size_t kOperand = 2 * kMatrix * sizeof(float);
  DeviceMemory memory(device_, 3 * kOperand);
  memory.fill(0);
  auto* base = static_cast<std::byte*>(memory.data());
  const auto multiply = [&](DType in, DType out, int64_t batch, bool apart) {
    const std::array<int64_t, 3> shape{kSide, batch, kSide};
    const ConstTensor<3> w{base + kOperand,
                           {batch, kSide, kSide},
                           {kMatrix, apart ? 1 : kSide, apart ? kSide : 1},
                           device_,
                           in};
    gemm(contiguous_view(static_cast<const void*>(base), shape, in, device_), w,
         contiguous_view(static_cast<void*>(base + 2 * kOperand), shape, out, device_), Stream{});
  };
  for (const int64_t batch : {1, 2}) {
    for (const bool apart : {false, true}) {
      multiply(DType::kFloat32, DType::kFloat32, batch, apart);
      for (const DType in : {DType::kBFloat16, DType::kFloat16}) {
        multiply(in, in, batch, apart);
        multiply(in, DType::kFloat32, batch, apart);
      }
    }
  }
  synchronize(device_);
}

}  // namespace mla::layer::cuda
