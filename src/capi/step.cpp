#include "capi/step.hpp"

#include <memory>
#include <utility>

#include "capi/error.hpp"
#include "capi/from_c.hpp"

using namespace mla::capi;  // NOLINT(google-build-using-namespace): C calls live in no namespace

std::string_view mla_step::keep(const char* name) {
  const auto known = names.find(std::string_view(name));
  return known != names.end() ? *known : *names.emplace(name).first;
}

namespace {

std::string entry(const std::string& list, size_t i, const char* field) {
  return list + "[" + std::to_string(i) + "]" + field;
}

mla::KvStream keep(mla_step& step, const mla_kv_stream& stream) {
  return {.request = stream.request, .label = step.keep(name_from_c(stream.label, kMainLabel))};
}

void read_forks(mla_step& step, std::span<const mla_fork> forks, std::vector<mla::Fork>& read) {
  read.clear();
  for (const mla_fork& fork : forks) {
    read.push_back({.source = keep(step, fork.source), .target = keep(step, fork.target)});
  }
}

void read_labels(mla_step& step, std::span<const char* const> labels,
                 std::vector<std::string_view>& read) {
  read.clear();
  for (const char* label : labels) read.push_back(step.keep(name_from_c(label, kMainLabel)));
}

void read_kv_step(mla_step& step, const mla_kv_step& given, const char* where) {
  mla::KvStep& read = step.kv;
  read.segments.clear();
  for (const mla_segment& segment :
       array_from_c(given.segments, given.num_segments, "part.segments", where)) {
    read.segments.push_back({.request = segment.request,
                             .label = step.keep(name_from_c(segment.label, kMainLabel)),
                             .span = segment.span});
  }
  read_forks(step,
             array_from_c(given.forks_before, given.num_forks_before, "part.forks_before", where),
             read.forks_before);
  read_forks(step,
             array_from_c(given.forks_after, given.num_forks_after, "part.forks_after", where),
             read.forks_after);
  read_labels(step, array_from_c(given.labels, given.num_labels, "part.labels", where),
              read.labels);
  read.combined.clear();
  const auto groups = array_from_c(given.combined, given.num_combined, "part.combined", where);
  for (size_t i = 0; i < groups.size(); ++i) {
    mla::CombinedLabel& combined = read.combined.emplace_back();
    combined.name =
        step.keep(&not_null(groups[i].name, entry("part.combined", i, ".name").c_str(), where));
    const std::string labels = entry("part.combined", i, ".labels");
    read_labels(step, array_from_c(groups[i].labels, groups[i].num_labels, labels.c_str(), where),
                combined.labels);
  }
}

void read_segments(mla_step& step, std::span<const mla_query_segment> given,
                   const std::string& list, std::vector<mla::QuerySegment>& read,
                   const char* where) {
  for (size_t i = 0; i < given.size(); ++i) {
    mla::QuerySegment& segment = read.emplace_back();
    segment.label = step.keep(name_from_c(given[i].label, kMainLabel));
    segment.num_queries = given[i].num_queries;
    if (given[i].limit_appended == 1) {
      segment.num_appended = given[i].num_appended;
    } else if (given[i].limit_appended != 0) {
      flag_from_c(given[i].limit_appended, entry(list, i, ".limit_appended").c_str(), where);
    } else if (given[i].num_appended != 0) {
      mla::throw_invalid({.what = entry(list, i, ".num_appended"),
                          .where = where,
                          .expected = "0, since limit_appended is 0",
                          .got = std::to_string(given[i].num_appended)});
    }
  }
}

void read_passes(mla_step& step, const mla_attention_step& given, const char* where) {
  std::vector<mla::AttentionPass>& read = step.attention.passes;
  read.clear();
  const auto passes = array_from_c(given.passes, given.num_passes, "part.passes", where);
  for (size_t i = 0; i < passes.size(); ++i) {
    const auto name = [i](const char* field) { return entry("part.passes", i, field); };
    mla::AttentionPass& pass = read.emplace_back();
    pass.causal = flag_from_c(passes[i].causal, name(".causal").c_str(), where);
    pass.context_only = flag_from_c(passes[i].context_only, name(".context_only").c_str(), where);
    const std::string list = name(".segments");
    read_segments(step,
                  array_from_c(passes[i].segments, passes[i].num_segments, list.c_str(), where),
                  list, pass.segments, where);
  }
  if (read.empty()) read.emplace_back();
}

}  // namespace

mla_status mla_step_create(mla_step** step) noexcept {
  return guard([&] {
    not_null(step, "step", "mla_step_create");
    *step = std::make_unique<mla_step>().release();
  });
}

void mla_step_destroy(mla_step* step) noexcept { destroy(step); }

mla_status mla_step_set_kv(mla_step* step, const char* key, const mla_kv_step* part) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_set_kv";
    mla_step& object = handle_from_c(step, "step", kWhere);
    read_kv_step(object, read_struct(part, "part", kWhere), kWhere);
    std::swap(object.step.part<mla::KvStep>(name_from_c(key, "kv")), object.kv);
  });
}

mla_status mla_step_set_attention(mla_step* step, const char* key,
                                  const mla_attention_step* part) noexcept {
  return guard([&] {
    constexpr const char* kWhere = "mla_step_set_attention";
    mla_step& object = handle_from_c(step, "step", kWhere);
    read_passes(object, read_struct(part, "part", kWhere), kWhere);
    std::swap(object.step.part<mla::AttentionStep>(name_from_c(key, "attention")),
              object.attention);
  });
}
