#pragma once

#include "box.hpp"
#include "mla/pool.hpp"

namespace mla::py {

template <>
inline constexpr const char* kTypeKey<LatentPool> = "libmla.LatentPool";
using PoolBox = Box<LatentPool>;

}  // namespace mla::py
