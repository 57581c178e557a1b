#include "mla/version.hpp"

#include "mla/mla.h"

const char* mla_version() noexcept { return mla::version(); }

int32_t mla_abi_version() noexcept { return MLA_ABI_VERSION; }
