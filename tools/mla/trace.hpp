#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace mla::cli {

inline constexpr int64_t kTraceBlockTokens = 512;             // of the format, at full length
inline constexpr int64_t kMaxTraceLength = int64_t{1} << 30;  // so that input + output fit in int32

/// One request of a serving trace.
struct TraceRequest {
  double timestamp_ms = 0;
  int64_t input_length = 0;        ///< tokens, 1 to kMaxTraceLength
  int64_t output_length = 0;       ///< tokens, 1 to kMaxTraceLength
  std::vector<uint64_t> hash_ids;  ///< one for each block of the input; equal ids, equal content
};

/// Reads a trace in the public Mooncake format: JSON lines with timestamp, input_length,
/// output_length and hash_ids. Blank lines and fields of other names are passed over. Stops after
/// `max_requests` (none: the whole trace); lines after that are not looked at.
///
/// name    of the trace, for messages
/// Throws  UsageError naming the line and field, or that there is no request at all.
std::vector<TraceRequest> read_trace(std::istream& lines, const std::string& name,
                                     int64_t max_requests = INT64_MAX);

/// The same from a file. Throws UsageError also where it cannot be read.
std::vector<TraceRequest> read_trace_file(const std::string& path,
                                          int64_t max_requests = INT64_MAX);

}  // namespace mla::cli
