#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/batch.hpp"
#include "mla/export.hpp"
#include "mla/page_key.hpp"
#include "mla/pool.hpp"

namespace mla {

using RequestId = uint64_t;

/// One cache stream: a request may have several, told apart by their label.
struct KvStream {
  RequestId request = 0;
  std::string_view label = "main";
};

/// What a step does to one stream.
struct Segment {
  RequestId request = 0;
  std::string_view label = "main";
  int32_t span = 0;  ///< rows appended, >= 0; 0 reads without extending
};

/// How many pages one segment lacks.
struct Shortage {
  RequestId request = 0;
  std::string label{};
  int64_t pages = 0;
};

/// The answer of admit. Pages are given to the segments in their order; those for which they did
/// not suffice are listed.
struct AdmitResult {
  int64_t pages_short = 0;  ///< 0: admitted
  std::vector<Shortage> shortages{};

  explicit operator bool() const { return pages_short == 0; }
};

/// One stream's part of a plan.
struct KvView {
  RequestId request = 0;
  std::string_view label{};
  std::span<const int32_t> pages{};  ///< those that hold its `length` tokens, in token order
  int64_t start = 0;       ///< tokens stored before the step: position of its first new row
  int64_t to_compute = 0;  ///< rows that the step appends
  int64_t length = 0;      ///< start + to_compute
};

/// One label's part of a plan (B streams, T new rows), in packed order: the order of the step's
/// segments. Valid until the next plan. The arrays are those of Batch.
struct LabelPlan {
  std::string_view label{};
  std::span<const KvView> views{};              ///< [B]
  std::span<const int32_t> qo_indptr{};         ///< [B + 1]
  std::span<const int32_t> kv_indptr{};         ///< [B + 1]
  std::span<const int32_t> kv_indices{};        ///< [kv_indptr[B]]
  std::span<const int32_t> kv_len{};            ///< [B], new rows included
  std::span<const int32_t> kv_last_page_len{};  ///< [B], 0 for a stream without tokens
  std::span<const int64_t> slots{};             ///< [T], where each new row lands in the pool

  Batch batch() const { return {qo_indptr, kv_indptr, kv_indices, kv_len, {}}; }
};

/// Where the pool's usable pages are. The sink is not among them.
struct PageCounts {
  int64_t free = 0;
  int64_t owned = 0;     ///< held by one stream
  int64_t shared = 0;    ///< held by several, or by streams and the prefix index
  int64_t cached = 0;    ///< held by the prefix index alone: taken back when pages run out
  int64_t reserved = 0;  ///< given to a stream for the admitted step, not yet filled

  bool operator==(const PageCounts&) const = default;
};

struct KvOptions {
  /// Runs check() after every call that changes something. None: where the library was built with
  /// assertions.
  std::optional<bool> check_every_call{};
};

/// Who holds which pages of a pool, and what a step appends where.
///
///   LatentPool pool(pool_config);
///   KvResource kv(pool);
///   const int64_t cached = kv.open({.request = 7}, prompt_len, page_keys);  // known prefix
///   while (...) {
///     const Segment step[] = {{.request = 7, .span = chunk}};
///     if (AdmitResult r = kv.admit(step); !r) { /* wait, or remove a request, and try again */ }
///     kv.plan();
///     const LabelPlan& main = kv.label_plan();      // its views say which tokens to compute
///     attention.plan(main.batch(), plan_options);   // a PagedAttention over the same pool
///     for (int32_t layer = 0; layer < num_layers; ++layer) {
///       kv.write(layer, "main", ckv, kpe);          // the new rows, in packed order
///       attention.run({.q_nope = q, .q_pe = p, .cache = pool.views(layer), .out = out});
///     }
///     kv.commit();
///     kv.trim({.request = 7}, num_rejected);        // speculative tokens
///   }
///   kv.remove(7);
///
/// A step goes admit, plan, any number of writes, commit; or abandon. Calls in another order
/// throw InvalidState. Every refused call changes nothing. Calls on one object must not overlap.
class MLA_API KvResource {
 public:
  /// `pool` is lent and must outlive the resource, which alone decides over its pages.
  explicit KvResource(LatentPool& pool, const KvOptions& options = {});
  ~KvResource();
  KvResource(KvResource&&) noexcept;
  KvResource& operator=(KvResource&&) noexcept;

