#include "capi/error.hpp"

#include <exception>
#include <new>
#include <string>

#include "mla/error.hpp"

namespace mla::capi {
namespace {

struct LastError {
  std::string owned;
  const char* text = "";
};
thread_local LastError last_error;

void keep(const char* text) noexcept {
  try {
    last_error.owned = text;
    last_error.text = last_error.owned.c_str();
  } catch (...) {  // the text itself did not fit in memory
    last_error.text = "out of memory while an error's text was kept";
  }
}

}  // namespace

mla_status keep_current_exception() noexcept {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    keep(error.what());
    return MLA_INVALID_ARGUMENT;
  } catch (const InvalidState& error) {
    keep(error.what());
    return MLA_INVALID_STATE;
  } catch (const CudaError& error) {
    keep(error.what());
    return MLA_DEVICE_ERROR;
  } catch (const std::bad_alloc&) {
    last_error.text = "out of memory";
    return MLA_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    keep(error.what());
  } catch (...) {
    last_error.text = "an exception of an unknown type";
  }
  return MLA_INTERNAL_ERROR;
}

}  // namespace mla::capi

const char* mla_last_error() noexcept { return mla::capi::last_error.text; }
