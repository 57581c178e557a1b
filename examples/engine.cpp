// A miniature serving engine: continuous batching, and a draft model whose proposals the main model
// verifies. A round is a draft step and a verify step; then the rows of rejected drafts are taken
// back. While a step runs, the next one is planned. Read Engine::serve first, then run_step.
//
//   engine [cuda] [DRAFTS [PAGES [SEED]]]   prints what happened; exit status 1 if a page was lost
#include <algorithm>
#include <array>
#include <deque>
#include <future>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "mla/mla.hpp"
#include "stand_in_model.hpp"

constexpr int32_t kPageSize = 4, kLayers = 3;
constexpr int64_t kHeads = 4, kRank = 16, kRope = 8, kLatent = 24;
constexpr auto kFloat = mla::DType::kFloat32;
constexpr float kSmScale = 0.204124F;  // 24^-0.5, of the head before it is absorbed

// The streams of a request, and the steps of a round: each appends to one of them.
constexpr std::string_view kDraft = "draft", kMain = "main";
constexpr std::array kLabels{kDraft, kMain};

// Where a request stands: all that planning needs to know of it.
struct Request {
  mla::RequestId id = 0;
  int32_t arrival = 0;     // the round in which it comes
  int32_t num_wanted = 0;  // tokens at which it is finished
  int32_t num_tokens = 0;  // of its prompt, and generated
  int32_t num_stored = 0;  // of these, in the cache
  int32_t num_drafts = 0;  // that the round adds to them

  int32_t num_rows() const { return num_tokens - num_stored + num_drafts; }  // that it appends
  // Drafts leave room for one token that the main model adds.
  void begin_round(int32_t max_drafts) {
    num_drafts = std::min(max_drafts, num_wanted - num_tokens - 1);
  }
  void end_round(int32_t num_accepted) {
    num_stored = num_tokens + num_accepted;
    num_tokens = num_stored + 1;
  }
};

bool is_finished(const Request& request) { return request.num_tokens == request.num_wanted; }

class Engine {
 public:
  std::map<std::string, int64_t> counts;  // what happened
  std::vector<std::vector<int>> texts;    // by request: its tokens, then the round's drafts

  Engine(mla::Device device, int32_t max_drafts, int64_t num_pages)
      : device_(device),
        max_drafts_(max_drafts),
        pool_({.num_layers = kLayers,
               .num_pages = num_pages,
               .page_size = kPageSize,
               .kv_lora_rank = kRank,
               .qk_rope_head_dim = kRope,
               .dtype = kFloat,
               .device = device}),
        kv_(pool_),
        attention_(pool_, kv_.key(),
                   {.geometry = mla::AttentionResource::geometry_of(pool_, kHeads),
                    .sm_scale = kSmScale,
                    // A step's streams, tokens and page lists fit in the pool.
                    .limits = {num_pages, num_pages * kPageSize, num_pages},
                    .executor = std::make_shared<mla::Executor>(1)}),  // little work
        runner_({&kv_, &attention_}) {}

  // Serves requests, given in the order of their arrival; texts[id] holds each one's prompt.
  void serve(std::deque<Request> requests) {
    waiting_ = std::move(requests);
    for (; !waiting_.empty() || !running_.empty(); ++round_) {
      while (!is_full_ && !waiting_.empty() && waiting_.front().arrival <= round_) {
        for (const auto label : kLabels) kv_.open({waiting_.front().id, label});
        running_.push_back(waiting_.front());
        waiting_.pop_front();
      }
      if (running_.empty()) continue;
      for (Request& request : running_) request.begin_round(max_drafts_);
      for (const auto label : kLabels) run_step(label);
      end_round();
    }
    counts["pages lost"] = kv_.num_pages() - kv_.check().free;
  }

 private:
  void run_step(std::string_view label) {
    admit(steps_[slot_], label);
    const auto& plan = runner_.plan(steps_[slot_], {.slot = slot_}).get<mla::KvPlan>("kv");
    if (early_plan_) ++counts[plan.id == early_plan_ ? "plans promoted" : "plans stale"];
    // The stand-in model computes on the host, so another thread runs it. It changes only `texts`
    // and `said_`, which planning does not read.
    auto run = std::async(std::launch::async, [&] { label == kMain ? verify() : propose(); });
    plan_ahead(label);
    run.get();
    runner_.commit();
    slot_ = 1 - slot_;
    ++counts["steps"];
  }

