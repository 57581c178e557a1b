#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/kv_rows.hpp"
#include "mla/error.hpp"
#include "mla/kv_resource.hpp"

namespace mla::engine {
namespace {

constexpr RequestId kNumRequests = 5;
constexpr const char* kLabels[] = {"main", "draft"};

/// What a test must have come by, or it was idle.
struct Tally {
  int64_t refused = 0;
  int64_t refused_over_early = 0;  // an idle resource refused a step while another was pre-admitted
  int64_t promoted_after = 0;      // and that one was then taken over as it had been planned
};

/// Two resources over pools of their own get the same random calls. The first also gets calls that
/// it must refuse; the two must not be told apart by anything.
class Twins {
 public:
  Twins(uint64_t seed, int64_t num_pages, int32_t page_size)
      : random_(seed),
        num_pages_(num_pages),
        page_size_(page_size),
        pools_{LatentPool(small_pool(num_pages, page_size)),
               LatentPool(small_pool(num_pages, page_size))},
        first_(pools_[0], {.check_every_call = true}),
        second_(pools_[1], {.check_every_call = true}) {}

  void run(int num_calls) {
    for (int i = 0; i < num_calls && !::testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      if (chance(40)) refused_call();
      call();
      compare();
    }
  }
  const Tally& tally() const { return tally_; }

 private:
  enum class Phase { kIdle, kAdmitted, kPlanned };
  using Call = std::function<std::string(KvResource&)>;

  uint64_t below(uint64_t bound) { return random_() % bound; }
  bool chance(uint64_t percent) { return below(100) < percent; }
  KvStream any_stream() {
    return {.request = 1 + below(kNumRequests), .label = kLabels[chance(25) ? 1 : 0]};
  }

  // "", or what the call said against it.
  static std::string outcome(const Call& call, KvResource& kv) {
    try {
      return call(kv);
    } catch (const Error& error) {
      return error.what();
    }
  }
  static std::string answer(const AdmitResult& result) {
    std::string text;
    for (const Shortage& shortage : result.shortages) {
      text += std::to_string(shortage.request) + shortage.label + " lacks " +
              std::to_string(shortage.pages) + ", ";
    }
    return text;
  }
  // Whether both did it.
  bool both(const Call& call) {
    const std::string first = outcome(call, first_);
    EXPECT_EQ(first, outcome(call, second_));
    return first.empty();
  }

  // A step over some of the open streams, forks of them among it; one that may well be admitted.
  KvStep likely_step() {
    KvStep step;
    for (RequestId request = 1; request <= kNumRequests; ++request) {
      for (const char* label : kLabels) {
        if (!second_.contains({request, label}) || chance(40)) continue;
        const auto span = static_cast<int32_t>(below(page_size_ + 2));
        step.segments.push_back({request, label, span});
      }
    }
    std::ranges::shuffle(step.segments, random_);
    if (step.segments.empty()) return step;
    const auto fork_of_any = [&] {
      const Segment& of = step.segments[below(step.segments.size())];
      return Fork{.source = {of.request, of.label}, .target = any_stream()};
    };
    if (chance(25)) {
      step.forks_before.push_back(fork_of_any());
      const KvStream& made = step.forks_before.back().target;
      if (chance(60)) step.segments.push_back({made.request, made.label, 1});
    }
    if (chance(15)) step.forks_after.push_back(fork_of_any());
    return step;
  }

  // As likely_step, with something that every resource refuses, found first or last.
  KvStep hopeless_step() {
    KvStep step = likely_step();
    const KvStream unknown{.request = 99};
    switch (below(4)) {
      case 0:
        step.segments.push_back({unknown.request, unknown.label, 1});
        break;
      case 1:
        step.forks_after.push_back({.source = unknown, .target = {.request = 98}});
        break;
      case 2:
        if (!step.segments.empty()) {
          step.segments.push_back(step.segments.front());
          break;
        }
        [[fallthrough]];
      default:
        if (step.segments.empty()) {
          step.segments.push_back({unknown.request, unknown.label, 1});
        } else {
          step.segments.back().span = static_cast<int32_t>((num_pages_ + 2) * page_size_);
        }
    }
    return step;
  }

  void refused_call() {
    bool is_over_early = false;
    const Call call = [&]() -> Call {
      switch (below(8)) {
        case 0:
          return [](KvResource& kv) { return kv.remove(99), ""; };
        case 1:
          return [](KvResource& kv) { return kv.trim({.request = 1}, 1 << 20), ""; };
        case 2:
          return [](KvResource& kv) { return kv.fork({.request = 99}, {.request = 1}), ""; };
        case 3:
          return [](KvResource& kv) { return kv.open({.request = 1}, -1), ""; };
        case 4:
          return [step = hopeless_step()](KvResource& kv) { return answer(kv.pre_admit(step)); };
        default:
          is_over_early = phase_ == Phase::kIdle && early_planned_ != 0;
          return [step = hopeless_step()](KvResource& kv) { return answer(kv.admit(step)); };
      }
    }();
    const std::string said = outcome(call, first_);
    ASSERT_NE(said, "");
    ++tally_.refused;
    if (!is_over_early) return;
    ++tally_.refused_over_early;
    refused_since_early_ = true;
  }

