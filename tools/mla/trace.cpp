#include "mla/trace.hpp"

#include <fmt/core.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/json_names.hpp"
#include "mla/usage_error.hpp"

namespace mla::cli {
namespace {

using nlohmann::json;

/// One line of the trace, for messages.
struct Line {
  const std::string& trace;
  int64_t number;

  [[noreturn]] void refuse(std::string_view text) const {
    throw UsageError(fmt::format("{}:{}: {}", trace, number, text));
  }
  [[noreturn]] void refuse(std::string_view field, std::string_view expected,
                           std::string_view got) const {
    refuse(fmt::format("{}: expected {}, got {}", field, expected, got));
  }
};

// A value as the message shows it: whole where it is short.
std::string shown(const json& value) {
  constexpr size_t kMostBytes = 40;
  if (value.is_structured()) return fmt::format("{} of {}", value.type_name(), value.size());
  // A string may hold bytes that are not UTF-8: they are replaced rather than thrown at.
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kMostBytes) text = text.substr(0, kMostBytes) + "...";
  return text;
}

const json& field_of(const json& object, const char* name, const Line& line) {
  const auto found = object.find(name);
  if (found == object.end()) line.refuse(name, "the field", "a line without it");
  return *found;
}

int64_t length_field(const json& object, const char* name, const Line& line) {
  const json& value = field_of(object, name, line);
  // Unsigned is what the parser makes of every whole number that is not negative.
  if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 ||
      value.get<uint64_t>() > static_cast<uint64_t>(kMaxTraceLength)) {
    line.refuse(name, fmt::format("a whole number from 1 to {}", kMaxTraceLength), shown(value));
  }
  return value.get<int64_t>();
}

double timestamp_field(const json& object, const Line& line) {
  const json& value = field_of(object, "timestamp", line);
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0) {
    line.refuse("timestamp", "milliseconds, 0 or more", shown(value));
  }
  return value.get<double>();
}

std::vector<uint64_t> hash_ids_field(const json& object, int64_t input_length, const Line& line) {
  const json& value = field_of(object, "hash_ids", line);
  if (!value.is_array()) line.refuse("hash_ids", "an array", shown(value));
  const int64_t blocks = (input_length + kTraceBlockTokens - 1) / kTraceBlockTokens;
  if (static_cast<int64_t>(value.size()) != blocks) {
    line.refuse("hash_ids",
                fmt::format("{} ids, one for each {} tokens of input_length {}", blocks,
                            kTraceBlockTokens, input_length),
                std::to_string(value.size()));
  }
  std::vector<uint64_t> ids;
  ids.reserve(value.size());
  for (const json& id : value) {
    if (!id.is_number_unsigned()) {
      line.refuse(fmt::format("hash_ids[{}]", ids.size()), "a whole number, 0 or more", shown(id));
    }
    ids.push_back(id.get<uint64_t>());
  }
  return ids;
}

TraceRequest parse_line(const std::string& text, const Line& line) {
  JsonNames names;
  const auto watch = [&](int /*depth*/, json::parse_event_t event, json& value) {
    if (const std::string* name = names.repeated(event, value)) {
      line.refuse(shown(*name), "each field once", "it again");
    }
    return true;
  };
  json object;
  try {
    object = json::parse(text, watch);
  } catch (const json::parse_error& error) {
    line.refuse(fmt::format("not JSON from column {} on", error.byte));
  } catch (const json::out_of_range&) {
    line.refuse("a number in it is too large");
  }
  if (!object.is_object()) line.refuse("request", "an object", shown(object));
  TraceRequest request;
  request.timestamp_ms = timestamp_field(object, line);
  request.input_length = length_field(object, "input_length", line);
  request.output_length = length_field(object, "output_length", line);
  request.hash_ids = hash_ids_field(object, request.input_length, line);
  return request;
}

}  // namespace

std::vector<TraceRequest> read_trace(std::istream& lines, const std::string& name,
                                     int64_t max_requests) {
  std::vector<TraceRequest> requests;
  int64_t number = 0;
  for (std::string text;
       static_cast<int64_t>(requests.size()) < max_requests && std::getline(lines, text);) {
    ++number;
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    requests.push_back(parse_line(text, Line{name, number}));
  }
  if (requests.empty()) throw UsageError(fmt::format("{}: no request in it", name));
  return requests;
}

std::vector<TraceRequest> read_trace_file(const std::string& path, int64_t max_requests) {
  if (std::filesystem::is_directory(path)) {
    throw UsageError(fmt::format("{}: is a folder, not a trace", path));
  }
  std::ifstream file(path);
  if (!file) throw UsageError(fmt::format("{}: cannot be read", path));
  return read_trace(file, path, max_requests);
}

}  // namespace mla::cli
