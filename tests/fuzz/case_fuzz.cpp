// The reader of case files takes any bytes; a small case that it accepts must hold, or be refused
// by the library.
#include <cstdint>
#include <string_view>

#include "cases/case_json.hpp"
#include "cases/check.hpp"
#include "fuzz/byte_reader.hpp"
#include "mla/error.hpp"

namespace {

constexpr mla::cases::CaseMemory kMemory{.max_touched = 1 << 20, .max_mapped = 1 << 30};

// Multiply-adds of one run, so that a case ends in a few milliseconds.
double work_of(const mla::cases::AttentionCase& c) {
  double pairs = 0;
  for (size_t i = 0; i < c.q_lens.size(); ++i) {
    pairs += static_cast<double>(c.q_lens[i]) * c.kv_lens[i];
  }
  return pairs * c.geometry.num_heads * 2.0 * static_cast<double>(c.geometry.latent_width());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data,
                                      size_t size) {  // NOLINT: libFuzzer's name
  static const auto kExecutor = std::make_shared<mla::Executor>(1);
  try {
    const auto c = mla::cases::parse_case({reinterpret_cast<const char*>(data), size}, kMemory);
    constexpr int64_t kMostRows = 4096;  // index arrays of a bucket are taken at once
    if (work_of(c) > 1e6 || (c.bucket && c.bucket->num_rows > kMostRows)) return 0;
    const auto report = mla::cases::check_case(c, {.executor = kExecutor});
    if (!report) mla::fuzz::fail(report.fault);
  } catch (const mla::Error&) {  // refused by the reader or the library
  }
  return 0;
}
