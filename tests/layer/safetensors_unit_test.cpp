#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "mla/error.hpp"
#include "mla/safetensors.hpp"

namespace mla {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The bytes of a file with this header and `data_bytes` bytes 0, 1, 2 ... of data.
std::vector<std::byte> file_of(const std::string& header, size_t data_bytes) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < 8; ++i) bytes.push_back(static_cast<std::byte>(header.size() >> (8 * i)));
  for (const char c : header) bytes.push_back(static_cast<std::byte>(c));
  for (size_t i = 0; i < data_bytes; ++i) bytes.push_back(static_cast<std::byte>(i));
  return bytes;
}

std::string refusal(const std::vector<std::byte>& bytes) {
  try {
    const Safetensors file(bytes, "file");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

std::string refusal(const std::string& header, size_t data_bytes) {
  return refusal(file_of(header, data_bytes));
}

constexpr const char* kTwo = R"({"__metadata__":{"scale":"0.5"},)"
                             R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                             R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   )";

TEST(SafetensorsUnit, TensorsComeInTheOrderOfTheirDataWithShapeDtypeAndBytes) {
  const auto bytes = file_of(kTwo, 16);
  const Safetensors file(bytes, "file");
  ASSERT_EQ(file.entries().size(), 2U);
  EXPECT_EQ(file.entries()[0].name, "a");
  const SafetensorsEntry& b = file.at("b");
  EXPECT_EQ(b.dtype, DType::kBFloat16);
  EXPECT_EQ(b.dtype_name, "BF16");
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_EQ(b.bytes.size(), 12U);
  EXPECT_EQ(b.bytes[0], std::byte{4});
  EXPECT_EQ(file.metadata().at("scale"), "0.5");
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_THROW(file.at("c"), InvalidArgument);
}

TEST(SafetensorsUnit, MatrixTakesOneAndTwoDimensions) {
  const auto bytes = file_of(kTwo, 16);
  const Safetensors file(bytes, "file");
  EXPECT_THAT(file.matrix("a").shape, ElementsAre(1, 1));
  EXPECT_THAT(file.matrix("b").shape, ElementsAre(2, 3));
  EXPECT_THAT(file.matrix("b").stride, ElementsAre(3, 1));
}

TEST(SafetensorsUnit, MatrixRefusesOtherDimensionsAndDtypes) {
  const auto bytes = file_of(R"({"cube":{"dtype":"F32","shape":[1,1,1],"data_offsets":[0,4]},)"
                             R"("scalar":{"dtype":"F32","shape":[],"data_offsets":[4,8]},)"
                             R"("fp8":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[8,12]}})",
                             12);
  const Safetensors file(bytes, "file");
  EXPECT_THROW(file.matrix("cube"), InvalidArgument);
  EXPECT_THROW(file.matrix("scalar"), InvalidArgument);
  EXPECT_THROW(file.matrix("fp8"), InvalidArgument);
}

TEST(SafetensorsUnit, EmptyTensorsAndFilesWithoutTensorsAreFine) {
  EXPECT_EQ(refusal("{}", 0), "accepted");
  EXPECT_EQ(refusal(R"({"e":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]},)"
                    R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                    4),
            "accepted");
}

TEST(SafetensorsUnit, LengthBeyondTheFileIsRefused) {
  EXPECT_THAT(refusal(std::vector<std::byte>(7)), HasSubstr("at least 8 bytes"));
  EXPECT_THAT(refusal(std::vector<std::byte>(8)), HasSubstr("begins with {"));
  auto bytes = file_of("{}", 0);
  bytes[0] = std::byte{3};
  EXPECT_THAT(refusal(bytes), HasSubstr("expected at most 2, got 3"));
  std::memset(bytes.data(), 0xff, 8);
  EXPECT_THAT(refusal(bytes), HasSubstr("expected at most 2, got 18446744073709551615"));
}

TEST(SafetensorsUnit, MalformedHeadersAreRefused) {
  EXPECT_THAT(refusal("[]", 0), HasSubstr("begins with {"));
  EXPECT_THAT(refusal(" {}", 0), HasSubstr("begins with {"));
  EXPECT_THAT(refusal("{", 0), HasSubstr("expected JSON"));
  EXPECT_THAT(refusal("{}x", 0), HasSubstr("expected JSON"));
  EXPECT_THAT(refusal("{\"\xff\":1}", 0), HasSubstr("expected JSON"));
  EXPECT_THAT(refusal("{\"a\":" + std::string(100, '['), 0), HasSubstr("at most 16 levels"));
  EXPECT_THAT(refusal(R"({"a":1})", 0), HasSubstr("an object of dtype, shape"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"a":1}})", 0), HasSubstr("a string, got 1"));
  EXPECT_THAT(refusal(R"({"__metadata__":[]})", 0), HasSubstr("an object, got []"));
}

TEST(SafetensorsUnit, NameThatComesTwiceIsRefused) {
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                      R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                      2),
              HasSubstr("a twice"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
              HasSubstr("dtype twice"));
}

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

TEST(SafetensorsUnit, WrongMembersAreRefused) {
  EXPECT_THAT(refusal(tensor("\"F31\"", "[1]", "[0,4]"), 4), HasSubstr("a.dtype"));
  EXPECT_THAT(refusal(tensor("7", "[1]", "[0,4]"), 4), HasSubstr("a.dtype"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "1", "[0,4]"), 4), HasSubstr("a.shape"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[-1]", "[0,4]"), 4), HasSubstr("a.shape"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[1.0]", "[0,4]"), 4), HasSubstr("a.shape"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[9223372036854775808]", "[0,4]"), 4),
              HasSubstr("a.shape"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[4294967296,4294967296]", "[0,4]"), 4),
              HasSubstr("fewer than 2^64 bytes"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[1]", "[0]"), 4), HasSubstr("an array of two"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[1]", "[4,0]"), 4), HasSubstr("within 0 to 4"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[1]", "[0,5]"), 4), HasSubstr("within 0 to 4"));
  EXPECT_THAT(refusal(tensor("\"F32\"", "[2]", "[0,4]"), 4), HasSubstr("expected 8 bytes"));
}

TEST(SafetensorsUnit, GapsAndOverlapsAreRefused) {
  EXPECT_THAT(refusal(tensor("\"U8\"", "[2]", "[1,3]"), 3), HasSubstr("to begin at 0, got 1"));
  EXPECT_THAT(refusal(tensor("\"U8\"", "[2]", "[0,2]"), 3), HasSubstr("data: expected 2 bytes"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                      R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                      3),
              HasSubstr("b.data_offsets: expected to begin at 2, got 1"));
}

TEST(SafetensorsUnit, FileIsMappedAndReadable) {
  const auto path =
      std::filesystem::temp_directory_path() / ("mla_safetensors_" + std::to_string(::getpid()));
  const auto bytes = file_of(kTwo, 16);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  Safetensors file(path.string());
  std::filesystem::remove(path);
  const Safetensors moved = std::move(file);
  EXPECT_EQ(moved.name(), path.string());
  EXPECT_EQ(moved.at("b").bytes[11], std::byte{15});
}

TEST(SafetensorsUnit, WhatCannotBeReadIsRefusedByName) {
  for (const char* path : {"/no/such/file", "/tmp", "/dev/null"}) {
    try {
      const Safetensors file{std::string(path)};
      FAIL() << path;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.parts().what, path);
    }
  }
}

}  // namespace
}  // namespace mla