  // Where pages are short, the request that came last gives way, to start again later. The one that
  // came first never does, so that all are served in the end.
  void admit(mla::Step& step, std::string_view label) {
    for (describe(step, label, running_); !runner_.admit(step); describe(step, label, running_)) {
      if (running_.size() == 1) throw std::runtime_error("too few pages for one request");
      Request& last = running_.back();
      ++counts[last.num_stored > 0 ? "times put back" : "times not started"];
      kv_.remove(last.id);
      last.num_stored = 0;
      waiting_.push_front(last);
      running_.pop_back();
      is_full_ = true;
    }
  }

  // Plans the next step. After a draft step that is the verify step, surely; the next round is a
  // guess: every draft is accepted, nobody starts. Where it is wrong, the library plans anew.
  void plan_ahead(std::string_view label) {
    std::vector<Request> expected = running_;
    if (label == kMain) {
      for (Request& request : expected) request.end_round(request.num_drafts);
      std::erase_if(expected, is_finished);
      for (Request& request : expected) request.begin_round(max_drafts_);
    }
    const int32_t slot = 1 - slot_;
    describe(steps_[slot], label == kMain ? kDraft : kMain, expected);
    early_plan_.reset();
    if (expected.empty() || !runner_.pre_admit(steps_[slot])) return;
    early_plan_ = runner_.pre_plan(steps_[slot], {.slot = slot}).get<mla::KvPlan>("kv").id;
  }

  // In a verify step every new row is a query. A draft step has a pass for each draft, in which
  // each request has one query, the row before that draft, and sees the rows up to it.
  void describe(mla::Step& step, std::string_view label, const std::vector<Request>& requests) {
    auto& segments = step.part<mla::KvStep>("kv").segments;
    auto& passes = step.part<mla::AttentionStep>("attention").passes;
    segments.clear();
    passes.assign(label == kMain ? 1 : std::max(1, max_drafts_), {});
    for (const Request& request : requests) {
      segments.push_back({request.id, label, request.num_rows()});
      const int32_t num_known = request.num_tokens - request.num_stored;
      for (int32_t i = 0; label == kDraft && i < std::ssize(passes); ++i) {
        passes[i].segments.push_back({label, 1, num_known + std::min(i, request.num_drafts)});
      }
    }
  }

  // The draft model is the main one's first layer, so that its cache rows follow from the tokens
  // alone: each pass writes all rows again, those of drafts to come with what no query sees.
  void propose() {
    for (const Request& r : running_) texts[r.id].resize(r.num_tokens + max_drafts_);
    for (int32_t pass = 0;; ++pass) {
      write(kDraft, 0, stand_in_embedding(new_tokens()));
      if (pass == max_drafts_) return;
      std::vector<int> tokens;
      for (const Request& r : running_) tokens.push_back(texts[r.id][r.num_tokens - 1 + pass]);
      Rows hidden = stand_in_embedding(tokens);
      attend(kDraft, 0, pass, hidden);
      tokens = stand_in_next_tokens(hidden);
      auto next = tokens.begin();
      for (const Request& r : running_) texts[r.id][r.num_tokens + pass] = *next++;
    }
  }

