#pragma once

#include <tvm/ffi/function.h>

#include <new>
#include <utility>

#include "mla/error.hpp"

namespace mla::py {

/// Fn with the library's exceptions as Python's, their text unchanged: ValueError for
/// InvalidArgument, RuntimeError for other Errors, MemoryError for std::bad_alloc.
template <auto Fn>
struct Translated;

template <class Ret, class... Args, Ret (*Fn)(Args...)>
struct Translated<Fn> {
  static Ret call(Args... args) {
    try {
      return Fn(std::forward<Args>(args)...);
    } catch (const InvalidArgument& error) {
      throw tvm::ffi::Error("ValueError", error.what(), "");
    } catch (const Error& error) {
      throw tvm::ffi::Error("RuntimeError", error.what(), "");
    } catch (const std::bad_alloc& error) {
      throw tvm::ffi::Error("MemoryError", error.what(), "");
    }
  }
};

}  // namespace mla::py

/// Makes a function of this file callable as an attribute of the loaded module.
#define MLA_PY_EXPORT(function) \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(function, ::mla::py::Translated<&(function)>::call)