  void call() {
    const uint64_t what = below(100);
    if (what < 55) return advance_step();
    if (what < 67) return open();
    if (what < 72) return trim();
    if (what < 77) {
      const KvStream source = any_stream(), target = any_stream();
      both([=](KvResource& kv) { return kv.fork(source, target), ""; });
    } else if (what < 82) {
      const RequestId request = 1 + below(kNumRequests);
      both([=](KvResource& kv) { return kv.remove(request), ""; });
    } else if (what < 98) {
      plan_ahead();
    } else if (what < 99) {
      both([](KvResource& kv) { return kv.clear_preplan(), ""; });
      early_planned_ = 0;
    } else {
      both([](KvResource& kv) { return kv.drop_prefixes(), ""; });
    }
  }

  void advance_step() {
    if (phase_ == Phase::kIdle) {
      step_ = early_planned_ != 0 && chance(70) ? early_ : likely_step();
      const bool done = both([&](KvResource& kv) { return answer(kv.admit(step_)); });
      if (done) phase_ = Phase::kAdmitted;
    } else if (chance(10)) {
      both([](KvResource& kv) { return kv.abandon(), ""; });
      early_planned_ = 0;
      phase_ = Phase::kIdle;
    } else if (phase_ == Phase::kAdmitted) {
      const uint64_t id = plan(step_, slot_, false);
      if (id != 0 && id == early_planned_ && refused_since_early_) ++tally_.promoted_after;
      early_planned_ = 0;
      phase_ = Phase::kPlanned;
    } else {
      both([](KvResource& kv) { return kv.commit(), ""; });
      slot_ = 1 - slot_;
      phase_ = Phase::kIdle;
    }
  }

  void plan_ahead() {
    if (phase_ == Phase::kAdmitted) return;
    const KvStep next = likely_step();
    if (!both([&](KvResource& kv) { return answer(kv.pre_admit(next)); })) return;
    early_ = next;
    early_planned_ = plan(early_, phase_ == Phase::kPlanned ? 1 - slot_ : slot_, true);
    refused_since_early_ = false;
  }

  // Plans in both, which must agree on everything. The plan's id; 0 where both refused.
  uint64_t plan(const KvStep& wanted, int32_t slot, bool is_preplan) {
    Step step;
    step.part<KvStep>("kv") = wanted;
    const SlotLease lease{.slot = slot};
    const PlanResults results;
    std::array<const KvPlan*, 2> plans{};
    size_t count = 0;
    const bool done = both([&](KvResource& kv) {
      plans[count++] =
          &kv.plan(step, {.lease = lease, .results = results, .is_preplan = is_preplan});
      return "";
    });
    if (!done) return 0;
    EXPECT_EQ(plans[0]->id, plans[1]->id);
    EXPECT_TRUE(std::ranges::equal(
        plans[0]->labels, plans[1]->labels, [](const LabelPlan& a, const LabelPlan& b) {
          return a.label == b.label && std::ranges::equal(a.qo_indptr, b.qo_indptr) &&
                 std::ranges::equal(a.kv_indices, b.kv_indices) &&
                 std::ranges::equal(a.kv_len, b.kv_len) && std::ranges::equal(a.slots, b.slots);
        }));
    return plans[0]->id;
  }

  void open() {
    const KvStream stream = any_stream();
    std::vector<Token> text(
        below(4 * static_cast<uint64_t>(page_size_)));  // one of two texts, or its start
    std::ranges::fill(text, static_cast<Token>(below(2)));
    const auto keys = keys_of(text, page_size_);
    both([&](KvResource& kv) {
      kv.open(stream, static_cast<int64_t>(text.size()), keys);
      return "";
    });
  }

  void trim() {
    const KvStream stream = any_stream();
    const auto count = static_cast<int64_t>(below(page_size_));
    both([=](KvResource& kv) { return kv.trim(stream, count), ""; });
  }

  void compare() {
    ASSERT_EQ(first_.check(), second_.check());
    for (RequestId request = 1; request <= kNumRequests; ++request) {
      for (const char* label : kLabels) {
        const KvStream stream{request, label};
        ASSERT_EQ(first_.contains(stream), second_.contains(stream));
        if (!second_.contains(stream)) continue;
        ASSERT_EQ(first_.length(stream), second_.length(stream));
        ASSERT_TRUE(std::ranges::equal(first_.pages(stream), second_.pages(stream)));
      }
    }
  }

  std::mt19937_64 random_;
  int64_t num_pages_;
  int32_t page_size_;
  std::array<LatentPool, 2> pools_;
  KvResource first_, second_;
  Phase phase_ = Phase::kIdle;
  KvStep step_, early_;
  uint64_t early_planned_ = 0;  // id of the early plan, while it may be promoted
  bool refused_since_early_ = false;
  int32_t slot_ = 0;
  Tally tally_;
};

TEST(KvRefusalProperty, ARefusedCallChangesNothing) {
  Tally sum;
  for (const int32_t page_size : {1, 2, 4}) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      SCOPED_TRACE("page size " + std::to_string(page_size) + ", seed " + std::to_string(seed));
      Twins twins(seed, static_cast<int64_t>(8 + 3 * seed), page_size);
      twins.run(4000);
      if (HasFailure()) return;
      sum.refused += twins.tally().refused;
      sum.refused_over_early += twins.tally().refused_over_early;
      sum.promoted_after += twins.tally().promoted_after;
    }
  }
  EXPECT_GT(sum.refused, 10000);
  EXPECT_GT(sum.refused_over_early, 100);
  EXPECT_GT(sum.promoted_after, 20);
}

}  // namespace
}  // namespace mla::engine