  void verify() {
    Rows hidden = stand_in_embedding(new_tokens());
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      write(kMain, layer, hidden);
      attend(kMain, layer, 0, hidden);
    }
    said_ = stand_in_next_tokens(hidden);
  }

  std::vector<int> new_tokens() const {  // of the step's rows, in the order of its segments
    std::vector<int> tokens;
    for (const Request& r : running_) {
      const auto begin = texts[r.id].begin() + r.num_stored;
      tokens.insert(tokens.end(), begin, begin + r.num_rows());
    }
    return tokens;
  }

  // A real model has its tensors on the device; these are copied there and back, and waited for.
  mla::DeviceMemory to_device(const Rows& rows) const {
    mla::DeviceMemory memory(device_, rows.size() * sizeof(float));
    memory.copy_from_host(rows.data(), memory.bytes());
    mla::synchronize(device_);
    return memory;
  }
  // Both take the hidden states of the rows that are written or that attend.
  void write(std::string_view label, int32_t layer, const Rows& hidden) {
    const int64_t n = std::ssize(hidden) / kHidden;
    const auto latents = to_device(stand_in_projection(hidden, kHidden, kLatent, 10 + 3 * layer));
    const auto rows = mla::contiguous_view(latents.data(), std::array{n, kLatent}, kFloat, device_);
    kv_.write(layer, label, mla::columns(rows, 0, kRank), mla::columns(rows, kRank, kRope));
    mla::synchronize(device_);
  }
  void attend(std::string_view label, int32_t layer, int32_t pass, Rows& hidden) {
    const int64_t n = std::ssize(hidden) / kHidden;
    const auto queries =
        to_device(stand_in_projection(hidden, kHidden, kHeads * kLatent, 11 + 3 * layer));
    Rows attended(n * kHeads * kRank);
    const auto results = to_device(attended);
    const auto q =
        mla::contiguous_view(queries.data(), std::array{n, kHeads, kLatent}, kFloat, device_);
    const auto out =
        mla::contiguous_view(results.data(), std::array{n, kHeads, kRank}, kFloat, device_);
    attention_.run({.q_nope = mla::columns(q, 0, kRank),
                    .q_pe = mla::columns(q, kRank, kRope),
                    .out = out,
                    .label = label,
                    .layer = layer,
                    .pass = pass});
    results.copy_to_host(attended.data(), results.bytes());
    mla::synchronize(device_);
    const Rows change = stand_in_projection(attended, kHeads * kRank, kHidden, 12 + 3 * layer);
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] += 0.25F * change[i];
  }

  // Keeps the drafts that the main model says too, and its own word after them; takes the rows of
  // the others back from both streams.
  void end_round() {
    const int* said = said_.data();
    for (Request& r : running_) {
      std::vector<int>& text = texts[r.id];
      said += r.num_tokens - r.num_stored - 1;  // said[n] is what follows n drafts
      int32_t accepted = 0;
      while (accepted < r.num_drafts && text[r.num_tokens + accepted] == said[accepted]) ++accepted;
      for (const auto label : kLabels) kv_.trim({r.id, label}, r.num_drafts - accepted);
      text.resize(r.num_tokens + accepted);
      text.push_back(said[accepted]);
      said += r.num_drafts + 1;
      counts["drafts accepted"] += accepted;
      counts["drafts rejected"] += r.num_drafts - accepted;
      counts["tokens generated"] += accepted + 1;
      r.end_round(accepted);
      if (is_finished(r)) kv_.remove(r.id);
      counts["requests finished"] += is_finished(r);
    }
    if (std::erase_if(running_, is_finished) > 0) is_full_ = false;
  }

  const mla::Device device_;  // of the pool and of every tensor
  const int32_t max_drafts_;
  mla::LatentPool pool_;  // of a draft stream's pages only layer 0 is used
  mla::KvResource kv_;
  mla::AttentionResource attention_;
  mla::StepRunner runner_;
  std::deque<Request> waiting_;         // in order of arrival,
  std::vector<Request> running_;        // and these came before
  std::array<mla::Step, 2> steps_;      // by slot: the one that runs, and the one planned early
  std::optional<uint64_t> early_plan_;  // the latter's id
  std::vector<int> said_;               // by the main model, after each row of the verify step
  int32_t round_ = 0, slot_ = 0;
  bool is_full_ = false;  // pages ran out, and no request finished since
};

int main(int argc, char** argv) try {
  const bool on_gpu = argc > 1 && std::string_view(argv[1]) == "cuda";
  if (on_gpu) --argc, ++argv;
  const mla::Device device{on_gpu ? mla::DeviceKind::kCuda : mla::DeviceKind::kCpu};
  const int num_drafts = argc > 1 ? std::stoi(argv[1]) : 3;
  if (num_drafts < 0 || num_drafts > 64) throw std::invalid_argument("DRAFTS: expected 0 to 64");
  Engine engine(device, num_drafts, argc > 2 ? std::stoll(argv[2]) : 48);
  std::mt19937_64 random(argc > 3 ? std::stoull(argv[3]) : 1);
  const auto below = [&](int limit) { return static_cast<int32_t>(random() % limit); };
  std::deque<Request> requests;
  for (int32_t id = 0; id < 16; ++id) {
    const int32_t num_prompt = 4 + below(40), num_wanted = num_prompt + 8 + below(24);
    requests.push_back({mla::RequestId(id), 3 * id, num_wanted, num_prompt});
    for (int& token : engine.texts.emplace_back(num_prompt)) token = below(kVocab);
  }
  engine.serve(requests);
  uint64_t digest = 0;
  for (const std::vector<int>& text : engine.texts) {
    for (const int token : text) digest = digest * 1099511628211U + token + 1;
  }
  for (const auto& [name, count] : engine.counts) std::cout << name << ": " << count << "\n";
  std::cout << "digest of the texts: " << digest << "\n";
  return engine.counts["pages lost"] == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "engine: " << error.what() << "\n";
  return 1;
}
