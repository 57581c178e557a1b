#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/kv_model.hpp"
#include "engine/kv_rows.hpp"
#include "mla/kv_resource.hpp"

namespace mla::engine {
namespace {

using StreamName = KvModel::StreamName;

constexpr size_t kMaxStreams = 6;

KvStream id(const StreamName& name) { return {name.first, name.second}; }

// Random calls on a small pool, each made on the resource and on the model; after each the two must
// agree and every row ever stored must still be there.
class Driver {
 public:
  Driver(uint64_t seed, int64_t num_pages, int32_t page_size)
      : random_(seed),
        page_size_(page_size),
        pool_(small_pool(num_pages, page_size)),
        kv_(pool_, {.check_every_call = true}),
        model_(num_pages, page_size) {}

  void run(int num_calls) {
    open("main");  // labels are numbered by first use; the model removes "main" first
    for (int i = 0; i < num_calls && !::testing::Test::HasFatalFailure(); ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      call();
      compare();
    }
    drain();
  }
  const KvModel::Tally& tally() const { return model_.tally; }

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  bool chance(uint64_t percent) { return below(100) < percent; }

  void call() {
    const uint64_t what = below(100);
    if (what < 50) return advance_step();
    if (what < 62) return open(chance(80) ? "main" : "draft");
    if (what < 70) return trim();
    if (what < 76) return fork();
    if (what < 86) return remove();
    if (what < 99) return add_keys();
    model_.drop_prefixes();
    kv_.drop_prefixes();
  }

  // The next call of the step protocol, or abandon.
  void advance_step() {
    if (phase_ == 0) return admit();
    if (chance(8)) {
      if (phase_ == 2 && chance(50)) write();  // rows of a step that then does not happen
      model_.abandon();
      kv_.abandon();
      phase_ = 0;
    } else if (phase_ == 1) {
      model_.plan();
      kv_.plan();
      compare_plan();
      phase_ = 2;
    } else {
      write();
      model_.commit(new_tokens_);
      kv_.commit();
      phase_ = 0;
    }
  }

  void admit() {
    std::vector<KvModel::Planned> planned;
    for (const auto& [name, stream] : model_.streams) {
      if (!chance(60)) continue;
      const auto longest = static_cast<uint64_t>(chance(30) ? 4 * page_size_ : page_size_);
      planned.push_back({name, static_cast<int32_t>(below(longest + 1))});
    }
    std::ranges::shuffle(planned, random_);
    std::vector<Segment> segments;
    for (const auto& p : planned) segments.push_back({p.name.first, p.name.second, p.span});

    const std::vector<int64_t> lacking = model_.admit(planned);
    const AdmitResult result = kv_.admit(segments);
    std::vector<int64_t> answered(planned.size(), 0);
    int64_t total = 0;
    for (const Shortage& shortage : result.shortages) {
      const auto segment = std::ranges::find_if(planned, [&](const auto& p) {
        return p.name == StreamName{shortage.request, shortage.label};
      });
      ASSERT_NE(segment, planned.end());
      answered[segment - planned.begin()] = shortage.pages;
      total += shortage.pages;
    }
    ASSERT_EQ(answered, lacking);
    ASSERT_EQ(result.pages_short, total);
    if (!result) return remove();  // as an engine would
    if (chance(20)) {
      ASSERT_TRUE(kv_.admit(segments)) << "admitted already";
    }
    choose_tokens();
    phase_ = 1;
  }

  // Prompt tokens as far as there are some, then new ones.
  void choose_tokens() {
    new_tokens_.clear();
    for (const auto& planned : model_.step) {
      const std::vector<Token>& stored = model_.streams.at(planned.name).tokens;
      const std::vector<Token>& prompt = prompts_[planned.name];
      std::vector<Token> tokens;
      for (size_t i = stored.size(); tokens.size() < static_cast<size_t>(planned.span); ++i) {
        tokens.push_back(i < prompt.size() ? prompt[i] : next_token_++);
      }
      new_tokens_.push_back(std::move(tokens));
    }
  }

