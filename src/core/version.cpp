#include "mla/version.hpp"

#define MLA_STRING_OF(x) #x
#define MLA_STRING(x) MLA_STRING_OF(x)

namespace mla {

const char* version() noexcept {
  return MLA_STRING(MLA_VERSION_MAJOR) "." MLA_STRING(MLA_VERSION_MINOR) "." MLA_STRING(
      MLA_VERSION_PATCH);
}

}  // namespace mla
