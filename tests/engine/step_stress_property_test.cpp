#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/kv_model.hpp"
#include "engine/mini_engine.hpp"

// Thousands of random steps, planned on one thread while the step before runs on another, against
// the same steps one by one and against a plain model of the allocator.
namespace mla::engine {
namespace {

constexpr size_t kMaxStreams = 8;
constexpr int32_t kLayers = 2, kHeads = 1;

int num_steps() {
  const char* wanted = std::getenv("MLA_STRESS_STEPS");
  return wanted == nullptr ? 10000 : std::atoi(wanted);
}

// A thread that does one piece of work at a time.
class RunThread {
 public:
  RunThread() : thread_([this] { loop(); }) {}
  ~RunThread() {
    start({});
    thread_.join();
  }
  void start(std::function<void()> work) {
    const std::scoped_lock lock(mutex_);
    work_ = std::move(work);
    busy_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
  }

 private:
  void loop() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return busy_; });
      if (!work_) return;
      const std::function<void()> work = std::exchange(work_, {});
      lock.unlock();
      work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool busy_ = false;
  std::function<void()> work_;
  std::thread thread_;
};

struct Wish {  // a step that is wanted, in the model's words
  std::vector<KvModel::Planned> segments;
  std::vector<std::pair<StreamName, StreamName>> forks_before, forks_after;
  bool context_only = false;
};

struct Tally {
  int64_t steps = 0, promoted = 0, stale = 0, cleared = 0, early_short = 0, refused = 0;
  int64_t abandoned = 0, forks = 0, context_only = 0;
};

struct EndState {
  PageCounts counts;
  std::map<StreamName, std::vector<Token>> streams;
  uint64_t outputs = 0;  // hash of all outputs
};

// All choices that change the streams come from one generator and the model alone, so that two
// drivers of one seed do the same, whether they plan ahead or not.
class Driver {
 public:
  Driver(uint64_t seed, bool ahead)
      : ahead_(ahead), random_(seed), early_random_(seed + 1), model_(kPages, kPageSize) {}

  void run(int steps) {
    open();
    Wish wish = choose();
    while (tally.steps < steps && !testing::Test::HasFatalFailure()) {
      keep_possible(wish);
      if (!admit(wish)) {
        remove_one();
        wish = choose();
        continue;
      }
      wish = run_step(std::move(wish));
      ++tally.steps;
      if (tally.steps % 500 == 0) compare();
    }
    engine_.runner.clear_preplan();
    compare();
  }

  EndState end_state() {
    EndState end{.counts = engine_.kv.check(), .streams = {}, .outputs = outputs_};
    for (const auto& [name, stream] : model_.streams) end.streams[name] = stream.tokens;
    return end;
  }

  Tally tally;

 private:
  static constexpr int64_t kPages = 30;
  static constexpr int32_t kPageSize = 4;

  static bool chance(std::mt19937_64& random, uint64_t percent) { return random() % 100 < percent; }
  bool chance(uint64_t percent) { return chance(random_, percent); }
  uint64_t below(uint64_t bound) { return random_() % bound; }
  static KvStream id(const StreamName& name) { return {name.first, name.second}; }

  // --- the streams, changed in the resource and in the model alike