  void write() {
    for (const char* label : {"main", "draft"}) {
      std::vector<Token> packed;
      bool planned = false;
      for (size_t s = 0; s < model_.step.size(); ++s) {
        if (model_.step[s].name.second != label) continue;
        planned = true;
        packed.insert(packed.end(), new_tokens_[s].begin(), new_tokens_[s].end());
      }
      if (planned) write_tokens(kv_, label, packed);
    }
  }

  void open(const std::string& label) {
    if (model_.streams.size() >= kMaxStreams) return;
    const StreamName name{next_request_++, label};
    std::vector<Token> prompt;
    if (!known_texts_.empty() && chance(70)) {  // the start of a known text, or all of it
      prompt = known_texts_[below(known_texts_.size())];
      if (chance(40)) prompt.resize(below(prompt.size() + 1));
    }
    if (chance(60)) {
      for (uint64_t i = below(3 * page_size_); i > 0; --i) prompt.push_back(next_token_++);
    }
    std::vector<PageKey> keys;
    if (chance(85)) keys = keys_of(prompt, page_size_);
    ASSERT_EQ(kv_.open(id(name), static_cast<int64_t>(prompt.size()), keys),
              model_.open(name, prompt, keys));
    prompts_[name] = prompt;
    if (!prompt.empty()) known_texts_.push_back(std::move(prompt));
    if (known_texts_.size() > 6) known_texts_.erase(known_texts_.begin());
  }

  // A stream outside the step; false where there is none.
  bool pick(StreamName& name) {
    std::vector<StreamName> names;
    for (const auto& [candidate, stream] : model_.streams) {
      if (!model_.in_step(candidate)) names.push_back(candidate);
    }
    if (names.empty()) return false;
    name = names[below(names.size())];
    return true;
  }

  void trim() {
    StreamName name;
    if (!pick(name)) return;
    const auto num_tokens = below(model_.streams.at(name).tokens.size() + 1);
    model_.trim(name, num_tokens);
    kv_.trim(id(name), static_cast<int64_t>(num_tokens));
    if (num_tokens > 0) prompts_[name].resize(0);  // it goes on with other tokens
  }

  void fork() {
    StreamName source;
    if (!pick(source) || model_.streams.size() >= kMaxStreams) return;
    StreamName target{next_request_, chance(80) ? "main" : "draft"};
    if (chance(50)) target = {source.first, source.second == "main" ? "draft" : "main"};
    if (model_.streams.contains(target)) return;
    ++next_request_;
    model_.fork(source, target);
    kv_.fork(id(source), id(target));
    prompts_[target] = {};
  }

  void remove() {
    StreamName name;
    if (!pick(name)) return;
    for (const char* label : {"main", "draft"}) {
      if (model_.in_step({name.first, label})) return;
    }
    const std::vector<Token>& tokens = model_.streams.at(name).tokens;
    if (!tokens.empty()) known_texts_.push_back(tokens);
    model_.remove(name.first);
    kv_.remove(name.first);
  }

  void add_keys() {
    StreamName name;
    if (!pick(name)) return;
    KvModel::Stream& stream = model_.streams.at(name);
    const auto keys = keys_of(stream.tokens, page_size_);
    if (keys.size() <= stream.keys.size()) return;
    kv_.add_page_keys(id(name), std::span(keys).subspan(stream.keys.size()));
    stream.keys = keys;
  }

  void compare() {
    ASSERT_EQ(kv_.check(), model_.counts());
    std::map<int32_t, const void*> page_of_number;
    std::map<const void*, int32_t> number_of_page;
    std::vector<int64_t> slots;  // of all streams: a read takes a GPU as long whatever its size
    std::vector<Token> tokens;
    for (const auto& [name, stream] : model_.streams) {
      SCOPED_TRACE("request " + std::to_string(name.first) + " " + name.second);
      const auto pages = kv_.pages(id(name));
      ASSERT_EQ(kv_.length(id(name)), static_cast<int64_t>(stream.tokens.size()));
      ASSERT_EQ(pages.size(), stream.pages.size());
      for (size_t i = 0; i < pages.size(); ++i) {  // shared in the one where in the other
        const void* page = stream.pages[i].get();
        ASSERT_EQ(page_of_number.try_emplace(pages[i], page).first->second, page);
        ASSERT_EQ(number_of_page.try_emplace(page, pages[i]).first->second, pages[i]);
      }
      append_slots(slots, pages, kv_.length(id(name)), page_size_);
      tokens.insert(tokens.end(), stream.tokens.begin(), stream.tokens.end());
    }
    for (int32_t layer = 0; layer < 2; ++layer) {
      ASSERT_EQ(read_slots(pool_, slots, layer, rows_), tokens);
    }
  }

