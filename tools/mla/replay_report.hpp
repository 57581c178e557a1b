#pragma once

#include <string>

#include "mla/output.hpp"
#include "mla/replay_options.hpp"
#include "mla/server.hpp"

namespace mla::cli {

/// The closing table of a replay.
std::string replay_table(const ReplayOptions& options, const Server& server);

/// The same, key by key, as docs/cli.md lists them.
Json replay_json(const ReplayOptions& options, const Server& server);

}  // namespace mla::cli
