#include "mla/step_item.hpp"

#include "cases/random.hpp"

namespace mla::cli {
namespace {

constexpr uint64_t kVerdictStream = 0x56455244;   // keys what becomes of the drafts
constexpr uint64_t kRejectedStream = 0x52454a43;  // keys the content of those that are wrong
constexpr auto kRight = static_cast<uint32_t>(0.7 * 0x1p32);

}  // namespace

int32_t Speculation::draw_accepted(const Request& request, int64_t begin, int32_t drafted) const {
  const uint64_t key = cases::row_key(cases::row_key(seed, kVerdictStream, 0), request.output_key,
                                      static_cast<uint64_t>(begin));
  int32_t accepted = 0;
  while (accepted < drafted && cases::random_bits(key, static_cast<uint32_t>(accepted)) < kRight) {
    ++accepted;
  }
  return accepted;
}

uint64_t content_key(const Request& request, const StepItem& item, int64_t position) {
  if (position < item.kept_end()) return request.content_key(position);
  return cases::row_key(kRejectedStream, request.output_key, static_cast<uint64_t>(item.begin));
}

}  // namespace mla::cli
