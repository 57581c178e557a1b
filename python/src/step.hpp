#pragma once

#include <deque>
#include <string>

#include "box.hpp"
#include "mla/step.hpp"
#include "mla/step_runner.hpp"

namespace mla::py {

/// A step with the names that its parts lend.
struct OwnedStep {
  Step step;
  std::deque<std::string> names;  // a deque: they stay where they are
};

template <>
inline constexpr const char* kTypeKey<OwnedStep> = "libmla.Step";
using StepBox = Box<OwnedStep>;

template <>
inline constexpr const char* kTypeKey<StepRunner> = "libmla.StepRunner";
using RunnerBox = Box<StepRunner>;

}  // namespace mla::py
