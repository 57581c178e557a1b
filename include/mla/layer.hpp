#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "mla/attention.hpp"
#include "mla/device.hpp"
#include "mla/dtype.hpp"
#include "mla/executor.hpp"
#include "mla/export.hpp"
#include "mla/layer_config.hpp"
#include "mla/pool.hpp"
#include "mla/safetensors.hpp"
#include "mla/tensor_view.hpp"

namespace mla {

/// Query heads [begin, begin + count) of a layer; count 0: all of them.
struct HeadRange {
  int32_t begin = 0;
  int32_t count = 0;
};

struct LayerOptions {
  /// A tensor-parallel rank's heads. Weights are given whole; the rank's part is kept. The output
  /// is then a partial sum: that of all ranks is the layer's.
  HeadRange heads{};
  /// Of hidden states, the pool and the output: fp32, bf16 or, on CUDA, fp16.
  DType dtype = DType::kBFloat16;
  Device device{};  ///< the CPU, or a CUDA device where cuBLAS is installed
  /// CPU only: the crew that works in a workspace; none: Executor::shared(). A layer needs none.
  std::shared_ptr<Executor> executor{};
};

/// Weights as the checkpoint stores them, [out, in], in host memory; fp32, bf16 or fp16, at any
/// address. A layer copies what it needs to its device, rounded to nearest even where its dtype is
/// narrower.
struct LayerWeights {
  ConstTensor<2> q_proj{};              ///< [heads * qk_head_dim, hidden]; where q_lora_rank is 0
  ConstTensor<2> q_a_proj{};            ///< [q_lora_rank, hidden]; elsewhere, with the next two
  ConstTensor<2> q_a_layernorm{};       ///< [1, q_lora_rank]
  ConstTensor<2> q_b_proj{};            ///< [heads * qk_head_dim, q_lora_rank]
  ConstTensor<2> kv_a_proj_with_mqa{};  ///< [kv_lora_rank + qk_rope_head_dim, hidden]
  ConstTensor<2> kv_a_layernorm{};      ///< [1, kv_lora_rank]
  ConstTensor<2> kv_b_proj{};           ///< [heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]
  ConstTensor<2> o_proj{};              ///< [hidden, heads * v_head_dim]
};

/// The weights `prefix` + "q_a_proj.weight" and so on of a file; they live as long as it does.
/// `prefix` is as in "model.layers.0.self_attn.". Throws InvalidArgument (a tensor is missing, has
/// another dtype, or a bias is there, which the layer does not add).
MLA_API LayerWeights find_layer_weights(const Safetensors& file, const LayerConfig& config,
                                        std::string_view prefix = {});

/// What the first stage of a layer leaves for the others (T tokens, H heads of the rank). Views
/// into a LayerWorkspace.
struct LayerActivations {
  ConstTensor<3> q_nope{};  ///< [T, H, kv_lora_rank], absorbed
  ConstTensor<3> q_pe{};    ///< [T, H, qk_rope_head_dim], turned
  ConstTensor<2> ckv{};     ///< [T, kv_lora_rank], normed: rows for the cache
  ConstTensor<2> kpe{};     ///< [T, qk_rope_head_dim], turned
  Tensor<3> attended{};     ///< [T, H, kv_lora_rank], where the attention writes
};

/// Memory for the activations of one step and, on CUDA, a cuBLAS handle with its 32 MiB of scratch.
/// Layers of one configuration and rank may share it, one call at a time, on one stream or on
/// streams that wait for each other.
class MLA_API LayerWorkspace {
 public:
  /// Room for steps of up to `max_tokens` tokens. Throws InvalidArgument (also where cuBLAS is not
  /// installed), std::bad_alloc, CudaError.
  LayerWorkspace(const LayerConfig& config, const LayerOptions& options, int64_t max_tokens);
  ~LayerWorkspace();
  LayerWorkspace(LayerWorkspace&&) noexcept;
  LayerWorkspace& operator=(LayerWorkspace&&) noexcept;