  void compare_plan() {
    for (const char* label : {"main", "draft"}) {
      std::vector<int32_t> qo_indptr{0};
      std::vector<int32_t> kv_indptr{0};
      std::vector<int32_t> kv_indices;
      std::vector<int32_t> kv_len;
      std::vector<int64_t> slots;
      for (const auto& planned : model_.step) {
        if (planned.name.second != label) continue;
        const auto start = kv_.length(id(planned.name));
        const auto pages = kv_.pages(id(planned.name));
        for (int64_t token = start; token < start + planned.span; ++token) {
          slots.push_back(int64_t{pages[token / page_size_]} * page_size_ + token % page_size_);
        }
        kv_indices.insert(kv_indices.end(), pages.begin(), pages.end());
        qo_indptr.push_back(static_cast<int32_t>(slots.size()));
        kv_indptr.push_back(static_cast<int32_t>(kv_indices.size()));
        kv_len.push_back(static_cast<int32_t>(start + planned.span));
      }
      if (kv_len.empty()) continue;
      const LabelPlan& plan = kv_.label_plan(label);
      ASSERT_TRUE(std::ranges::equal(plan.qo_indptr, qo_indptr));
      ASSERT_TRUE(std::ranges::equal(plan.kv_indptr, kv_indptr));
      ASSERT_TRUE(std::ranges::equal(plan.kv_indices, kv_indices));
      ASSERT_TRUE(std::ranges::equal(plan.kv_len, kv_len));
      ASSERT_TRUE(std::ranges::equal(plan.slots, slots));
    }
  }

  // Everything is given back in the end.
  void drain() {
    if (phase_ != 0) kv_.abandon();
    for (const auto& [name, stream] : model_.streams) {
      if (kv_.contains(id(name))) kv_.remove(name.first);
    }
    kv_.drop_prefixes();
    EXPECT_EQ(kv_.free_pages(), kv_.num_pages());
  }

  std::mt19937_64 random_;
  int32_t page_size_;
  LatentPool pool_;
  KvResource kv_;
  KvModel model_;
  test::DeviceArray<float> rows_{pool_.config().device};  // kept from one read to the next
  int phase_ = 0;                                         // 0: no step, 1: admitted, 2: planned
  std::vector<std::vector<Token>> new_tokens_;
  std::map<StreamName, std::vector<Token>> prompts_;
  std::vector<std::vector<Token>> known_texts_;
  RequestId next_request_ = 1;
  Token next_token_ = 1;
};

TEST(KvResourceProperty, RandomCallsAgreeWithAPlainModel) {
  KvModel::Tally sum;
  for (const int32_t page_size : {1, 2, 3, 16}) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      const auto num_pages = static_cast<int64_t>(6 + 3 * seed);
      SCOPED_TRACE("page size " + std::to_string(page_size) + ", seed " + std::to_string(seed) +
                   ", pages " + std::to_string(num_pages));
      Driver driver(seed, num_pages, page_size);
      driver.run(6000);
      if (HasFatalFailure()) return;
      const KvModel::Tally& tally = driver.tally();
      sum.copies += tally.copies;
      sum.last_holders += tally.last_holders;
      sum.evictions += tally.evictions;
      sum.forgotten += tally.forgotten;
      sum.merged += tally.merged;
      sum.matched += tally.matched;
      sum.refusals += tally.refusals;
    }
  }
  // Each of the rarer ways was taken often enough to mean something.
  EXPECT_GT(sum.copies, 1000);
  EXPECT_GT(sum.last_holders, 100);
  EXPECT_GT(sum.evictions, 1000);
  EXPECT_GT(sum.forgotten, 10);
  EXPECT_GT(sum.merged, 100);
  EXPECT_GT(sum.matched, 1000);
  EXPECT_GT(sum.refusals, 1000);
}

}  // namespace
}  // namespace mla::engine
