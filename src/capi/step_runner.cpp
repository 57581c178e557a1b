#include "mla/step_runner.hpp"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "capi/attention_resource.hpp"
#include "capi/error.hpp"
#include "capi/from_c.hpp"
#include "capi/kv_resource.hpp"
#include "capi/step.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

namespace {

/// The resources of a runner, which it keeps alive.
struct Resources {
  std::vector<std::shared_ptr<SharedKv>> kv;
  std::vector<std::shared_ptr<SharedAttention>> attention;

  std::vector<mla::Resource*> list() const {
    std::vector<mla::Resource*> all;
    all.reserve(kv.size() + attention.size());
    for (const auto& shared : kv) all.push_back(&shared->kv);
    for (const auto& shared : attention) all.push_back(&shared->attention);
    return all;
  }
  void set_has_runner(bool has) const {
    for (const auto& shared : kv) shared->has_runner = has;
    for (const auto& shared : attention) shared->has_runner = has;
  }
};

}  // namespace

struct mla_step_runner  // NOLINT(readability-identifier-naming): declared by mla_engine.h
    : Handle<mla_step_runner> {
  static constexpr const char* kName = "mla_step_runner";
  explicit mla_step_runner(Resources given)
      : resources(std::move(given)), runner(resources.list()) {
    resources.set_has_runner(true);
  }
  ~mla_step_runner() {
    try {
      runner.clear_preplan();
      runner.abandon();
    } catch (...) {  // there was no step in flight
    }
    resources.set_has_runner(false);
  }

  Resources resources;
  mla::StepRunner runner;
  // The last answer.
  mla::AdmitResult answer;
  std::vector<mla_shortage> shortages;
};

namespace {

// The resources behind handles; each may have one runner.
template <class T, class Shared>
void add_resources(T* const* handles, int64_t count, const std::string& list,
                   std::vector<std::shared_ptr<Shared>>& shared, const char* where) {
  const auto given = array_from_c(handles, count, list.c_str(), where);
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string name = list + "[" + std::to_string(i) + "]";
    shared.push_back(handle_from_c(given[i], name.c_str(), where).shared);
    if (!shared.back()->has_runner) continue;
    mla::throw_state({.what = name,
                      .where = where,
                      .expected = "a resource that no living runner has",
                      .got = "one that has a runner"});
  }
}

Resources resources_from_c(const mla_step_runner_config* config, const char* where) {
  const mla_step_runner_config given = read_struct(config, "config", where);
  Resources resources;
  add_resources(given.kv_resources, given.num_kv_resources, "config.kv_resources", resources.kv,
                where);
  add_resources(given.attention_resources, given.num_attention_resources,
                "config.attention_resources", resources.attention, where);
  for (const auto& shared : resources.attention) {
    if (std::ranges::find(resources.kv, shared->kv) != resources.kv.end()) continue;
    mla::throw_invalid({.what = "config.attention_resources",
                        .where = where,
                        .expected = "each beside the KV resource that it was made for",
                        .got = "\"" + shared->attention.key() + "\" without it"});
  }
  return resources;
}

mla::SlotLease lease_from_c(const mla_lease* lease, const char* where) {
  if (lease == nullptr) return {};
  const mla_lease given = read_struct(lease, "lease", where);
  if (given.slot < 0) {
    mla::throw_invalid({.what = "lease.slot",
                        .where = where,
                        .expected = "0 or more",
                        .got = std::to_string(given.slot)});
  }
  mla::SlotLease read{.slot = given.slot, .bucket = std::nullopt};
  const auto shape = bucket_from_c(given.bucket_rows, given.bucket_tokens, "lease", where);
  if (shape) {
    read.bucket = mla::GraphBucket{.walk = name_from_c(given.walk, ""), .shape = *shape};
  } else if (given.walk != nullptr) {
    mla::throw_invalid({.what = "lease.walk",
                        .where = where,
                        .expected = "null, since there is no bucket",
                        .got = given.walk});
  }
  return read;
}

mla_step_runner& runner_from_c(mla_step_runner* runner, const char* where) {
  return handle_from_c(runner, "runner", where);
}

const mla::Step& step_from_c(const mla_step* step, const char* where) {
  return handle_from_c(step, "step", where).step;
}

// Asks the runner and gives its answer to the caller, whose struct is in order before it is asked.
template <class Ask>
void answer_of(mla_step_runner& object, mla_admission* admission, const Ask& ask,
               const char* where) {
  not_null(admission, "admission", where);
  checked_struct_size(admission->struct_size, sizeof *admission, "admission", where);
  object.answer = ask();
  object.shortages.clear();
  for (const mla::Shortage& shortage : object.answer.shortages) {
    object.shortages.push_back(
        {.request = shortage.request, .label = shortage.label.c_str(), .pages = shortage.pages});
  }
  write_struct({.struct_size = 0,
                .pages_short = object.answer.pages_short,
                .shortages = object.shortages.data(),
                .num_shortages = static_cast<int64_t>(object.shortages.size())},
               admission, "admission", where);
}

}  // namespace

