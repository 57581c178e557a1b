#include "cases/case_json.hpp"

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/json_names.hpp"
#include "mla/error.hpp"

namespace mla::cases {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(std::string what, std::string expected, std::string got) {
  throw_invalid({.what = std::move(what),
                 .where = "case file",
                 .expected = std::move(expected),
                 .got = std::move(got)});
}

// A value as a message may show it.
std::string shown(const Json& value) {
  constexpr size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

// One JSON object whose keys are taken one after the other; what is left at the end is unknown.
class Section {
 public:
  Section(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
    if (!object_.is_object()) {
      refuse(path_.empty() ? "the file" : path_, "an object", shown(object_));
    }
  }

  const Json* take(const char* key) {
    taken_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  const Json& require(const char* key) {
    const Json* value = take(key);
    if (value == nullptr) refuse(name_of(key), "a value, as this key is required", "none");
    return *value;
  }

  std::string name_of(const std::string& key) const {
    return path_.empty() ? key : path_ + "." + key;
  }

  void finish() const {
    for (const auto& [key, value] : object_.items()) {
      if (!taken_.contains(key)) refuse(name_of(key), "no such key", shown(value));
    }
  }

 private:
  const Json& object_;
  std::string path_;
  std::set<std::string> taken_;
};

int64_t integer(const Json& value, const std::string& name, int64_t low, int64_t high) {
  const bool fits_unsigned = value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX;
  if (!value.is_number_integer() || (value.is_number_unsigned() && !fits_unsigned) ||
      value.get<int64_t>() < low || value.get<int64_t>() > high) {
    refuse(name, "an integer from " + std::to_string(low) + " to " + std::to_string(high),
           shown(value));
  }
  return value.get<int64_t>();
}

template <class T>
void read_integer(Section& section, const char* key, T& into, int64_t low, int64_t high) {
  if (const Json* value = section.take(key)) {
    into = static_cast<T>(integer(*value, section.name_of(key), low, high));
  }
}

void read_flag(Section& section, const char* key, bool& into) {
  const Json* value = section.take(key);
  if (value == nullptr) return;
  if (!value->is_boolean()) refuse(section.name_of(key), "true or false", shown(*value));
  into = value->get<bool>();
}

std::string text_of(const Json& value, const std::string& name) {
  constexpr size_t kLongest = 200;
  if (!value.is_string() || value.get_ref<const std::string&>().size() > kLongest) {
    refuse(name, "a text of at most " + std::to_string(kLongest) + " bytes", shown(value));
  }
  return value.get<std::string>();
}

template <class T>
using Choices = std::vector<std::pair<const char*, T>>;

template <class T>
T choose(const Json& value, const std::string& name, const Choices<T>& choices) {
  std::string expected;
  for (const auto& [text, choice] : choices) {
    if (value.is_string() && value.get_ref<const std::string&>() == text) return choice;
    expected += (expected.empty() ? "\"" : ", \"") + std::string(text) + "\"";
  }
  refuse(name, "one of " + expected, shown(value));
}

template <class T>
void read_choice(Section& section, const char* key, T& into, const Choices<T>& choices) {
  if (const Json* value = section.take(key)) into = choose(*value, section.name_of(key), choices);
}

std::vector<int32_t> integers(const Json& value, const std::string& name, int64_t low,
                              size_t longest) {
  if (!value.is_array() || value.size() > longest) {
    refuse(name, "a list of at most " + std::to_string(longest) + " integers", shown(value));
  }
  std::vector<int32_t> list;
  for (const Json& entry : value) {
    list.push_back(static_cast<int32_t>(
        integer(entry, name + "[" + std::to_string(list.size()) + "]", low, INT32_MAX)));
  }
  return list;
}

const Choices<DType>& dtypes() {
  static const Choices<DType> choices = {
      {"fp32", DType::kFloat32}, {"bf16", DType::kBFloat16}, {"fp16", DType::kFloat16}};
  return choices;
}

Geometry read_geometry(const Json& value) {
  Section section(value, "geometry");
  const auto size = [&](const char* key, int64_t low) {
    return static_cast<int32_t>(
        integer(section.require(key), section.name_of(key), low, INT32_MAX));
  };
  Geometry geometry;
  geometry.num_heads = size("num_heads", 0);
  geometry.kv_lora_rank = size("kv_lora_rank", 0);
  geometry.qk_rope_head_dim = size("qk_rope_head_dim", 0);
  geometry.page_size = size("page_size", 1);
  geometry.dtype = choose(section.require("dtype"), "geometry.dtype", dtypes());
  geometry.kv_dtype = geometry.dtype;
  read_choice(section, "kv_dtype", geometry.kv_dtype, dtypes());
  section.finish();
  return geometry;
}

CaseLayout read_layout(const Json& value) {
  constexpr int64_t kMostColumns = int64_t{1} << 31;
  Section section(value, "layout");
  CaseLayout layout;
  read_flag(section, "joined_q", layout.joined_q);
  read_flag(section, "separate_cache", layout.separate_cache);
  read_flag(section, "head_major", layout.head_major);
  read_flag(section, "misaligned", layout.misaligned);
  read_integer(section, "q_pad", layout.q_pad, 0, kMostColumns - 1);
  read_integer(section, "out_pad", layout.out_pad, 0, kMostColumns - 1);
  read_integer(section, "lse_pad", layout.lse_pad, 0, kMostColumns - 1);
  read_integer(section, "row_pad", layout.row_pad, 0, kMostColumns - 1);
  read_integer(section, "page_pad", layout.page_pad, 0, int64_t{1} << 40);
  section.finish();
  return layout;
}

SplitPolicy read_splits(const Json& value) {
  Section section(value, "splits");
  SplitPolicy splits;
  read_integer(section, "fixed_tokens", splits.fixed_tokens, INT32_MIN, INT32_MAX);
  read_integer(section, "forced_count", splits.forced_count, INT32_MIN, INT32_MAX);
  section.finish();
  return splits;
}

Bucket read_bucket(const Json& value) {
  Section section(value, "bucket");
  Bucket bucket;
  bucket.num_rows = integer(section.require("num_rows"), "bucket.num_rows", 0, INT32_MAX);
  bucket.num_tokens = integer(section.require("num_tokens"), "bucket.num_tokens", 0, INT32_MAX);
  section.finish();
  return bucket;
}

float read_scale(const Json& value) {
  const auto scale = value.is_number() ? static_cast<float>(value.get<double>()) : NAN;
  if (!std::isfinite(scale)) refuse("sm_scale", "a number within fp32", shown(value));
  return scale;
}

void read_data(Section& file, AttentionCase& c) {
  read_choice(file, "poison", c.poison,
              {{"none", Poison::kNone}, {"nan", Poison::kNan}, {"inf", Poison::kInf}});
  read_choice(file, "data", c.data,
              {{"uniform", DataKind::kUniform},
               {"peaked", DataKind::kPeaked},
               {"constant", DataKind::kConstant},
               {"large", DataKind::kLarge}});
  read_integer(file, "peak_position", c.peak_position, 0, INT32_MAX);
  read_flag(file, "equal_requests", c.equal_requests);
  read_flag(file, "equal_heads", c.equal_heads);
  read_integer(file, "seed", c.seed, 0, INT64_MAX);
}

void read_pages(Section& file, AttentionCase& c) {
  read_choice(file, "page_order", c.page_order,
              {{"contiguous", PageOrder::kContiguous},
               {"reversed", PageOrder::kReversed},
               {"scattered", PageOrder::kScattered}});
  if (const Json* pages = file.take("pages")) {
    c.pages = integers(*pages, "pages", INT32_MIN, size_t{1} << 24);
  }
  read_integer(file, "pool_pages", c.pool_pages, 0, INT32_MAX);
  read_integer(file, "spare_entries", c.spare_entries, 0, 1 << 20);
  read_flag(file, "last_page_lens", c.last_page_lens);
}

void check_memory(const AttentionCase& c, const CaseMemory& memory) {
  const auto mib = [](double bytes) { return std::to_string(bytes / (1 << 20)) + " MiB"; };
  const CaseBytes bytes = bytes_needed(c);
  if (!(bytes.touched <= memory.max_touched)) {
    refuse("memory", "a case of at most " + mib(memory.max_touched), mib(bytes.touched));
  }
  if (!(bytes.mapped <= memory.max_mapped)) {
    refuse("address space", "a case of at most " + mib(memory.max_mapped), mib(bytes.mapped));
  }
}

// The whole text as a document; keys may not repeat.
Json parse_document(std::string_view text) {
  JsonNames names;
  const auto watch = [&names](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    if (const std::string* key = names.repeated(event, parsed)) {
      refuse(*key, "each key once", "it again");
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& error) {
    std::string reason = error.what();
    if (const auto* parse_error = dynamic_cast<const Json::parse_error*>(&error)) {
      const size_t end = std::min(parse_error->byte, text.size());
      const auto line =
          1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(end), '\n');
      refuse("line " + std::to_string(line), "JSON", reason);
    }
    refuse("the file", "JSON", reason);
  }
}

}  // namespace

AttentionCase parse_case(std::string_view text, const CaseMemory& memory) {
  const Json document = parse_document(text);
  Section file(document, "");
  AttentionCase c;
  if (const Json* name = file.take("name")) c.name = text_of(*name, "name");
  c.geometry = read_geometry(file.require("geometry"));
  constexpr size_t kMostRows = size_t{1} << 21;  // beyond the library's limit, to see its refusal
  c.q_lens = integers(file.require("q_lens"), "q_lens", 0, kMostRows);
  c.kv_lens = integers(file.require("kv_lens"), "kv_lens", 0, kMostRows);
  read_flag(file, "causal", c.causal);
  c.sm_scale = read_scale(file.require("sm_scale"));
  read_choice<std::optional<LseBase>>(
      file, "lse", c.lse,
      {{"none", std::nullopt}, {"natural", LseBase::kNatural}, {"base2", LseBase::kTwo}});
  read_pages(file, c);
  if (const Json* layout = file.take("layout")) c.layout = read_layout(*layout);
  read_data(file, c);
  if (const Json* splits = file.take("splits")) c.splits = read_splits(*splits);
  if (const Json* bucket = file.take("bucket")) c.bucket = read_bucket(*bucket);
  if (const Json* kernel = file.take("kernel")) c.kernel = text_of(*kernel, "kernel");
  file.finish();
  check_consistent(c);
  check_memory(c, memory);
  return c;
}

}  // namespace mla::cases
