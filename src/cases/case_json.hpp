#pragma once

#include <string_view>

#include "cases/attention_case.hpp"

namespace mla::cases {

/// The most memory that a case from a file may take.
struct CaseMemory {
  double max_touched = 8.0 * (1 << 30);           ///< bytes that take room
  double max_mapped = 1024.0 * 1024 * (1 << 20);  ///< bytes of address space, 1 TiB
};

/// Reads one case from JSON as docs/case_format.md describes it. Strict: unknown and repeated keys,
/// wrong types, values out of range and lists that are too long are refused by name. Values that
/// the library itself refuses (no heads, a page outside the pool) are read as they are.
///
/// Throws InvalidArgument, its `what` the key ("layout.q_pad", "kv_lens[3]") or the line of a
/// syntax error. Allocates in proportion to the text.
AttentionCase parse_case(std::string_view text, const CaseMemory& memory = {});

}  // namespace mla::cases
