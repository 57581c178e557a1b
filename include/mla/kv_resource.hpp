#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/export.hpp"
#include "mla/kv_step.hpp"
#include "mla/page_key.hpp"
#include "mla/pool.hpp"
#include "mla/resource.hpp"

namespace mla {

/// Where the pool's usable pages are. The sink is not among them.
struct PageCounts {
  int64_t free = 0;
  int64_t owned = 0;     ///< held by one stream
  int64_t shared = 0;    ///< held by several, or by streams and the prefix index
  int64_t cached = 0;    ///< held by the prefix index alone: taken back when pages run out
  int64_t reserved = 0;  ///< given to an admitted or pre-admitted step, not yet filled

  bool operator==(const PageCounts&) const = default;
};

struct KvOptions {
  std::string key = "kv";  ///< among a runner's resources
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
/// throw InvalidState. Every refused call changes nothing.
///
/// The next step may be admitted and planned early, between plan and commit or after it. It is
/// laid out as if the step in flight were committed, its pages are taken on top of that one's, and
/// no row of the pool is touched. The next admit of the same step takes it over, and a plan for the
/// same lease promotes it. Whatever changes one of its streams meanwhile (trim, remove, a fork of
/// it, abandon of the step in flight), admitting another step and clear_preplan drop it; a refused
/// call does not.
///
/// Calls on one object must not overlap, but for `write`, which may run on another thread than
/// calls that change no planned stream: open, remove, trim and fork of others, pre_admit, a
/// pre-plan, clear_preplan.
class MLA_API KvResource final : public Resource {
 public:
  /// `pool` is lent and must outlive the resource, which alone decides over its pages. Throws
  /// InvalidState where another living resource does.
  explicit KvResource(LatentPool& pool, const KvOptions& options = {});
  ~KvResource() override;
  KvResource(KvResource&&) noexcept;
  KvResource& operator=(KvResource&&) noexcept;

  const std::string& key() const noexcept override;
  bool supports_preplan() const noexcept override { return true; }

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

  /// Makes a Fork at once. Throws InvalidArgument, InvalidState (source is in the current step).
  void fork(const KvStream& source, const KvStream& target);

  /// Makes the forks that come before the step and reserves the pages that its rows need, copies of
  /// shared pages included; cached pages are evicted, the least recently used first, as far as they
  /// are needed. When pages are short it changes nothing and says how many and for whom. Admitting
  /// the admitted step again reserves nothing.
  /// Throws InvalidArgument naming the entry (unknown stream, a stream twice, negative span, a
  /// length or a total beyond 2^31 - 1, the target of a fork that is open, a label combined twice),
  /// InvalidState (another step is admitted or planned).
  AdmitResult admit(const KvStep& step);
  AdmitResult admit(std::span<const Segment> segments);
  AdmitResult admit(const Step& step) override;

  /// Plans the admitted step: makes the copies of shared pages that it writes to, and lays out each
  /// label. Valid until the next plan. Throws InvalidState (nothing admitted), CudaError.
  std::span<const LabelPlan> plan(Stream stream = {});
  /// The same; or with is_preplan, plans the pre-admitted step early. The step must be the one that
  /// was admitted. Under a bucket, on a device with streams, the first plan of each bucket, slot
  /// and label allocates device and page-locked memory for its slots, kept for the resource's life:
  /// plan each once where that may not happen later, as before a capture. Later ones allocate
  /// nothing, and wait only where the copies of four earlier plans of one are all in flight.
  /// Streams must live as PagedAttention says. Throws InvalidArgument (it is another), InvalidState
  /// (nothing admitted, planned early already), CudaError, std::bad_alloc.
  const KvPlan& plan(const Step& step, const PlanContext& context) override;
  /// One label of the current plan. Throws InvalidArgument (not in the step), InvalidState.
  const LabelPlan& label_plan(std::string_view label = "main") const;

  /// As admit, for the step after the one in flight. Throws also InvalidState: a step is admitted
  /// but not planned, another one is pre-admitted, a stream that the step in flight forks at its
  /// commit, a fork of a stream in the step in flight.
  AdmitResult pre_admit(const KvStep& step);
  AdmitResult pre_admit(const Step& step) override;
  void clear_preplan() override;
  void order_replay(Stream stream) override;
  void check_lease(const SlotLease& lease) const override;
  /// Buckets may then have at most this shape. Without the call: 2^20 rows, 2^31 - 1 tokens.
  void size_graph_buffers(const GraphShape& largest) override;

  /// Scatters the label's new rows to their slots, see LatentPool::append: [T, ...], or as many as
  /// there are slots under a bucket; those past T are skipped. In a capture under a bucket there
  /// must be as many, since later plans are replayed. Under a bucket, on a device with
  /// streams, the slots are read there, so that a captured write follows later plans.
  /// Throws InvalidArgument, InvalidState (nothing planned), CudaError.
  void write(int32_t layer, std::string_view label, const ConstTensor<2>& ckv,
             const ConstTensor<2>& kpe, Stream stream = {});

  /// Where the label's new rows go, [the bucket's tokens] on the pool's device and -1 past T: for
  /// those who scatter rows themselves, as Layer::forward does. For the resource's life each
  /// bucket, slot and label has one address, whose contents follow later plans; what is queued on
  /// `stream` after the call may read them, and a replay after order_replay. On the CPU they are
  /// those of LabelPlan::slots, valid as long, and without a bucket too: [T]. Throws
  /// InvalidArgument (not in the step), InvalidState (nothing planned; on a device with streams a
  /// plan without a bucket, whose slots are on the host alone).
  TensorView<const int64_t, 1> slots_buf(std::string_view label = "main", Stream stream = {});

  /// Ends the step: its rows are stored. Pages that became full and have a key enter the prefix
  /// index; where the key is known already, the known page takes the place of the new one. Then the
  /// forks that come after the step are made. Throws InvalidState (nothing planned).
  void commit() override;
  /// Ends the step without it: reserved pages are given back and its forks are undone. Copies of
  /// shared pages that plan made stay with their stream. Throws InvalidState (nothing admitted).
  void abandon() override;

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

  /// Targets of forks are there from the step's plan on (before it), from its commit on (after).
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
