#pragma once

#include <stdexcept>

namespace mla::cli {

/// An argument or an input file is wrong. main() prints the text and exits with kBadUsage.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace mla::cli
