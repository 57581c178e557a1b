#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mla/layer.hpp"

// A file with one layer's weights, inputs and expected outputs, and ways to run it through the
// paged cache. Shared by the tests and `mla layer`. docs/layer.md describes the files.
namespace mla::cases {

/// What a file holds. Throws InvalidArgument (a tensor or a metadata key is missing, malformed or
/// of another shape; a model_type that is not the configuration's; a configuration that the layer
/// refuses).
struct LayerFile {
  explicit LayerFile(const std::string& path);

  Safetensors file;
  LayerConfig config;
  LayerWeights weights;
  double scaling = 0;           ///< softmax scale that the outputs were computed with
  int64_t num_tokens = 0;       ///< T
  std::vector<float> hidden;    ///< [T, hidden_size]
  std::vector<float> expected;  ///< [T, hidden_size], of one causal pass over positions 0 .. T - 1

  double output_std() const;  ///< of all expected outputs
  /// Largest root mean square of one expected row over output_std(): early tokens attend to few
  /// others, so that their outputs, and the errors in them, are larger than the average.
  double largest_row() const;
  /// Root mean square of the scaled scores, over up to 64 queries and 64 of each one's keys.
  double score_rms() const;
};

struct LayerRun {
  DType dtype = DType::kFloat32;
  Device device{};
  int32_t page_size = 64;
  HeadRange heads{};
  /// Stage by stage, with the cache rows written by KvResource; else Layer::forward writes them.
  bool staged = false;
  std::string kernel{};  ///< as AttentionConfig
  std::shared_ptr<Executor> executor{};
};

/// `num_tokens` more tokens of one request.
struct LayerSpan {
  int32_t request = 0;
  int32_t num_tokens = 0;
};
using LayerSchedule = std::vector<std::vector<LayerSpan>>;  // [steps][spans]

LayerSchedule one_pass(const LayerFile& file);
LayerSchedule in_chunks(const LayerFile& file);  ///< of uneven size, one token at the least
LayerSchedule token_by_token(const LayerFile& file);
/// Several requests with the file's tokens, in steps that mix prefill and decode; each ends.
LayerSchedule interleaved(const LayerFile& file, int32_t num_requests, uint64_t seed);

/// Runs a schedule as an engine would, over a pool whose unused memory holds NaN. Returns the
/// outputs of each request, [T, hidden_size].
std::vector<std::vector<float>> run_layer(const LayerFile& file, const LayerRun& run,
                                          const LayerSchedule& schedule);

/// Largest |error| over output_std(); infinite where an output is not finite.
double max_rel_error(const LayerFile& file, const std::vector<float>& output);

/// What max_rel_error may be; derived in docs/layer.md.
double error_bound(const LayerFile& file, DType dtype);

}  // namespace mla::cases
