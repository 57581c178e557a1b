#include "mla/machine.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string_view>

namespace mla::cli {
namespace {

constexpr std::array<std::string_view, 15> kFlagsOfInterest = {
    "sse4_2",      "avx2",     "fma",   "f16c",    "avx512f", "avx512bw", "avx512vl", "avx512_bf16",
    "avx512_fp16", "amx_bf16", "asimd", "asimdhp", "bf16",    "sve",      "sve2",
};

// "key   : value" of /proc/cpuinfo and /proc/meminfo; the first line with the key.
std::string value_of(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t key_end = line.find_last_not_of(" \t", colon == 0 ? 0 : colon - 1);
    if (std::string_view(line).substr(0, key_end + 1) != key) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

int64_t meminfo_bytes(std::string_view key) {
  std::istringstream text(value_of("/proc/meminfo", key));
  int64_t kib = 0;
  text >> kib;
  return kib * 1024;
}

int count_usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace

Machine describe_machine() {
  Machine machine;
  machine.cpu_model = value_of("/proc/cpuinfo", "model name");
  if (machine.cpu_model.empty()) machine.cpu_model = "unknown";
  std::string flags = value_of("/proc/cpuinfo", "flags");
  if (flags.empty()) flags = value_of("/proc/cpuinfo", "Features");
  std::istringstream words(flags);
  for (std::string word; words >> word;) {
    if (std::ranges::find(kFlagsOfInterest, word) != kFlagsOfInterest.end()) {
      machine.isa_flags.push_back(word);
    }
  }
  machine.usable_cores = count_usable_cores();
  machine.memory_bytes = meminfo_bytes("MemTotal");
  machine.available_bytes = meminfo_bytes("MemAvailable");
  return machine;
}

}  // namespace mla::cli
