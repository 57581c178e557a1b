#include "mla/peer_library.hpp"

#include <dlfcn.h>
#include <fmt/core.h>

#include <filesystem>

#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

template <class Function>
Function find(void* library, const std::string& file, const char* name) {
  const auto function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw UsageError(
        fmt::format("--peer {}: it has no function {} (see tools/mla/peer.h)", file, name));
  }
  return function;
}

}  // namespace

PeerLibrary::PeerLibrary(const std::string& file) {
  // A name without a slash would be looked for in the system's folders.
  const std::string path = std::filesystem::absolute(file).string();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw UsageError(
        fmt::format("--peer {}: {}", file, reason == nullptr ? "cannot be opened" : reason));
  }
  const auto name = find<decltype(&mla_peer_name)>(library, file, "mla_peer_name");
  plan_ = find<decltype(plan_)>(library, file, "mla_peer_plan");
  run_ = find<decltype(run_)>(library, file, "mla_peer_run");
  release_ = find<decltype(release_)>(library, file, "mla_peer_release");
  name_ = name();
}

}  // namespace mla::cli
