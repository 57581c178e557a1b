#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mla::cli {

/// What the operating system says of the machine that this process runs on.
struct Machine {
  std::string cpu_model;               ///< "unknown" where the system does not tell
  std::vector<std::string> isa_flags;  ///< those of the CPU's flags that kernels may use
  int usable_cores = 0;                ///< processors that this process may run on
  int64_t memory_bytes = 0;            ///< of the machine, 0 where unknown
  int64_t available_bytes = 0;  ///< that could be taken now without swapping, 0 where unknown
};

Machine describe_machine();

}  // namespace mla::cli
