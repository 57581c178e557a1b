#include "cases/random.hpp"

namespace mla::cases {
namespace {

template <class T>
void fill(uint64_t key, T* out, int64_t columns, uint32_t first_column) {
  for (int64_t i = 0; i < columns; ++i) {
    out[i] = T(uniform_value(key, first_column + static_cast<uint32_t>(i)));
  }
}

}  // namespace

void fill_uniform(uint64_t key, DType dtype, void* out, int64_t columns, uint32_t first_column) {
  switch (dtype) {
    case DType::kBFloat16:
      return fill(key, static_cast<BFloat16*>(out), columns, first_column);
    case DType::kFloat16:
      return fill(key, static_cast<Float16*>(out), columns, first_column);
    default:
      return fill(key, static_cast<float*>(out), columns, first_column);
  }
}

}  // namespace mla::cases
