#include "tools/tool.hpp"

#include <pty.h>
#include <signal.h>
#include <stdlib.h>  // mkdtemp
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace mla::test {
namespace fs = std::filesystem;

namespace {

void redirect_to(const std::string& path, int descriptor) {
  if (std::freopen(path.c_str(), "w", descriptor == STDOUT_FILENO ? stdout : stderr) == nullptr) {
    _exit(126);
  }
}

[[noreturn]] void become_tool(std::vector<std::string> arguments) {
  std::string program = MLA_TOOL_PATH;
  std::vector<char*> argv{program.data()};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  _exit(127);
}

int status_of(pid_t child) {
  int state = 0;
  waitpid(child, &state, 0);
  return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
}

// Runs the tool into two files; `meanwhile` is called with its process id and the file of its
// standard error.
template <class Meanwhile>
ToolResult run_into_files(const std::vector<std::string>& arguments, const Meanwhile& meanwhile) {
  const ScratchFolder folder;
  const std::string out = folder.path("out");
  const std::string err = folder.path("err");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    redirect_to(out, STDOUT_FILENO);
    redirect_to(err, STDERR_FILENO);
    become_tool(arguments);
  }
  meanwhile(child, err);
  const int status = status_of(child);
  return {status, read_file(out), read_file(err)};
}

}  // namespace

ToolResult run_tool(const std::vector<std::string>& arguments) {
  return run_into_files(arguments, [](pid_t, const std::string&) {});
}

ToolResult interrupt_tool(const std::vector<std::string>& arguments, const std::string& text,
                          int signal) {
  return run_into_files(arguments, [&text, signal](pid_t child, const std::string& err) {
    for (int i = 0; i < 6000 && read_file(err).find(text) == std::string::npos; ++i) {
      usleep(10'000);
    }
    kill(child, signal);
  });
}

ToolResult run_tool_on_terminal(const std::vector<std::string>& arguments) {
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child < 0) throw std::runtime_error("forkpty failed");
  if (child == 0) become_tool(arguments);
  ToolResult result;
  char buffer[4096];
  // The read fails once the other side is closed.
  for (ssize_t count = 0; (count = read(terminal, buffer, sizeof buffer)) > 0;) {
    result.out.append(buffer, static_cast<size_t>(count));
  }
  close(terminal);
  result.status = status_of(child);
  return result;
}

ScratchFolder::ScratchFolder() {
  std::string name = (fs::temp_directory_path() / "mla_test_XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + name);
  folder_ = name;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

std::string ScratchFolder::write(const std::string& name, const std::string& text) const {
  std::ofstream(folder_ / name) << text;
  return path(name);
}

std::vector<std::string> ScratchFolder::names() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace mla::test
