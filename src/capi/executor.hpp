#pragma once

#include <memory>

#include "mla/executor.hpp"

/// The handle shares the executor with the objects that were created with it.
struct mla_executor {  // NOLINT(readability-identifier-naming): declared by mla.h
  std::shared_ptr<mla::Executor> shared;
};