  int64_t max_tokens() const noexcept;
  size_t bytes() const noexcept;  ///< of the device

 private:
  friend class Layer;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One step of a whole layer, all of it on the layer's device.
struct LayerStep {
  ConstTensor<2> hidden{};                   ///< [T, hidden], the options' dtype; any row stride
  TensorView<const int32_t, 1> positions{};  ///< [T], of each token in its request, >= 0
  /// [T], where each token's row goes in the pool, -1: nowhere; as KvResource::slots_buf has them.
  /// On CUDA they are read when the work is done, by a captured step anew at each replay; one
  /// outside the pool is skipped there.
  TensorView<const int64_t, 1> slots{};
  LatentPool* pool = nullptr;
  int32_t layer_idx = 0;                ///< in the pool
  PagedAttention* attention = nullptr;  ///< planned for this step, over this pool
  Tensor<2> out{};                      ///< [T, hidden], the options' dtype or fp32
};

/// A Multi-head Latent Attention layer, from hidden states to the output projection:
///
///   q      = q_b_proj(norm(q_a_proj(hidden))), or q_proj(hidden);  per head q_nope | q_pe
///   c | k  = kv_a_proj_with_mqa(hidden);  ckv = norm(c);  q_pe, kpe = rope(q_pe), rope(k)
///   cache row = ckv | kpe;  absorbed query = q_nope W_UK;  W_UK | W_UV = kv_b_proj per head
///   out    = o_proj(attention(absorbed query, q_pe, cache) W_UV)
///
/// Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. docs/layer.md has the roundings and bounds.
///
/// An engine calls forward(), or drives the stages itself:
///
///   const LayerActivations a = layer.project(hidden, positions, workspace);
///   kv.write(layer_idx, "main", a.ckv, a.kpe);
///   attention.run({.q_nope = a.q_nope, .q_pe = a.q_pe, .cache = pool.views(layer_idx),
///                  .out = a.attended});
///   layer.output(a.attended, out, workspace);
///
/// The plan's sm_scale must be config().sm_scale. Calls on one layer may overlap where each has its
/// own workspace and output. Calls block until done on the CPU; on CUDA they queue their work, for
/// which they neither allocate nor wait, and can be captured.
class MLA_API Layer {
 public:
  /// Checks the configuration and every weight, and keeps copies of the rank's weights.
  /// Throws InvalidArgument naming the field or weight (a device that is not there or lacks cuBLAS,
  /// another dtype, a head range beyond the layer's heads), std::bad_alloc, CudaError.
  Layer(const LayerConfig& config, const LayerWeights& weights, const LayerOptions& options = {});
  ~Layer();
  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;

  const LayerConfig& config() const noexcept;
  int32_t num_heads() const noexcept;  ///< of this rank
  /// What AttentionConfig needs, for a pool of this page size.
  Geometry geometry(int32_t page_size) const noexcept;

  /// Hidden states to queries and cache rows; positions [T]. The result is valid until the
  /// workspace's next use. Throws InvalidArgument (shape, dtype, device, more tokens than the
  /// workspace has room for, on the CPU a negative position), CudaError.
  LayerActivations project(const ConstTensor<2>& hidden,
                           const TensorView<const int32_t, 1>& positions, LayerWorkspace& workspace,
                           Stream stream = {}) const;

  /// Attended latents [T, H, kv_lora_rank] to the output, [T, hidden]. Throws InvalidArgument,
  /// CudaError.
  void output(const ConstTensor<3>& attended, const Tensor<2>& out, LayerWorkspace& workspace,
              Stream stream = {}) const;

  /// All of it: project, with the cache rows written to the pool at once, attend, output. Throws
  /// InvalidArgument (on the CPU also a slot outside the pool), InvalidState (the attention has no
  /// plan), CudaError.
  void forward(const LayerStep& step, LayerWorkspace& workspace, Stream stream = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
