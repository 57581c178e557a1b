#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "mla/device.hpp"

namespace mla::cli {

/// Accepts "cpu", "cuda" and "cuda:N".
CLI::Validator device_option();

/// Of a text that device_option() accepted.
Device parse_device(const std::string& text);

}  // namespace mla::cli
