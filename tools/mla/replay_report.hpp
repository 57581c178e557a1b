#pragma once

#include <optional>
#include <string>

#include "cpu/machine_limits.hpp"
#include "mla/output.hpp"
#include "mla/replay_options.hpp"
#include "mla/server.hpp"

namespace mla::cli {

/// The limits that the attention's rates are given against; none where they were not measured.
using Roofs = std::optional<cpu::MachineLimits>;

/// The closing table of a replay.
std::string replay_table(const ReplayOptions& options, const Server& server, const Roofs& roofs);

/// The same, key by key, as docs/cli.md lists them.
Json replay_json(const ReplayOptions& options, const Server& server, const Roofs& roofs);

}  // namespace mla::cli
