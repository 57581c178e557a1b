#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>

#include "mla/command.hpp"
#include "mla/error.hpp"
#include "mla/usage_error.hpp"
#include "mla/version.hpp"

namespace {

constexpr void (*kCommands[])(CLI::App&, int&) = {
    mla::cli::add_case_command,   mla::cli::add_doctor_command, mla::cli::add_layer_command,
    mla::cli::add_replay_command, mla::cli::add_bench_command,
};

int fail(const char* text, int status) {
  fmt::print(stderr, "mla: {}\n", text);
  return status;
}

int run(int argc, char** argv) {
  using namespace mla::cli;  // NOLINT(google-build-using-namespace): one function
  CLI::App app("Multi-head Latent Attention for serving engines", "mla");
  app.set_version_flag("--version", mla::version());
  app.require_subcommand(0, 1);  // the parser asks for a missing one before it names a wrong one
  int status = kDone;
  for (const auto add_command : kCommands) add_command(app, status);
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) throw CLI::RequiredError("A command");
    return status;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kBadUsage;  // --help and --version end here too
  }
}

}  // namespace

int main(int argc, char** argv) {
  using mla::cli::kBadUsage;
  try {
    const int status = run(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return fail("standard output could not be written", mla::cli::kCheckFailed);
    }
    return status;
  } catch (const mla::cli::UsageError& error) {
    return fail(error.what(), kBadUsage);
  } catch (const mla::InvalidArgument& error) {
    return fail(error.what(), kBadUsage);
  } catch (const std::bad_alloc&) {
    return fail("out of memory: ask for fewer pages, layers, heads or tokens", kBadUsage);
  } catch (const std::exception& error) {
    return fail(error.what(), mla::cli::kCheckFailed);
  }
}
