#pragma once

#include <cstdint>

// A program that links mla_test_allocations counts its allocations: operator new and delete are
// replaced in all of it.
namespace mla::test {

/// Calls of operator new so far, on every thread.
int64_t num_allocations();

}  // namespace mla::test
