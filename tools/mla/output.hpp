#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): the parser's name
class App;
}

namespace mla::cli {

using Json = nlohmann::ordered_json;

/// Where a command's JSON goes: nowhere, a file, or standard output, which then holds nothing else.
struct JsonTarget {
  bool wanted = false;
  std::string path;  ///< empty: standard output

  bool to_stdout() const { return wanted && path.empty(); }
};

/// Adds `--json [FILE]`. `target` must outlive the parsing.
void add_json_option(CLI::App& command, JsonTarget& target);

/// Throws UsageError where the target's folder cannot be written, so that a long run does not end
/// without its result.
void check_writable(const JsonTarget& target);

/// Writes the whole value or nothing: into a temporary file beside the target, renamed at the end.
/// Throws std::runtime_error.
void write_json(const JsonTarget& target, const Json& value);

/// Columns of text, the first aligned left and the others right, two spaces between them.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace mla::cli
