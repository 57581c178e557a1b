#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cases/layer_case.hpp"

// The layer files of golden/; on another machine than the one that built the tests they are where
// the environment variable MLA_GOLDEN_LAYERS says.
namespace mla::cases {

inline std::string golden_folder() {
  const char* folder = std::getenv("MLA_GOLDEN_LAYERS");
  return folder == nullptr ? MLA_GOLDEN_LAYERS : folder;
}

inline LayerFile open_golden(const std::string& name) {
  return LayerFile(golden_folder() + "/" + name + ".safetensors");
}

inline std::vector<std::string> golden_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden_folder())) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace mla::cases