mla_status mla_step_runner_create(const mla_step_runner_config* config,
                                  mla_step_runner** runner) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_runner_create";
    not_null(runner, "runner", kWhere);
    *runner = std::make_unique<mla_step_runner>(resources_from_c(config, kWhere)).release();
  });
}

void mla_step_runner_destroy(mla_step_runner* runner) noexcept { destroy(runner); }

mla_status mla_step_runner_admit(mla_step_runner* runner, const mla_step* step,
                                 mla_admission* admission) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_runner_admit";
    mla_step_runner& object = runner_from_c(runner, kWhere);
    const mla::Step& wanted = step_from_c(step, kWhere);
    answer_of(
        object, admission, [&] { return object.runner.admit(wanted); }, kWhere);
  });
}

mla_status mla_step_runner_plan(mla_step_runner* runner, const mla_step* step,
                                const mla_lease* lease, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_runner_plan";
    mla_step_runner& object = runner_from_c(runner, kWhere);
    const mla::Step& wanted = step_from_c(step, kWhere);
    const mla::SlotLease into = lease_from_c(lease, kWhere);
    object.runner.plan(wanted, into, {.handle = stream});
  });
}

mla_status mla_step_runner_commit(mla_step_runner* runner) noexcept {
  return guard([&] { runner_from_c(runner, "mla_step_runner_commit").runner.commit(); });
}

mla_status mla_step_runner_abandon(mla_step_runner* runner) noexcept {
  return guard([&] { runner_from_c(runner, "mla_step_runner_abandon").runner.abandon(); });
}

mla_status mla_step_runner_pre_admit(mla_step_runner* runner, const mla_step* step,
                                     mla_admission* admission) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_runner_pre_admit";
    mla_step_runner& object = runner_from_c(runner, kWhere);
    const mla::Step& wanted = step_from_c(step, kWhere);
    answer_of(
        object, admission, [&] { return object.runner.pre_admit(wanted); }, kWhere);
  });
}

mla_status mla_step_runner_pre_plan(mla_step_runner* runner, const mla_step* step,
                                    const mla_lease* lease, void* stream) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_runner_pre_plan";
    mla_step_runner& object = runner_from_c(runner, kWhere);
    const mla::Step& wanted = step_from_c(step, kWhere);
    object.runner.pre_plan(wanted, lease_from_c(lease, kWhere), {.handle = stream});
  });
}

mla_status mla_step_runner_clear_preplan(mla_step_runner* runner) noexcept {
  return guard(
      [&] { runner_from_c(runner, "mla_step_runner_clear_preplan").runner.clear_preplan(); });
}

mla_status mla_step_runner_early_label_plan(const mla_step_runner* runner, const char* kv_key,
                                            const char* label, mla_label_plan* plan) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_runner_early_label_plan";
    const mla_step_runner& object = handle_from_c(runner, "runner", kWhere);
    const auto& labels =
        object.runner.early_results().get<mla::KvPlan>(name_from_c(kv_key, "kv")).labels;
    const std::string_view wanted = name_from_c(label, kMainLabel);
    const auto found = std::ranges::find(labels, wanted, &mla::LabelPlan::label);
    if (found == labels.end()) {
      mla::throw_invalid({.what = "label",
                          .where = kWhere,
                          .expected = "a label that the early step plans",
                          .got = "\"" + std::string(wanted) + "\""});
    }
    write_label_plan(*found, plan, kWhere);
  });
}

mla_status mla_step_runner_order_replay(mla_step_runner* runner, void* stream) noexcept {
  return guard(
      [&] { runner_from_c(runner, "mla_step_runner_order_replay").runner.order_replay({stream}); });
}

mla_status mla_step_runner_size_graph_buffers(mla_step_runner* runner,
                                              const mla_graph_shape* shapes,
                                              int64_t num_shapes) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_runner_size_graph_buffers";
    mla_step_runner& object = runner_from_c(runner, kWhere);
    std::vector<mla::GraphShape> wanted;
    for (const mla_graph_shape& shape : array_from_c(shapes, num_shapes, "shapes", kWhere)) {
      wanted.push_back({.num_rows = shape.num_rows,
                        .num_tokens = shape.num_tokens,
                        .num_listed_pages = shape.num_listed_pages});
    }
    object.runner.size_graph_buffers(wanted);
  });
}

int32_t mla_step_runner_force_double_buffer(const mla_step_runner* runner) noexcept {
  return is_handle(runner) && runner->runner.force_double_buffer() ? 1 : 0;
}
