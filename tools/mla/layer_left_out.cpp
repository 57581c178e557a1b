#include <CLI/CLI.hpp>

#include "mla/command.hpp"
#include "mla/usage_error.hpp"

// In the place of layer_command.cpp where the build has no mla::layer.
namespace mla::cli {

void add_layer_command(CLI::App& app, int& /*status*/) {
  CLI::App* command = app.add_subcommand("layer", "left out of this build");
  command->allow_extras();
  command->callback([] {
    throw UsageError(
        "layer: this build has no mla::layer; build with oneDNN (libdnnl-dev) installed and "
        "MLA_LAYER=ON");
  });
}

}  // namespace mla::cli
