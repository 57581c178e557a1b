#include "mla/output.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

std::string temporary_of(const std::string& path) {
  return fmt::format("{}.{}.tmp", path, getpid());
}

std::string resolved(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, error);
  return error ? path : target.string();
}

// A regular file or none yet: not a device, a pipe or a socket, which a rename would destroy.
bool is_replaceable(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  return !std::filesystem::exists(status) || std::filesystem::is_regular_file(status);
}

}  // namespace

void add_json_option(CLI::App& command, JsonTarget& target) {
  command
      .add_option_function<std::string>(
          "--json",
          [&target](const std::string& path) {
            target.wanted = true;
            target.path = path == "-" ? "" : path;
          },
          "also as JSON into FILE, or alone to standard output where FILE is left out")
      ->type_name("[FILE]")
      ->expected(0, 1);
}

void check_writable(const JsonTarget& target) {
  if (!target.wanted || target.to_stdout()) return;
  const std::string path = resolved(target.path);
  if (!is_replaceable(path) && !std::filesystem::is_directory(path)) return;
  const std::string temporary = temporary_of(path);
  const bool is_folder = std::filesystem::is_directory(path);
  const bool opened = !is_folder && std::ofstream(temporary).is_open();
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  if (!opened) throw UsageError(fmt::format("--json: cannot write {}", target.path));
}

void write_json(const JsonTarget& target, const Json& value) {
  if (!target.wanted) return;
  const std::string text = value.dump(2) + "\n";
  if (target.to_stdout()) {
    fmt::print("{}", text);
    return;
  }
  // A link's target is what is replaced; a device or a pipe is written to as it is.
  const std::string path = resolved(target.path);
  const bool replace = is_replaceable(path);
  const std::string temporary = replace ? temporary_of(path) : path;
  std::ofstream file(temporary, replace ? std::ios::trunc : std::ios::app);
  file << text;
  file.close();
  std::error_code error;
  if (!replace) {
    if (!file) throw std::runtime_error(fmt::format("cannot write {}", target.path));
    return;
  }
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw std::runtime_error(fmt::format("cannot write {}", target.path));
  }
}

std::string Table::text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  std::string text;
  for (const auto& row : rows_) {
    for (size_t column = 0; column < row.size(); ++column) {
      if (column > 0) text += "  ";
      text += column == 0 ? fmt::format("{:<{}}", row[column], widths[column])
                          : fmt::format("{:>{}}", row[column], widths[column]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  }
  return text;
}

}  // namespace mla::cli
