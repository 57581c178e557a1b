#include "mla/safetensors.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "layer/json.hpp"
#include "mla/error.hpp"

namespace mla {
namespace {

using Json = nlohmann::json;

constexpr const char* kWhere = "Safetensors";
constexpr uint64_t kLengthBytes = 8;               // the header's length, little-endian
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

struct FileType {
  std::string_view name;
  uint64_t bytes;
  std::optional<DType> dtype;
};
constexpr FileType kFileTypes[] = {
    {"F32", 4, DType::kFloat32}, {"BF16", 2, DType::kBFloat16}, {"F16", 2, DType::kFloat16},
    {"I32", 4, DType::kInt32},   {"I64", 8, DType::kInt64},     {"F64", 8, std::nullopt},
    {"U64", 8, std::nullopt},    {"U32", 4, std::nullopt},      {"I16", 2, std::nullopt},
    {"U16", 2, std::nullopt},    {"I8", 1, std::nullopt},       {"U8", 1, std::nullopt},
    {"BOOL", 1, std::nullopt},   {"F8_E4M3", 1, std::nullopt},  {"F8_E5M2", 1, std::nullopt},
};

[[noreturn]] void refuse(const std::string& what, const std::string& expected,
                         const std::string& got) {
  throw_invalid({.what = what, .where = kWhere, .expected = expected, .got = got});
}

uint64_t read_length(std::span<const std::byte> bytes) {
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  }
  return length;
}

// The number under `key` of an array, at most INT64_MAX.
uint64_t read_count(const Json& value, const std::string& what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) {
    refuse(what, "a whole number, 0 to 2^63 - 1", layer::shown(value));
  }
  return value.get<uint64_t>();
}

const FileType& type_of(const Json& value, const std::string& what) {
  if (value.is_string()) {
    for (const FileType& type : kFileTypes) {
      if (type.name == value.get_ref<const std::string&>()) return type;
    }
  }
  refuse(what, "a dtype of the format, F32, BF16, F16 ...", layer::shown(value));
}

const Json& member(const Json& object, const char* key, const std::string& tensor) {
  const auto found = object.find(key);
  if (found == object.end()) refuse(tensor, std::string("a member ") + key, "none");
  return *found;
}

SafetensorsEntry read_entry(const std::string& tensor, const Json& value,
                            std::span<const std::byte> data) {
  if (!value.is_object() || value.size() != 3) {
    refuse(tensor, "an object of dtype, shape and data_offsets", layer::shown(value));
  }
  const FileType& type = type_of(member(value, "dtype", tensor), tensor + ".dtype");
  const Json& shape = member(value, "shape", tensor);
  const Json& offsets = member(value, "data_offsets", tensor);
  if (!shape.is_array()) refuse(tensor + ".shape", "an array", layer::shown(shape));
  if (!offsets.is_array() || offsets.size() != 2) {
    refuse(tensor + ".data_offsets", "an array of two", layer::shown(offsets));
  }

  SafetensorsEntry entry{.name = tensor,
                         .dtype_name = std::string(type.name),
                         .dtype = type.dtype,
                         .shape = {},
                         .bytes = {}};
  uint64_t needed = type.bytes;
  for (const Json& extent : shape) {
    const uint64_t count = read_count(extent, tensor + ".shape");
    entry.shape.push_back(static_cast<int64_t>(count));
    if (__builtin_mul_overflow(needed, count, &needed)) {
      refuse(tensor + ".shape", "fewer than 2^64 bytes", layer::shown(shape));
    }
  }
  const uint64_t begin = read_count(offsets[0], tensor + ".data_offsets");
  const uint64_t end = read_count(offsets[1], tensor + ".data_offsets");
  if (begin > end || end > data.size()) {
    refuse(tensor + ".data_offsets", "a range within 0 to " + std::to_string(data.size()),
           layer::shown(offsets));
  }
  if (end - begin != needed) {
    refuse(tensor + ".data_offsets", std::to_string(needed) + " bytes, as its shape needs",
           std::to_string(end - begin));
  }
  entry.bytes = data.subspan(begin, needed);
  return entry;
}

// Each tensor must begin where the one before it ended, and the last must end the data.
void check_cover(std::vector<SafetensorsEntry>& entries, std::span<const std::byte> data) {
  std::ranges::stable_sort(entries, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
  });
  const std::byte* covered = data.data();
  for (const SafetensorsEntry& entry : entries) {
    if (entry.bytes.data() != covered) {
      refuse(entry.name + ".data_offsets", "to begin at " + std::to_string(covered - data.data()),
             std::to_string(entry.bytes.data() - data.data()));
    }
    covered += entry.bytes.size();
  }
  if (covered != data.data() + data.size()) {
    refuse("data", std::to_string(covered - data.data()) + " bytes, as the tensors need",
           std::to_string(data.size()));
  }
}

}  // namespace

