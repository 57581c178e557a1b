#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace mla::test {

struct ToolResult {
  int status = -1;  ///< exit status; -1 where a signal ended it
  std::string out;
  std::string err;
};

/// Runs the program `mla` as a user would, without a terminal, and waits for it.
ToolResult run_tool(const std::vector<std::string>& arguments);
/// The same, and sends it `signal` (Ctrl-C: SIGINT) once it has said `text` on standard error.
ToolResult interrupt_tool(const std::vector<std::string>& arguments, const std::string& text,
                          int signal);
/// Runs it on a terminal of its own; what a user would see there is in `out`.
ToolResult run_tool_on_terminal(const std::vector<std::string>& arguments);

/// A folder of its own that is removed at the end.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  /// Writes a file and returns its path.
  std::string write(const std::string& name, const std::string& text) const;
  /// Names of all files in it, sorted.
  std::vector<std::string> names() const;

 private:
  std::filesystem::path folder_;
};

std::string read_file(const std::string& path);

}  // namespace mla::test
