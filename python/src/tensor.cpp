#include "tensor.hpp"

#include <memory>
#include <utility>
#include <vector>

#include "box.hpp"
#include "export.hpp"

namespace mla::py {

namespace ffi = tvm::ffi;

namespace {

std::string name_of(DLDataType dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case kDLInt:
      return "int" + bits;
    case kDLUInt:
      return "uint" + bits;
    case kDLFloat:
      return "fp" + bits;
    case kDLBfloat:
      return "bf" + bits;
    default:
      return "the DLPack type of code " + std::to_string(dtype.code) + " with " + bits + " bits";
  }
}

bool is(DLDataType dtype, DLDataTypeCode code, int bits) {
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

/// Shape, strides and owner of a tensor that was handed out.
struct Shared {
  DLManagedTensor managed{};
  std::vector<int64_t> shape, stride;
  ffi::ObjectRef owner;
};

ffi::Tensor wrap(std::unique_ptr<Shared> shared, void* data, DLDataType dtype, DLDevice device) {
  shared->managed.dl_tensor = {.data = data,
                               .device = device,
                               .ndim = static_cast<int32_t>(shared->shape.size()),
                               .dtype = dtype,
                               .shape = shared->shape.data(),
                               .strides = shared->stride.data(),
                               .byte_offset = 0};
  shared->managed.manager_ctx = shared.get();
  shared->managed.deleter = [](DLManagedTensor* managed) {
    delete static_cast<Shared*>(managed->manager_ctx);
  };
  return ffi::Tensor::FromDLPack(&shared.release()->managed);
}

/// A tensor over memory that the caller keeps: what NumPy does not export through DLPack (bfloat16,
/// read-only arrays). Strides in bytes, as NumPy has them.
ffi::Tensor borrow(int64_t address, const ffi::Shape& shape, const ffi::Shape& byte_strides,
                   DLDataType dtype) {
  auto shared = std::make_unique<Shared>();
  shared->shape.assign(shape.begin(), shape.end());
  const int64_t item = dtype.bits / 8;
  for (size_t d = 0; d < byte_strides.size(); ++d) {
    if (byte_strides[d] % item != 0) {
      throw_invalid({"strides", "libmla",
                     "multiples of the element's " + std::to_string(item) + " bytes",
                     std::to_string(byte_strides[d]) + " bytes"});
    }
    shared->stride.push_back(byte_strides[d] / item);
  }
  void* data = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): NumPy's
  return wrap(std::move(shared), data, dtype, {kDLCPU, 0});
}
/// The same memory as 16-bit integers, for NumPy, which has no bfloat16 of its own.
ffi::Tensor as_uint16(const ffi::Tensor& tensor) {
  auto shared = std::make_unique<Shared>();
  shared->shape.assign(tensor.shape().begin(), tensor.shape().end());
  shared->stride.assign(tensor.strides().begin(), tensor.strides().end());
  shared->owner = tensor;
  return wrap(std::move(shared), tensor.data_ptr(), {kDLUInt, 16, 1}, tensor.device());
}

}  // namespace

MLA_PY_EXPORT(borrow)
MLA_PY_EXPORT(as_uint16)

Device device_of(const ffi::TensorView& tensor, ArgName name) {
  const DLDevice device = tensor.device();
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return {};
    case kDLCUDA:
      return {DeviceKind::kCuda, device.device_id};
    default:
      throw_invalid({name.what, name.where, "memory of the CPU or of CUDA",
                     "the DLPack device type " + std::to_string(device.device_type)});
  }
}

DType dtype_of(const ffi::TensorView& tensor, ArgName name) {
  const DLDataType dtype = tensor.dtype();
  if (is(dtype, kDLBfloat, 16)) return DType::kBFloat16;
  if (is(dtype, kDLFloat, 16)) return DType::kFloat16;
  if (is(dtype, kDLFloat, 32)) return DType::kFloat32;
  if (is(dtype, kDLInt, 32)) return DType::kInt32;
  if (is(dtype, kDLInt, 64)) return DType::kInt64;
  throw_invalid({std::string(name.what) + " dtype", name.where, "fp32, bf16, fp16, int32 or int64",
                 name_of(dtype)});
}

DLDevice to_dl(Device device) {
  if (device.kind == DeviceKind::kCuda) return {kDLCUDA, device.index};
  return {kDLCPU, 0};
}

DLDataType to_dl(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case DType::kFloat16:
      return {kDLFloat, 16, 1};
    case DType::kInt32:
      return {kDLInt, 32, 1};
    case DType::kInt64:
      return {kDLInt, 64, 1};
    case DType::kFloat32:
      break;
  }
  return {kDLFloat, 32, 1};
}

std::byte* data_of(const ffi::TensorView& tensor) {
  return tensor.data_ptr() == nullptr
             ? nullptr
             : static_cast<std::byte*>(tensor.data_ptr()) + tensor.byte_offset();
}

void check_rank(const ffi::TensorView& tensor, int rank, ArgName name) {
  if (tensor.ndim() == rank) return;
  throw_invalid(
      {name.what, name.where, std::to_string(rank) + " dimensions", std::to_string(tensor.ndim())});
}

void check_dtype(const ffi::TensorView& tensor, DType wanted, ArgName name) {
  const DLDataType dtype = tensor.dtype(), want = to_dl(wanted);
  if (is(dtype, static_cast<DLDataTypeCode>(want.code), want.bits)) return;
  throw_invalid({std::string(name.what) + " dtype", name.where, std::string(mla::name_of(wanted)),
                 name_of(dtype)});
}

std::span<std::byte> bytes_of(const ffi::Tensor& tensor, Device device, ArgName name) {
  if (device_of(tensor, name) != device) {
    throw_invalid({std::string(name.what) + " device", name.where, to_string(device),
                   to_string(device_of(tensor, name))});
  }
  if (!tensor.IsContiguous()) {
    throw_invalid({name.what, name.where, "memory without gaps", "a tensor with strides"});
  }
  return {data_of(tensor), static_cast<size_t>(tensor.numel()) * tensor.dtype().bits / 8};
}

ffi::Tensor share(const void* data, std::span<const int64_t> shape, std::span<const int64_t> stride,
                  DType dtype, Device device, ffi::ObjectRef owner) {
  auto shared = std::make_unique<Shared>();
  shared->shape.assign(shape.begin(), shape.end());
  shared->stride.assign(stride.begin(), stride.end());
  shared->owner = std::move(owner);
  return wrap(std::move(shared), const_cast<void*>(data), to_dl(dtype), to_dl(device));
}

template <>
inline constexpr const char* kTypeKey<std::vector<int32_t>> = "libmla.Int32Array";
template <>
inline constexpr const char* kTypeKey<std::vector<int64_t>> = "libmla.Int64Array";

namespace {

template <class T>
ffi::Tensor copy_of(std::span<const T> values) {
  const auto owner = Box<std::vector<T>>::make({}, values.begin(), values.end());
  return share(
      contiguous_view((*owner).data(), std::array<int64_t, 1>{static_cast<int64_t>(values.size())}),
      owner);
}

}  // namespace

ffi::Tensor copy(std::span<const int32_t> values) { return copy_of(values); }
ffi::Tensor copy(std::span<const int64_t> values) { return copy_of(values); }

}  // namespace mla::py
