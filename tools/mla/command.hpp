#pragma once

namespace CLI {
class App;
}

namespace mla::cli {

// Exit statuses of every command.
inline constexpr int kDone = 0;         // all is well
inline constexpr int kCheckFailed = 1;  // it ran, and something it checks is wrong
inline constexpr int kBadUsage = 2;     // arguments or input files that cannot be served

// Each command has a source of its own, <name>_command.cpp, with one function that adds it to the
// program: its options and a callback that runs it and puts the exit status into `status`, which
// outlives the callback. main.cpp has the table of them.
void add_bench_command(CLI::App& app, int& status);
void add_case_command(CLI::App& app, int& status);
void add_doctor_command(CLI::App& app, int& status);
void add_layer_command(CLI::App& app, int& status);
void add_replay_command(CLI::App& app, int& status);

}  // namespace mla::cli
