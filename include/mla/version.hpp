#pragma once

#include "mla/export.hpp"

#define MLA_VERSION_MAJOR 0
#define MLA_VERSION_MINOR 1
#define MLA_VERSION_PATCH 0

namespace mla {

/// "major.minor.patch" of the library that is linked, which may differ from the headers'.
MLA_API const char* version() noexcept;

}  // namespace mla