  void open() {
    if (model_.streams.size() >= kMaxStreams) return;
    const StreamName name{next_request_++, "main"};
    model_.open(name, {}, {});
    engine_.kv.open(id(name));
  }
  bool is_busy(const StreamName& name) const {
    return model_.in_step(name) || std::ranges::find(locked_, name) != locked_.end();
  }
  bool pick(StreamName& name) {
    std::vector<StreamName> names;
    for (const auto& [candidate, stream] : model_.streams) {
      if (!is_busy(candidate)) names.push_back(candidate);
    }
    if (names.empty()) return false;
    name = names[below(names.size())];
    return true;
  }
  void trim() {
    StreamName name;
    if (!pick(name)) return;
    const auto num_tokens = below(std::min<size_t>(model_.streams.at(name).tokens.size(), 6) + 1);
    model_.trim(name, num_tokens);
    engine_.kv.trim(id(name), static_cast<int64_t>(num_tokens));
  }
  StreamName fork_target(const StreamName& source) {
    if (chance(50)) return {next_request_++, "main"};
    return {source.first, source.second == "main" ? "draft" : "main"};
  }
  void fork() {
    StreamName source;
    if (!pick(source) || model_.streams.size() >= kMaxStreams) return;
    const StreamName target = fork_target(source);
    if (model_.streams.contains(target) || is_busy(target)) return;
    model_.fork(source, target);
    engine_.kv.fork(id(source), id(target));
  }
  void remove_one() {
    StreamName name;
    if (!pick(name)) return;
    for (const char* label : {"main", "draft"}) {
      if (is_busy({name.first, label})) return;
    }
    model_.remove(name.first);
    engine_.kv.remove(name.first);
  }
  void change_some() {
    for (uint64_t n = below(3); n > 0; --n) {
      const uint64_t what = below(10);
      if (what < 3) {
        open();
      } else if (what < 6) {
        trim();
      } else if (what < 8) {
        fork();
      } else if (what < 9) {
        remove_one();
      }
    }
  }

  // --- steps

  Wish choose() {
    Wish wish;
    wish.context_only = chance(20);
    for (const auto& [name, stream] : model_.streams) {
      if (chance(60)) wish.segments.push_back({name, static_cast<int32_t>(below(6))});
    }
    std::ranges::shuffle(wish.segments, random_);
    for (auto* forks : {&wish.forks_before, &wish.forks_after}) {
      if (!chance(15) || model_.streams.empty()) continue;
      auto source = model_.streams.begin();
      std::advance(source, below(model_.streams.size()));
      forks->emplace_back(source->first, StreamName{next_request_++, "main"});
    }
    for (const auto& [source, target] : wish.forks_before) {
      if (chance(80)) wish.segments.push_back({target, static_cast<int32_t>(below(4))});
    }
    return wish;
  }
  // Leaves out what names streams that are not there any more.
  void keep_possible(Wish& wish) const {
    const auto gone = [&](const auto& fork) { return !model_.streams.contains(fork.first); };
    std::erase_if(wish.forks_before, gone);
    std::erase_if(wish.forks_after, gone);
    std::erase_if(wish.segments, [&](const KvModel::Planned& segment) {
      const bool made = std::ranges::any_of(
          wish.forks_before, [&](const auto& fork) { return fork.second == segment.name; });
      return !made && !model_.streams.contains(segment.name);
    });
  }
  static Step step_of(const Wish& wish) {
    Step step = MiniEngine::step_of({});
    KvStep& kv = MiniEngine::kv_part(step);
    for (const auto& segment : wish.segments) {
      kv.segments.push_back({segment.name.first, segment.name.second, segment.span});
    }
    for (const auto& [source, target] : wish.forks_before) {
      kv.forks_before.push_back({id(source), id(target)});
    }
    for (const auto& [source, target] : wish.forks_after) {
      kv.forks_after.push_back({id(source), id(target)});
    }
    AttentionPass& pass = MiniEngine::attention_part(step).passes[0];
    pass.context_only = wish.context_only && !wish.segments.empty();
    if (!pass.context_only) return step;
    for (const auto& segment : wish.segments) {
      pass.segments.push_back({.label = segment.name.second, .num_queries = 2});
    }
    return step;
  }
  // Every other step has the other slot; small ones run in a bucket.
  SlotLease lease_of(const Wish& wish, int64_t step) const {
    SlotLease lease{.slot = static_cast<int32_t>(step % 2)};
    int64_t tokens = 0;
    for (const auto& segment : wish.segments) tokens += std::max(segment.span, 2);
    if (wish.segments.size() <= 4 && tokens <= 16) {
      lease.bucket = GraphBucket{"decode", {.num_rows = 4, .num_tokens = 16}};
    }
    return lease;
  }

  bool admit(const Wish& wish) {
    for (const auto& [source, target] : wish.forks_before) model_.fork(source, target);
    const std::vector<int64_t> lacking = model_.admit(wish.segments);
    const int64_t short_of = std::reduce(lacking.begin(), lacking.end());
    const AdmitResult result = engine_.runner.admit(step_of(wish));
    EXPECT_EQ(result.pages_short, short_of);
    if (short_of == 0) return static_cast<bool>(result);
    for (const auto& [source, target] : wish.forks_before) model_.streams.erase(target);
    ++tally.refused;
    return false;
  }

