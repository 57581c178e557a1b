#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "mla/device.hpp"

namespace mla::cli {

/// Accepts "cpu", "cuda" and "cuda:N".
CLI::Validator device_option();

/// Of a text that device_option() accepted.
Device parse_device(const std::string& text);

/// The same. Throws InvalidArgument, in the name of `command`, where the machine has no such
/// device.
Device find_device(const std::string& text, const char* command);

}  // namespace mla::cli
