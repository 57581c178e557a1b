#include "tools/tool.hpp"

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

}  // namespace

ToolResult run_tool(const std::vector<std::string>& arguments) {
  const ScratchFolder folder;
  const std::string out = folder.path("out");
  const std::string err = folder.path("err");
  std::string program = MLA_TOOL_PATH;
  std::vector<std::string> copies = arguments;
  std::vector<char*> argv{program.data()};
  for (std::string& argument : copies) argv.push_back(argument.data());
  argv.push_back(nullptr);

  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    redirect_to(out, STDOUT_FILENO);
    redirect_to(err, STDERR_FILENO);
    execv(program.c_str(), argv.data());
    _exit(127);
  }
  int state = 0;
  waitpid(child, &state, 0);
  return {WIFEXITED(state) ? WEXITSTATUS(state) : -1, read_file(out), read_file(err)};
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
