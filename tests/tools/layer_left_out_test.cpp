#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <string>

#include "mla/command.hpp"
#include "mla/usage_error.hpp"

// The command that stands for `mla layer` in a build without mla::layer, compiled in every build.
namespace mla::cli {
namespace {

TEST(LayerLeftOut, WhateverItIsAskedItSaysWhatToInstall) {
  CLI::App app;
  int status = 0;
  add_layer_command(app, status);
  try {
    app.parse("layer file --device cuda");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("libdnnl-dev"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace mla::cli
