#pragma once

#include <tvm/ffi/memory.h>
#include <tvm/ffi/object.h>

#include <utility>
#include <vector>

namespace mla::py {

/// Name of the Python-side type of a boxed T; specialised beside the functions that make one.
template <class T>
inline constexpr const char* kTypeKey = nullptr;

/// A T that Python holds, with the objects that it borrows from.
template <class T>
class BoxObj : public tvm::ffi::Object {
 public:
  template <class... Args>
  explicit BoxObj(std::vector<tvm::ffi::ObjectRef> lenders, Args&&... args)
      : lenders_(std::move(lenders)), value(std::forward<Args>(args)...) {}

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL(kTypeKey<T>, BoxObj, tvm::ffi::Object);

 private:
  std::vector<tvm::ffi::ObjectRef> lenders_;  // before value: they outlive it

 public:
  T value;
};

template <class T>
class Box : public tvm::ffi::ObjectRef {
 public:
  explicit Box(tvm::ffi::ObjectPtr<BoxObj<T>> object) : tvm::ffi::ObjectRef(std::move(object)) {}

  template <class... Args>
  static Box make(std::vector<tvm::ffi::ObjectRef> lenders, Args&&... args) {
    return Box(tvm::ffi::make_object<BoxObj<T>>(std::move(lenders), std::forward<Args>(args)...));
  }

  T& operator*() const { return const_cast<BoxObj<T>*>(get())->value; }

  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Box, tvm::ffi::ObjectRef, BoxObj<T>);
};

}  // namespace mla::py
