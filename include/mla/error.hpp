#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "mla/export.hpp"

namespace mla {

/// The four parts of every message: which argument (and entry), in which call, what it must be,
/// what came.
struct ErrorParts {
  std::string what;
  std::string where;
  std::string expected;
  std::string got;
};

/// Base of everything the library throws on purpose. The text is
/// "where: what: expected EXPECTED, got GOT".
class MLA_API Error : public std::runtime_error {
 public:
  explicit Error(ErrorParts parts);
  const ErrorParts& parts() const noexcept { return parts_; }

 private:
  ErrorParts parts_;
};

/// An argument is outside what the call accepts. Nothing was changed.
class MLA_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The object is not in a state that allows the call (run before plan, commit without admit).
class MLA_API InvalidState : public Error {
 public:
  using Error::Error;
};

/// A call of the CUDA runtime or of cuBLAS failed: what is the call, got its answer.
class MLA_API CudaError : public Error {
 public:
  CudaError(ErrorParts parts, int code) : Error(std::move(parts)), code_(code) {}
  int code() const noexcept { return code_; }  ///< a cudaError_t, or a cublasStatus_t

 private:
  int code_;
};

[[noreturn]] MLA_API void throw_invalid(ErrorParts parts);
[[noreturn]] MLA_API void throw_state(ErrorParts parts);

}  // namespace mla
