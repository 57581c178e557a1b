#include "cpu/simd_impls.hpp"

#include "cpu/tile_layout.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mla::cpu {

plan::CostModel simd_cost_model(const Geometry& geometry, int32_t lanes, const KernelSpeed& speed) {
  const TileLayout layout = tile_layout(geometry, lanes);
  const auto width = static_cast<double>(geometry.latent_width());
  const auto rank = static_cast<double>(geometry.kv_lora_rank);
  const double tokens = layout.block_tokens;
  constexpr double kTileNs = 500;  // a tile of one row and no keys
  return {.tile_rows = layout.tile_rows,
          .block_tokens = layout.block_tokens,
          .split_align = 1,
          .tile_ns = kTileNs,
          .block_ns = tokens * width / speed.widen_per_ns,
          .block_row_ns = tokens * (width + rank) / speed.fma_per_ns,
          .partial_row_ns = rank / speed.partial_per_ns};
}

#if defined(__x86_64__)
namespace {

// libgcc has no name for it in every version that we build with.
bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace

// __builtin_cpu_supports also asks whether the operating system saves the registers.
const char* avx2_missing() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return "this CPU has no AVX2";
  if (!__builtin_cpu_supports("fma")) return "this CPU has no FMA";
  if (!__builtin_cpu_supports("bmi")) return "this CPU has no BMI1";
  if (!__builtin_cpu_supports("bmi2")) return "this CPU has no BMI2";
  if (!has_f16c()) return "this CPU has no F16C";
  return nullptr;
}

const char* avx512_missing() {
  if (const char* missing = avx2_missing()) return missing;
  if (!__builtin_cpu_supports("avx512f")) return "this CPU has no AVX-512";
  if (!__builtin_cpu_supports("avx512vl")) return "this CPU has no AVX-512 VL";
  if (!__builtin_cpu_supports("avx512dq")) return "this CPU has no AVX-512 DQ";
  if (!__builtin_cpu_supports("avx512bw")) return "this CPU has no AVX-512 BW";
  return nullptr;
}
#endif

}  // namespace mla::cpu
