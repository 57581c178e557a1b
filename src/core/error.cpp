#include "mla/error.hpp"

#include <utility>

namespace mla {

Error::Error(ErrorParts parts)
    : std::runtime_error(parts.where + ": " + parts.what + ": expected " + parts.expected +
                         ", got " + parts.got),
      parts_(std::move(parts)) {}

void throw_invalid(ErrorParts parts) { throw InvalidArgument(std::move(parts)); }
void throw_state(ErrorParts parts) { throw InvalidState(std::move(parts)); }

}  // namespace mla