  // Plans and runs the admitted step; meanwhile the next one is chosen and perhaps planned.
  Wish run_step(Wish wish) {
    const Step step = step_of(wish);
    const PlanResults& results = engine_.runner.plan(step, lease_of(wish, tally.steps));
    count_promotion(results);
    model_.plan();
    locked_.clear();
    for (const auto* forks : {&wish.forks_before, &wish.forks_after}) {
      for (const auto& [source, target] : *forks) locked_.insert(locked_.end(), {source, target});
    }
    tally.forks += std::ssize(wish.forks_before) + std::ssize(wish.forks_after);
    tally.context_only += wish.context_only ? 1 : 0;
    name_tokens(wish);

    if (ahead_) {
      thread_.start([this] { run_model(); });
    } else {
      run_model();
    }
    change_some();
    Wish next = choose();
    if (ahead_) plan_ahead(next, wish);
    change_some();
    if (ahead_) thread_.wait();

    if (chance(4)) {
      engine_.runner.abandon();
      model_.abandon();
      for (const auto& [source, target] : wish.forks_before) model_.streams.erase(target);
      early_id_ = 0;
      ++tally.abandoned;
    } else {
      engine_.runner.commit();
      model_.commit(new_tokens_);
      for (const auto& [source, target] : wish.forks_after) model_.fork(source, target);
    }
    locked_.clear();
    change_some();
    return next;
  }

  void plan_ahead(const Wish& next, const Wish& running) {
    if (!chance(early_random_, 70)) return;
    Wish wish = next;
    keep_possible(wish);
    const auto waits = [&](const StreamName& name) {  // for the commit of the running step
      return std::ranges::any_of(running.forks_after, [&](const auto& fork) {
        return fork.first == name || fork.second == name;
      });
    };
    for (const auto& segment : wish.segments) {
      if (waits(segment.name)) return;
    }
    for (const auto& [source, target] : wish.forks_before) {
      if (is_busy(source)) return;
    }
    for (const auto& [source, target] : wish.forks_after) {
      if (waits(source)) return;
    }
    const Step step = step_of(wish);
    if (!engine_.runner.pre_admit(step)) {
      ++tally.early_short;
      return;
    }
    const auto& results = engine_.runner.pre_plan(step, lease_of(wish, tally.steps + 1));
    early_id_ = results.get<AttentionPlan>("attention").id;
    if (!chance(early_random_, 10)) return;
    engine_.runner.clear_preplan();
    early_id_ = 0;
    ++tally.cleared;
  }
  void count_promotion(const PlanResults& results) {
    if (early_id_ == 0) return;
    const bool same = results.get<AttentionPlan>("attention").id == early_id_;
    ++(same ? tally.promoted : tally.stale);
    early_id_ = 0;
  }

  // --- the model forward of a step, on the other thread: reads nothing of the driver that changes

  void name_tokens(const Wish& wish) {
    new_tokens_.clear();
    label_tokens_.clear();
    for (const auto& segment : wish.segments) {
      auto& tokens = new_tokens_.emplace_back();
      for (int32_t i = 0; i < segment.span; ++i) tokens.push_back(next_token_++);
      auto& packed = label_tokens_[segment.name.second];
      packed.insert(packed.end(), tokens.begin(), tokens.end());
    }
  }
  void run_model() {
    for (const auto& [label, tokens] : label_tokens_) {
      std::vector<float> rows(tokens.size() * kLatent);
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        for (size_t i = 0; i < tokens.size(); ++i) {
          MiniEngine::fill_row(tokens[i], layer, &rows[i * kLatent]);
        }
        new_rows_.assign(rows);
        const auto view = new_rows_.view(std::array<int64_t, 2>{std::ssize(tokens), kLatent});
        engine_.kv.write(layer, label, columns(view, 0, MiniEngine::kRank),
                         columns(view, MiniEngine::kRank, MiniEngine::kRope));
        const MiniEngine::Output got = engine_.attend(label, 0, layer);
        for (const auto* values : {&got.out, &got.lse}) {
          for (const float value : *values) {
            outputs_ = (outputs_ ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3U;
          }
        }
      }
    }
  }

