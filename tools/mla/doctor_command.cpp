#include <fmt/core.h>
#include <fmt/ranges.h>

#include <memory>

#include "mla/command.hpp"
#include "mla/machine.hpp"
#include "mla/output.hpp"
#include "mla/version.hpp"

namespace mla::cli {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

Json to_json(const Machine& machine) {
  return {{"cpu_model", machine.cpu_model},
          {"usable_cores", machine.usable_cores},
          {"isa_flags", machine.isa_flags},
          {"memory_bytes", machine.memory_bytes},
          {"available_bytes", machine.available_bytes}};
}

int run_doctor(const JsonTarget& json) {
  const Machine machine = describe_machine();
  if (!json.to_stdout()) {
    fmt::print("libmla {}\n", version());
    fmt::print("CPU     {}, {} usable cores\n", machine.cpu_model, machine.usable_cores);
    fmt::print("flags   {}\n", fmt::join(machine.isa_flags, " "));
    fmt::print("memory  {:.1f} GiB, {:.1f} GiB available\n",
               static_cast<double>(machine.memory_bytes) / kGiB,
               static_cast<double>(machine.available_bytes) / kGiB);
  }
  write_json(json, {{"version", version()}, {"machine", to_json(machine)}});
  return kDone;
}

}  // namespace

void add_doctor_command(CLI::App& app, int& status) {
  CLI::App* command = app.add_subcommand("doctor", "describes this machine and checks the kernels");
  const auto json = std::make_shared<JsonTarget>();
  add_json_option(*command, *json);
  command->callback([json, &status] {
    check_writable(*json);
    status = run_doctor(*json);
  });
}

}  // namespace mla::cli