  /// Makes an empty stream and attaches the longest known prefix of its first `num_tokens` tokens.
  /// Returns the tokens that are stored already. At most num_tokens - 1 are: of a prompt that is
  /// known to its end the last row is still computed (its page is copied, if it is full).
  ///
  /// page_keys[i] is the key of the stream's page i once that is full; keys may reach past
  /// num_tokens and may be added later. Streams of different labels never share by key.
  /// Throws InvalidArgument (open already, negative num_tokens).
  int64_t open(const KvStream& stream, int64_t num_tokens = 0,
               std::span<const PageKey> page_keys = {});
  /// Adds the keys of the pages after those whose keys are known. They are used from the next
  /// commit on. Throws InvalidArgument (unknown stream).
  void add_page_keys(const KvStream& stream, std::span<const PageKey> page_keys);

  /// Makes `target`, which must not be open, a stream with the content of `source`: all pages are
  /// shared until one of the two appends. Throws InvalidArgument, InvalidState (source is in the
  /// current step).
  void fork(const KvStream& source, const KvStream& target);

  /// Reserves the pages that the step's rows need, copies of shared pages included; cached pages
  /// are evicted, the least recently used first, as far as they are needed. When pages are short
  /// it changes nothing and says how many and for whom. Admitting the admitted step again reserves
  /// nothing.
  /// Throws InvalidArgument (unknown stream, a stream twice, negative span, a length or a total
  /// beyond 2^31 - 1), InvalidState (another step is admitted or planned).
  AdmitResult admit(std::span<const Segment> segments);

  /// Plans the admitted step: makes the copies of shared pages that it writes to, and lays out each
  /// label. Returns the plans in the order in which labels first appear in the step; valid until
  /// the next plan. Throws InvalidState (nothing admitted).
  std::span<const LabelPlan> plan(Stream stream = {});
  /// One label of the current plan. Throws InvalidArgument (not in the step), InvalidState.
  const LabelPlan& label_plan(std::string_view label = "main") const;

  /// Scatters the label's new rows [T, ...] to their slots, see LatentPool::append.
  /// Throws InvalidArgument, InvalidState (nothing planned).
  void write(int32_t layer, std::string_view label, const ConstTensor<2>& ckv,
             const ConstTensor<2>& kpe, Stream stream = {});

  /// Ends the step: its rows are stored. Pages that became full and have a key enter the prefix
  /// index; where the key is known already, the known page takes the place of the new one.
  /// Throws InvalidState (nothing planned).
  void commit();
  /// Ends the step without it: reserved pages are given back. Copies of shared pages that plan made
  /// stay with their stream. Throws InvalidState (nothing admitted).
  void abandon();

  /// Takes back the stream's last `num_tokens` tokens. Pages that become empty are dropped, with
  /// the keys of all pages that are cut; a shared page that stays half used is copied when the
  /// stream appends next. Throws InvalidArgument (unknown, negative, more than is stored),
  /// InvalidState (in the current step).
  void trim(const KvStream& stream, int64_t num_tokens);
  /// Ends every stream of the request. Its pages may be handed out at once; those in the prefix
  /// index stay cached. Throws InvalidArgument (unknown), InvalidState (in the current step).
  void remove(RequestId request);
  /// Empties the prefix index.
  void drop_prefixes();

  bool contains(const KvStream& stream) const;
  /// Tokens stored, without those of the current step. Throws InvalidArgument (unknown).
  int64_t length(const KvStream& stream) const;
  /// Pages held, the reserved ones included. Valid until the next call that changes something.
  std::span<const int32_t> pages(const KvStream& stream) const;

  const LatentPool& pool() const noexcept;
  int64_t num_pages() const noexcept;     ///< usable pages of the pool
  int64_t free_pages() const noexcept;    ///< held by nobody
  int64_t cached_pages() const noexcept;  ///< held by the prefix index alone

  /// Proves that every page is free, owned, shared, cached or reserved, that each reference count
  /// equals its holders, and that the prefix index is whole. Cost grows with the pool and the page
  /// lists. Throws InvalidState naming the page.
  PageCounts check() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
