#pragma once

#include <string>
#include <utility>

#include "mla/device.hpp"
#include "mla/peer.h"

namespace mla::cli {

/// A library behind the interface of peer.h, opened from a file. It stays open to the end of the
/// process: kernels that it registered can not be taken back.
class PeerLibrary {
 public:
  /// Throws UsageError where the file can not be opened, with the dynamic linker's words, or lacks
  /// one of the functions.
  explicit PeerLibrary(const std::string& file);

  const std::string& name() const { return name_; }

 private:
  friend class PeerPlan;

  decltype(&mla_peer_plan) plan_ = nullptr;
  decltype(&mla_peer_run) run_ = nullptr;
  decltype(&mla_peer_release) release_ = nullptr;
  std::string name_;
};

/// A plan of a peer, owned. False where the peer does not serve the batch.
class PeerPlan {
 public:
  PeerPlan(const PeerLibrary& library, const MlaPeerBatch& batch, Stream stream)
      : library_(library), plan_(library.plan_(&batch, stream.handle)) {}
  ~PeerPlan() {
    if (plan_ != nullptr) library_.release_(plan_);
  }
  PeerPlan(const PeerPlan&) = delete;
  PeerPlan& operator=(const PeerPlan&) = delete;

  explicit operator bool() const { return plan_ != nullptr; }
  /// What the peer returns: 0 on success.
  int run(const MlaPeerTensors& tensors, Stream stream) const {
    return library_.run_(plan_, &tensors, stream.handle);
  }

 private:
  const PeerLibrary& library_;
  void* plan_;
};

}  // namespace mla::cli