// Pages of the file, unmapped at the end of life.
struct Safetensors::Mapping {
  Mapping(void* address, size_t num_bytes) : data(address), size(num_bytes) {}
  ~Mapping() { munmap(data, size); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* data;
  size_t size;
};

Safetensors::Safetensors(const std::string& path) : name_(path) {
  const auto refuse_file = [&](const std::string& got) { refuse(path, "a readable file", got); };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) refuse_file(std::strerror(errno));
  struct stat status {};
  const bool is_file = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = static_cast<size_t>(std::max<int64_t>(0, status.st_size));
  void* data = MAP_FAILED;  // NOLINT(performance-no-int-to-ptr): the macro's own cast
  if (is_file && size > 0) data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  const int error = errno;
  close(file);
  if (!is_file) refuse_file("something else");
  if (size == 0) refuse_file("an empty file");
  if (data == MAP_FAILED) {  // NOLINT(performance-no-int-to-ptr): the macro's own cast
    refuse_file(std::strerror(error));
  }
  mapping_ = std::make_unique<Mapping>(data, size);
  parse({static_cast<const std::byte*>(data), size});
}

Safetensors::Safetensors(std::span<const std::byte> bytes, std::string name)
    : name_(std::move(name)) {
  parse(bytes);
}

Safetensors::~Safetensors() = default;
Safetensors::Safetensors(Safetensors&&) noexcept = default;
Safetensors& Safetensors::operator=(Safetensors&&) noexcept = default;

void Safetensors::parse(std::span<const std::byte> bytes) {
  if (bytes.size() < kLengthBytes) {
    refuse(name_, "at least 8 bytes", std::to_string(bytes.size()));
  }
  const uint64_t header_bytes = read_length(bytes);
  const uint64_t most = std::min<uint64_t>(kMaxHeaderBytes, bytes.size() - kLengthBytes);
  if (header_bytes > most) {
    refuse(name_ + ": header length", "at most " + std::to_string(most),
           std::to_string(header_bytes));
  }
  const auto header = bytes.subspan(kLengthBytes, header_bytes);
  const auto data = bytes.subspan(kLengthBytes + header_bytes);
  if (header.empty() || header[0] != std::byte{'{'}) {
    refuse(name_ + ": header", "an object that begins with {", "something else");
  }
  const std::string_view text(reinterpret_cast<const char*>(header.data()), header.size());
  const Json json = layer::parse_json(text, name_ + ": header", kWhere);
  for (const auto& [key, value] : json.items()) {
    if (key != "__metadata__") {
      entries_.push_back(read_entry(key, value, data));
      continue;
    }
    if (!value.is_object()) refuse("__metadata__", "an object", layer::shown(value));
    for (const auto& [name, item] : value.items()) {
      if (!item.is_string()) refuse("__metadata__." + name, "a string", layer::shown(item));
      metadata_.emplace(name, item.get<std::string>());
    }
  }
  check_cover(entries_, data);
}

const SafetensorsEntry* Safetensors::find(std::string_view tensor) const noexcept {
  const auto found = std::ranges::find(entries_, tensor, &SafetensorsEntry::name);
  return found == entries_.end() ? nullptr : &*found;
}

const SafetensorsEntry& Safetensors::at(std::string_view tensor) const {
  const SafetensorsEntry* entry = find(tensor);
  if (entry == nullptr) refuse(name_, "a tensor " + std::string(tensor), "none of that name");
  return *entry;
}

ConstTensor<2> Safetensors::matrix(std::string_view tensor) const {
  const SafetensorsEntry& entry = at(tensor);
  if (entry.shape.empty() || entry.shape.size() > 2) {
    refuse(entry.name + ".shape", "one or two dimensions", std::to_string(entry.shape.size()));
  }
  if (!entry.dtype || (*entry.dtype != DType::kFloat32 && *entry.dtype != DType::kBFloat16 &&
                       *entry.dtype != DType::kFloat16)) {
    refuse(entry.name + ".dtype", "F32, BF16 or F16", entry.dtype_name);
  }
  const int64_t rows = entry.shape.size() == 2 ? entry.shape[0] : 1;
  return contiguous_view(static_cast<const void*>(entry.bytes.data()),
                         std::array<int64_t, 2>{rows, entry.shape.back()}, *entry.dtype);
}

}  // namespace mla
