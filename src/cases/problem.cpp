#include "cases/problem.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <numeric>
#include <unordered_set>

#include "cases/random.hpp"
#include "device/runtime.hpp"

namespace mla::cases {
namespace {

// Rows of a [T, H, width] tensor in one buffer.
struct RowLayout {
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

RowLayout lay_out_rows(int64_t num_tokens, int64_t num_heads, int64_t width, bool head_major) {
  if (head_major) return {width, width * num_tokens};
  return {width * num_heads, width};
}

Buffer make_buffer(const AttentionCase& c, int64_t elements, DType dtype) {
  const auto size = static_cast<size_t>(size_of(dtype));
  return Buffer(static_cast<size_t>(elements) * size, c.layout.misaligned ? size : 0, c.device);
}

void* offset_by(void* data, int64_t elements, DType dtype) {
  return static_cast<std::byte*>(data) + elements * size_of(dtype);
}

// Sparse memory is too large to touch as a whole and stays zero.
void poison_all(Poison poison, DType dtype, const Buffer& buffer) {
  if (buffer.is_sparse()) return;
  fill_poison(poison, dtype, buffer.data(), static_cast<int64_t>(buffer.size()) / size_of(dtype));
}

// A page id that is drawn, by counter, from 0 .. pool - 1 without one of `taken`.
int32_t draw_page(uint64_t key, int64_t pool, uint32_t& counter,
                  const std::unordered_set<int32_t>& taken) {
  while (true) {
    const uint64_t bits = random_bits(key, counter++);
    const auto page = static_cast<int32_t>((bits * static_cast<uint64_t>(pool)) >> 32);
    if (!taken.contains(page)) return page;
  }
}

void store_row(const std::vector<float>& values, size_t begin, size_t count, DType dtype,
               void* out) {
  for (size_t i = 0; i < count; ++i) {
    const float value = values[begin + i];
    switch (dtype) {
      case DType::kBFloat16:
        static_cast<BFloat16*>(out)[i] = BFloat16(value);
        break;
      case DType::kFloat16:
        static_cast<Float16*>(out)[i] = Float16(value);
        break;
      default:
        static_cast<float*>(out)[i] = value;
    }
  }
}

float load(const void* data, int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<float>(static_cast<const BFloat16*>(data)[at]);
    case DType::kFloat16:
      return static_cast<float>(static_cast<const Float16*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

// The direction that all queries of a peaked case share, and its needle: +1 or -1 a column.
float peak_sign(const AttentionCase& c, uint32_t column) {
  return (random_bits(row_key(c.seed, ~uint64_t{0}, 0), column) & 1U) != 0 ? 1.0F : -1.0F;
}

// Values of one query row [rank | rope].
void shape_query(const AttentionCase& c, std::vector<float>& row) {
  for (size_t i = 0; i < row.size(); ++i) {
    if (c.data == DataKind::kLarge) row[i] *= 256;
    if (c.data == DataKind::kPeaked) {
      row[i] = peak_sign(c, static_cast<uint32_t>(i)) * (0.5F + 0.25F * row[i]);
    }
  }
}

// Values of one latent row [rank | rope].
void shape_latent(const AttentionCase& c, int64_t position, std::vector<float>& row) {
  if (c.data == DataKind::kConstant) {
    std::fill_n(row.begin(), c.geometry.kv_lora_rank, position % 2000 == 1999 ? 2.0F : 1.0F);
  }
  if (c.data == DataKind::kPeaked && position == c.peak_position) {
    // q . k is about 0.5 * width * height, to be 30 after sm_scale.
    const float height = 60.0F / (static_cast<float>(row.size()) * c.sm_scale);
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = height * peak_sign(c, static_cast<uint32_t>(i));
    }
  }
}

}  // namespace

AttentionConfig Problem::config_of(const AttentionCase& c) {
  AttentionConfig config{.geometry = c.geometry,
                         .num_pages = c.pool_size(),
                         .device = c.device,
                         .limits = {.max_rows = c.num_rows(),
                                    .max_tokens = c.num_tokens(),
                                    .max_listed_pages = c.listed_pages()},
                         .bucket = c.bucket,
                         .splits = c.splits,
                         .kernel = c.kernel};
  const int64_t pad = c.layout.row_pad;
  const int64_t rank = c.geometry.kv_lora_rank;
  const int64_t rope = c.geometry.qk_rope_head_dim;
  CacheStrides strides{.ckv_row = rank + rope + pad, .kpe_row = rank + rope + pad};
  if (c.layout.separate_cache) strides = {.ckv_row = rank + pad, .kpe_row = rope + pad};
  strides.ckv_page = strides.ckv_row * c.geometry.page_size + c.layout.page_pad;
  strides.kpe_page = strides.kpe_row * c.geometry.page_size + c.layout.page_pad;
  config.strides = strides;
  return config;
}

PlanOptions Problem::options_of(const AttentionCase& c) {
  return {
      .sm_scale = c.sm_scale, .causal = c.causal, .lse_base = c.lse.value_or(LseBase::kNatural)};
}

Problem::Problem(const AttentionCase& attention_case) : case_(attention_case) {
  check_consistent(case_);
  num_tokens_ = case_.num_tokens();  // a bucket of fewer is refused by plan
  if (case_.bucket) num_tokens_ = std::max(num_tokens_, case_.bucket->num_tokens);
  qo_indptr_.assign(1, 0);
  kv_indptr_.assign(1, 0);
  for (int64_t row = 0; row < case_.num_rows(); ++row) {
    qo_indptr_.push_back(qo_indptr_.back() + case_.q_lens[static_cast<size_t>(row)]);
    kv_indptr_.push_back(kv_indptr_.back() + static_cast<int32_t>(case_.pages_of(row)) +
                         case_.spare_entries);
    const int32_t keys = case_.kv_lens[static_cast<size_t>(row)];
    kv_last_page_len_.push_back(keys == 0 ? 0 : (keys - 1) % case_.geometry.page_size + 1);
  }
  choose_pages();
  lay_out();
  fill_queries();
  fill_cache();
  spoil_outputs();
}

void Problem::choose_pages() {
  const int64_t pool = case_.pool_size();
  const uint64_t key = row_key(case_.seed, ~uint64_t{0}, 1);
  const std::array<int32_t, 3> spare = {-1, INT_MAX, 0};
  std::unordered_set<int32_t> taken;
  uint32_t counter = 0;
  int32_t listed = 0;
  for (int64_t row = 0; row < case_.num_rows(); ++row) {
    for (int64_t i = 0; i < case_.pages_of(row); ++i, ++listed) {
      int32_t page = listed;
      if (!case_.pages.empty()) {
        page = case_.pages[static_cast<size_t>(listed)];
      } else if (case_.page_order == PageOrder::kReversed) {
        page = static_cast<int32_t>(pool - 1) - listed;
      } else if (case_.page_order == PageOrder::kScattered) {
        page = draw_page(key, pool, counter, taken);
        taken.insert(page);
      }
      kv_indices_.push_back(page);
    }
    for (int32_t i = 0; i < case_.spare_entries; ++i) {
      kv_indices_.push_back(spare[static_cast<size_t>(i) % spare.size()]);
    }
  }
}

void Problem::lay_out() {
  const Geometry& g = case_.geometry;
  const int64_t rank = g.kv_lora_rank;
  const int64_t rope = g.qk_rope_head_dim;
  const int64_t heads = g.num_heads;
  const bool head_major = case_.layout.head_major;
  const auto make_rows = [&](Buffer& buffer, int64_t width, int64_t pad) {
    const RowLayout rows = lay_out_rows(num_tokens_, heads, width + pad, head_major);
    buffer = make_buffer(case_, num_tokens_ * heads * (width + pad), g.dtype);
    return Tensor<3>{num_tokens_ == 0 ? nullptr : buffer.data(),
                     {num_tokens_, heads, width},
                     {rows.token_stride, rows.head_stride, 1},
                     {},
                     g.dtype};
  };
  if (case_.layout.joined_q) {
    const Tensor<3> joined = make_rows(q_nope_, rank + rope, case_.layout.q_pad);
    args_.q_nope = columns(joined, 0, rank);
    args_.q_pe = columns(joined, rank, rope);
  } else {
    args_.q_nope = make_rows(q_nope_, rank, case_.layout.q_pad);
    if (rope > 0) args_.q_pe = make_rows(q_pe_, rope, case_.layout.q_pad);
  }
  args_.out = make_rows(out_, rank, case_.layout.out_pad);

  if (case_.lse) {
    const int64_t inner = (head_major ? num_tokens_ : heads) + case_.layout.lse_pad;
    lse_ = make_buffer(case_, inner * (head_major ? heads : num_tokens_), DType::kFloat32);
    args_.lse = {reinterpret_cast<float*>(lse_.data()), {num_tokens_, heads}, {inner, 1}};
    if (head_major) args_.lse.stride = {1, inner};
  }

  const CacheStrides strides = config().strides.value_or(pool_strides(g));
  const auto view = [&](void* data, int64_t width, int64_t page, int64_t row) {
    return ConstTensor<3>{
        data, {case_.pool_size(), g.page_size, width}, {page, row, 1}, {}, g.kv_dtype};
  };
  ckv_ = make_buffer(case_, strides.ckv_page * case_.pool_size(), g.kv_dtype);
  args_.cache.ckv = view(ckv_.data(), rank, strides.ckv_page, strides.ckv_row);
  if (rope == 0) return;
  void* kpe = offset_by(ckv_.data(), rank, g.kv_dtype);
  if (case_.layout.separate_cache) {
    kpe_ = make_buffer(case_, strides.kpe_page * case_.pool_size(), g.kv_dtype);
    kpe = kpe_.data();
  }
  args_.cache.kpe = view(kpe, rope, strides.kpe_page, strides.kpe_row);
}

void Problem::fill_queries() {
  const Geometry& g = case_.geometry;
  const DType dtype = g.dtype;
  const auto rank = static_cast<size_t>(g.kv_lora_rank);
  const auto rope = static_cast<size_t>(g.qk_rope_head_dim);
  poison_all(case_.poison, dtype, q_nope_);
  poison_all(case_.poison, dtype, q_pe_);
  // The buffers are this object's own: the views are read-only for the library alone.
  auto* q_nope = const_cast<void*>(args_.q_nope.data);
  auto* q_pe = const_cast<void*>(args_.q_pe.data);
  std::vector<float> row(rank + rope);
  for (size_t request = 0; request < case_.q_lens.size(); ++request) {
    const uint64_t content = case_.equal_requests ? 0 : request;
    for (int32_t j = 0; j < case_.q_lens[request]; ++j) {
      const int64_t position = int64_t{case_.kv_lens[request]} - case_.q_lens[request] + j;
      const int64_t token = qo_indptr_[request] + j;
      for (int64_t head = 0; head < g.num_heads; ++head) {
        const int64_t name = position * kMaxHeads + (case_.equal_heads ? 0 : head);
        fill_uniform(row_key(case_.seed, 2 * content + 1, static_cast<uint64_t>(name)),
                     DType::kFloat32, row.data(), static_cast<int64_t>(row.size()));
        shape_query(case_, row);
        const auto& at = args_.q_nope.stride;
        store_row(row, 0, rank, dtype, offset_by(q_nope, token * at[0] + head * at[1], dtype));
        if (rope == 0) continue;
        const auto& pe_at = args_.q_pe.stride;
        store_row(row, rank, rope, dtype,
                  offset_by(q_pe, token * pe_at[0] + head * pe_at[1], dtype));
      }
    }
  }
}

LatentRow Problem::page_start(int64_t page) const {
  if (page < 0 || page >= case_.pool_size()) return {};
  const DType dtype = case_.geometry.kv_dtype;
  const auto at = [&](const ConstTensor<3>& part) {
    return offset_by(const_cast<void*>(part.data), page * part.stride[0], dtype);
  };
  LatentRow start{.ckv = at(args_.cache.ckv)};
  if (case_.geometry.qk_rope_head_dim > 0) start.kpe = at(args_.cache.kpe);
  return start;
}

LatentRow Problem::latent_row(int64_t request, int64_t position) const {
  const int64_t page_size = case_.geometry.page_size;
  const int64_t entry = kv_indptr_[static_cast<size_t>(request)] + position / page_size;
  LatentRow row = page_start(kv_indices_[static_cast<size_t>(entry)]);
  if (row.ckv == nullptr) return row;
  const int64_t slot = position % page_size;
  const DType dtype = case_.geometry.kv_dtype;
  row.ckv = offset_by(row.ckv, slot * args_.cache.ckv.stride[1], dtype);
  if (row.kpe != nullptr) row.kpe = offset_by(row.kpe, slot * args_.cache.kpe.stride[1], dtype);
  return row;
}

void Problem::fill_cache() {
  const Geometry& g = case_.geometry;
  constexpr int64_t kFarPadding = 4096;  // elements of a page's padding that are poisoned at most
  const auto poison_part = [&](void* start, const std::array<int64_t, 3>& stride) {
    const int64_t used = g.page_size * stride[1];
    fill_poison(case_.poison, g.kv_dtype, start, std::min(stride[0], used + kFarPadding));
  };
  const auto poison_page = [&](int64_t page) {
    const LatentRow start = page_start(page);
    if (start.ckv == nullptr) return;
    poison_part(start.ckv, args_.cache.ckv.stride);
    if (kpe_.size() > 0) poison_part(start.kpe, args_.cache.kpe.stride);
  };
  if (ckv_.is_sparse() || kpe_.is_sparse()) {
    // The pages in use and their neighbours.
    for (const int64_t page : kv_indices_) {
      for (int64_t near = page - 1; near <= page + 1; ++near) poison_page(near);
    }
  } else {
    for (int64_t page = 0; page < case_.pool_size(); ++page) poison_page(page);
  }
  std::vector<float> row(static_cast<size_t>(g.latent_width()));
  const auto rank = static_cast<size_t>(g.kv_lora_rank);
  for (size_t request = 0; request < case_.kv_lens.size(); ++request) {
    const uint64_t content = case_.equal_requests ? 0 : request;
    for (int64_t position = 0; position < case_.kv_lens[request]; ++position) {
      const LatentRow to = latent_row(static_cast<int64_t>(request), position);
      if (to.ckv == nullptr) continue;  // a page that the library must refuse
      fill_uniform(row_key(case_.seed, 2 * content, static_cast<uint64_t>(position)),
                   DType::kFloat32, row.data(), static_cast<int64_t>(row.size()));
      shape_latent(case_, position, row);
      store_row(row, 0, rank, g.kv_dtype, to.ckv);
      if (to.kpe != nullptr) store_row(row, rank, row.size() - rank, g.kv_dtype, to.kpe);
    }
  }
}

Batch Problem::batch() const {
  Batch batch{.qo_indptr = qo_indptr_, .kv_indptr = kv_indptr_, .kv_indices = kv_indices_};
  if (case_.last_page_lens) {
    batch.kv_last_page_len = kv_last_page_len_;
  } else {
    batch.kv_len = case_.kv_lens;
  }
  return batch;
}

RunArgs Problem::args() const {
  RunArgs args = args_;
  const auto move = [&](auto& view, const Buffer& buffer) {
    using Pointer = decltype(view.data);
    view.device = case_.device;
    if (view.data == nullptr) return;
    const auto* at = static_cast<const std::byte*>(static_cast<const void*>(view.data));
    void* moved = buffer.device_data() + (at - buffer.data());
    view.data = static_cast<Pointer>(moved);
  };
  move(args.q_nope, q_nope_);
  move(args.q_pe, case_.layout.joined_q ? q_nope_ : q_pe_);
  move(args.cache.ckv, ckv_);
  move(args.cache.kpe, case_.layout.separate_cache ? kpe_ : ckv_);
  move(args.out, out_);
  move(args.lse, lse_);
  return args;
}

void Problem::upload() const {
  for (const Buffer* buffer : {&q_nope_, &q_pe_, &ckv_, &kpe_, &out_, &lse_}) buffer->upload();
}

void Problem::download(Stream stream) {
  device::Runtime& runtime = device::runtime_of(case_.device);
  if (runtime.is_immediate()) return;
  runtime.synchronize(stream);
  for (const Buffer* buffer : {&q_nope_, &q_pe_, &ckv_, &kpe_, &out_, &lse_}) buffer->download();
  const auto download_rows = [](const Buffer& buffer, const Tensor<3>& rows) {
    if (!buffer.is_sparse()) return;
    const int64_t size = size_of(rows.dtype);
    const auto start = static_cast<const std::byte*>(rows.data) - buffer.data();
    for (int64_t token = 0; token < rows.shape[0]; ++token) {
      for (int64_t head = 0; head < rows.shape[1]; ++head) {
        const int64_t at = start + (token * rows.stride[0] + head * rows.stride[1]) * size;
        buffer.download(static_cast<size_t>(at), static_cast<size_t>(rows.shape[2] * size));
      }
    }
  };
  download_rows(out_, args_.out);
  const auto& lse = args_.lse;
  download_rows(lse_, {lse.data,
                       {lse.shape[0], lse.shape[1], 1},
                       {lse.stride[0], lse.stride[1], 1},
                       {},
                       DType::kFloat32});
}

void Problem::run(PagedAttention& attention, Stream stream) {
  upload();
  attention.run(args(), stream);
  download(stream);
}

void Problem::spoil_outputs() {
  inputs_ = inputs_fingerprint();
  poison_all(Poison::kNan, case_.geometry.dtype, out_);
  poison_all(Poison::kNan, DType::kFloat32, lse_);
}

std::vector<float> Problem::packed_out() const {
  std::vector<float> packed;
  const Tensor<3>& out = args_.out;
  for (int64_t token = 0; token < num_tokens_; ++token) {
    for (int64_t head = 0; head < out.shape[1]; ++head) {
      for (int64_t c = 0; c < out.shape[2]; ++c) {
        packed.push_back(
            load(out.data, token * out.stride[0] + head * out.stride[1] + c, out.dtype));
      }
    }
  }
  return packed;
}

std::vector<float> Problem::packed_lse() const {
  std::vector<float> packed;
  const auto& lse = args_.lse;
  for (int64_t token = 0; token < lse.shape[0]; ++token) {
    for (int64_t head = 0; head < lse.shape[1]; ++head) {
      packed.push_back(lse.data[token * lse.stride[0] + head * lse.stride[1]]);
    }
  }
  return packed;
}

uint64_t Problem::inputs_fingerprint() const {
  uint64_t state = 0;
  for (const Buffer* buffer : {&q_nope_, &q_pe_, &ckv_, &kpe_}) {
    state = row_key(state, buffer->fingerprint(), 0);
  }
  return state;
}

std::string Problem::find_stray_write() const {
  // With its rows put back to what they were, an output must be as spoil_outputs left it.
  const auto has_stray = [&](const Buffer& buffer, const Tensor<3>& tensor) {
    if (buffer.is_sparse()) return false;
    std::vector<std::byte> copy(buffer.data(), buffer.data() + buffer.size());
    std::vector<std::byte> spoilt(buffer.size());
    const int64_t size = size_of(tensor.dtype);
    fill_poison(Poison::kNan, tensor.dtype, spoilt.data(),
                static_cast<int64_t>(spoilt.size()) / size);
    const auto row_bytes = static_cast<size_t>(tensor.shape[2] * size);
    for (int64_t token = 0; token < tensor.shape[0]; ++token) {
      for (int64_t head = 0; head < tensor.shape[1]; ++head) {
        const int64_t at = (token * tensor.stride[0] + head * tensor.stride[1]) * size;
        std::memcpy(copy.data() + at, spoilt.data(), row_bytes);
      }
    }
    return copy != spoilt;
  };
  if (has_stray(out_, args_.out)) return "the padding of out";
  const auto& lse = args_.lse;
  if (has_stray(lse_, {lse.data,
                       {lse.shape[0], lse.shape[1], 1},
                       {lse.stride[0], lse.stride[1], 1},
                       {},
                       DType::kFloat32})) {
    return "the padding of lse";
  }
  if (inputs_fingerprint() != inputs_) return "a query or the cache";
  for (const Buffer* buffer : {&q_nope_, &q_pe_, &ckv_, &kpe_, &out_, &lse_}) {
    if (!buffer->guards_intact()) return "memory beside a tensor";
  }
  return {};
}

}  // namespace mla::cases
