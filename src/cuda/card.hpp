#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mla/export.hpp"

namespace mla::cuda {

/// What `mla doctor` and results say of a GPU.
struct Card {
  std::string name;
  std::string driver_version;       ///< "580.159.04"; empty where the system does not say it
  std::string driver_cuda_version;  ///< the newest CUDA that the driver serves, "13.0"
  std::string runtime_version;      ///< of the CUDA runtime inside the library
  int32_t compute_capability = 0;
  int32_t num_sms = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
};

/// Of device `index`. Throws InvalidArgument where there is none.
MLA_API Card describe_card(int32_t index);

/// All of them, cuda:0 first; where there are none, `missing` says why.
MLA_API std::vector<Card> describe_cards(std::string& missing);

/// The driver's version in the first line of /proc/driver/nvidia/version; empty where there is
/// none.
std::string driver_version_in(const std::string& line);

/// How many there are, and why there are none.
int32_t count_cards(std::string& missing);

}  // namespace mla::cuda