  // --- checks

  // Between steps: lengths, and every row of every stream in every layer.
  void compare() {
    std::vector<int64_t> slots;  // of all streams: a read takes a GPU as long whatever its size
    std::vector<Token> tokens;
    for (const auto& [name, stream] : model_.streams) {
      const int64_t length = engine_.kv.length(id(name));
      ASSERT_EQ(length, std::ssize(stream.tokens)) << name.first << " " << name.second;
      append_slots(slots, engine_.kv.pages(id(name)), length, kPageSize);
      tokens.insert(tokens.end(), stream.tokens.begin(), stream.tokens.end());
    }
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      rows_.assign(std::vector<float>(tokens.size() * kLatent));
      std::vector<float> wanted(tokens.size() * kLatent);
      engine_.pool.gather(layer, slots,
                          rows_.view(std::array<int64_t, 2>{std::ssize(tokens), kLatent}));
      for (size_t i = 0; i < tokens.size(); ++i) {
        MiniEngine::fill_row(tokens[i], layer, &wanted[i * kLatent]);
      }
      ASSERT_EQ(rows_.read(), wanted) << "layer " << layer;
    }
    const PageCounts has = engine_.kv.check(), wants = model_.counts();
    ASSERT_EQ(has.owned, wants.owned);
    ASSERT_EQ(has.shared, wants.shared);
    ASSERT_EQ(has.free + has.reserved, wants.free) << "an early step may hold some";
  }

  static constexpr int32_t kLatent = MiniEngine::kRank + MiniEngine::kRope;

  const bool ahead_;
  std::mt19937_64 random_, early_random_;
  MiniEngine engine_{{.num_pages = kPages,
                      .page_size = kPageSize,
                      .num_layers = kLayers,
                      .num_heads = kHeads,
                      .limits = {.max_rows = 16, .max_tokens = 128, .max_listed_pages = 256}}};
  KvModel model_;
  test::DeviceArray<float> new_rows_{test::test_device()};
  test::DeviceArray<float> rows_{test::test_device()};  // kept from one read to the next
  RunThread thread_;
  RequestId next_request_ = 1;
  Token next_token_ = 1;
  std::vector<StreamName> locked_;  // forked by the step in flight
  std::vector<std::vector<Token>> new_tokens_;
  std::map<std::string, std::vector<Token>> label_tokens_;
  uint64_t early_id_ = 0;
  uint64_t outputs_ = 0xcbf29ce484222325U;
};

TEST(StepStressProperty, PlanningAheadOnAnotherThreadChangesNothing) {
  for (const uint64_t seed : {1, 2}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int steps = num_steps() / 2;
    Driver ahead(seed, true), one_by_one(seed, false);
    ahead.run(steps);
    one_by_one.run(steps);
    if (HasFatalFailure()) return;
    const EndState a = ahead.end_state(), b = one_by_one.end_state();
    EXPECT_EQ(a.counts, b.counts);
    EXPECT_EQ(a.streams, b.streams);
    EXPECT_EQ(a.outputs, b.outputs) << "some step's attention differed";

    const Tally& tally = ahead.tally;
    RecordProperty("promoted", static_cast<int>(tally.promoted));
    EXPECT_EQ(tally.refused, one_by_one.tally.refused);
    // Each way was taken often enough to mean something.
    EXPECT_GT(tally.promoted, steps / 20);
    EXPECT_GT(tally.stale, steps / 50);
    EXPECT_GT(tally.cleared, steps / 50);
    EXPECT_GT(tally.early_short, steps / 200);
    EXPECT_GT(tally.refused, steps / 100);
    EXPECT_GT(tally.abandoned, steps / 100);
    EXPECT_GT(tally.forks, steps / 20);
    EXPECT_GT(tally.context_only, steps / 20);
  }
}

}  // namespace
}  // namespace mla::engine
