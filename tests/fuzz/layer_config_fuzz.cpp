// Any text is refused or gives a configuration that a layer can be made of.
#include <cmath>
#include <cstdint>
#include <string_view>

#include "fuzz/byte_reader.hpp"
#include "mla/error.hpp"
#include "mla/layer_config.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data,
                                      size_t size) {  // NOLINT: libFuzzer's name
  mla::LayerConfig config;
  try {
    config = mla::parse_layer_config({reinterpret_cast<const char*>(data), size});
  } catch (const mla::InvalidArgument&) {
    return 0;
  }
  try {
    mla::check_layer_config(config);
  } catch (const mla::InvalidArgument& error) {
    mla::fuzz::fail(error.what());
  }
  for (const double frequency : mla::rope_frequencies(config.rope, config.qk_rope_head_dim)) {
    if (!std::isfinite(frequency) || frequency < 0) mla::fuzz::fail("a frequency is not a number");
  }
  return 0;
}
