/* A small engine in C: two requests in chunks, decode steps planned ahead, forks, rejected tokens,
 * a pool that is too small, prefixes, removal. */
#include <string.h>

#include "check.h"
#include "engine.h"
#include "mla/mla_engine.h"

static void create_engine(void) {
  const mla_pool_config pool_config = {.struct_size = sizeof pool_config,
                                       .num_layers = LAYERS,
                                       .page_size = PAGE,
                                       .num_pages = PAGES,
                                       .kv_lora_rank = RANK,
                                       .qk_rope_head_dim = ROPE,
                                       .dtype = MLA_FLOAT32};
  const mla_kv_options kv_options = {.struct_size = sizeof kv_options, .check_every_call = 1};
  const mla_attention_options options = {.struct_size = sizeof options,
                                         .num_heads = HEADS,
                                         .sm_scale = kScale,
                                         .max_rows = 8,
                                         .max_tokens = MAX_TOKENS,
                                         .max_listed_pages = 64};
  mla_step_runner_config config = {.struct_size = sizeof config};
  mla_pool* pool = NULL;
  mla_kv_resource* second = NULL;
  mla_step_runner* second_runner = NULL;
  OK(mla_pool_create(&pool_config, &pool));
  OK(mla_kv_resource_create(pool, &kv_options, &kv));
  NOT_NOW(mla_kv_resource_create(pool, NULL, &second), "pool");
  mla_pool_destroy(pool); /* the resource keeps it */
  OK(mla_attention_resource_create(kv, &options, &attention));
  config.attention_resources = &attention;
  config.num_attention_resources = 1;
  REFUSED(mla_step_runner_create(&config, &runner), "the KV resource that it was made for");
  config.kv_resources = &kv;
  config.num_kv_resources = 1;
  OK(mla_step_runner_create(&config, &runner));
  NOT_NOW(mla_step_runner_create(&config, &second_runner), "config.kv_resources[0]");
  OK(mla_step_create(&steps[0]));
  OK(mla_step_create(&steps[1]));
  CHECK(second == NULL && second_runner == NULL);
  CHECK(strlen(mla_attention_resource_kernel(attention)) > 0);
  CHECK(mla_attention_resource_uses_kernel(attention) == 1);
  CHECK(mla_step_runner_force_double_buffer(runner) == 0);
}

static void open_stream(const stream* s) {
  int64_t stored = -1;
  OK(mla_kv_resource_open(kv, name_of(s), 0, NULL, 0, &stored));
  CHECK(stored == 0);
}

static void check_length(const stream* s) {
  int64_t length = -1, num_pages = -1;
  const int32_t* pages = NULL;
  OK(mla_kv_resource_length(kv, name_of(s), &length));
  CHECK(length == s->num_rows);
  OK(mla_kv_resource_pages(kv, name_of(s), &pages, &num_pages));
  CHECK(num_pages == (length + PAGE - 1) / PAGE);
}

static void prompts_in_chunks(stream* one, stream* two) {
  const part first[] = {{one, 5}, {two, 3}};
  const part second[] = {{two, 4}, {one, 4}};
  open_stream(one);
  open_stream(two);
  REFUSED(mla_kv_resource_open(kv, name_of(one), 0, NULL, 0, NULL), "which is");
  serve(first, 2);
  serve(second, 2);
  check_length(one);
  check_length(two);
}

static void views_and_arrays_say_where_rows_land(stream* one, stream* two) {
  const part parts[] = {{two, 2}, {one, 1}};
  mla_label_plan plan = {.struct_size = sizeof plan};
  mla_kv_view view = {.struct_size = sizeof view};
  mla_tensor buffer, hidden, last;
  float states[3] = {10, 11, 12}, selected[2] = {0, 0};
  int row;
  NOT_NOW(mla_kv_resource_label_plan(kv, NULL, &plan), "a planned step");
  fill_step(steps[0], parts, 2);
  admit_and_plan(steps[0], 0);
  OK(mla_kv_resource_label_plan(kv, "main", &plan));
  CHECK(strcmp(plan.label, "main") == 0 && plan.num_rows == 2 && plan.num_new_rows == 3);
  CHECK(plan.qo_indptr[1] == 2 && plan.qo_indptr[2] == 3 && plan.num_slots == 3);
  for (row = 0; row < 2; ++row) {
    const stream* s = parts[row].of;
    const int64_t at = plan.qo_indptr[row];
    OK(mla_label_plan_view(&plan, row, &view));
    CHECK(view.request == s->request && strcmp(view.label, "main") == 0);
    CHECK(view.start == s->num_rows && view.to_compute == parts[row].span);
    CHECK(view.length == plan.kv_len[row] && view.length == view.start + view.to_compute);
    CHECK(view.num_pages == plan.kv_indptr[row + 1] - plan.kv_indptr[row]);
    CHECK(view.pages[0] == plan.kv_indices[plan.kv_indptr[row]]);
    CHECK(plan.slots[at] == view.pages[view.start / PAGE] * PAGE + view.start % PAGE);
    CHECK(plan.kv_last_page_len[row] == (view.length - 1) % PAGE + 1);
  }
  REFUSED(mla_label_plan_view(&plan, 2, &view), "row: expected 0 to num_rows - 1 = 1, got 2");
  REFUSED(mla_kv_resource_label_plan(kv, "draft", &plan), "\"draft\"");
  OK(mla_attention_resource_qo_indptr_buf(attention, NULL, 0, &buffer));
  CHECK(memcmp(buffer.data, plan.qo_indptr, 3 * sizeof(int32_t)) == 0);
  OK(mla_attention_resource_kv_len_buf(attention, NULL, 0, &buffer));
  CHECK(memcmp(buffer.data, plan.kv_len, 2 * sizeof(int32_t)) == 0);
  OK(mla_kv_resource_slots_buf(kv, NULL, &buffer, NULL));
  CHECK(buffer.shape[0] == plan.num_slots);
  CHECK(memcmp(buffer.data, plan.slots, plan.num_slots * sizeof(int64_t)) == 0);
  REFUSED(mla_kv_resource_slots_buf(kv, "draft", &buffer, NULL), "\"draft\"");
  hidden = tensor(states, 2, 3, 1, 0);
  last = tensor(selected, 2, 2, 1, 0);
  OK(mla_attention_resource_select_last_hidden(attention, NULL, 0, &hidden, &last, NULL));
  CHECK(selected[0] == 11 && selected[1] == 12);
  write_and_check(parts, 2);
  OK(mla_step_runner_commit(runner));
}

static void decode_is_planned_ahead(stream* one, stream* two) {
  const part parts[] = {{one, 1}, {two, 1}};
  mla_admission answer = {.struct_size = sizeof answer};
  mla_label_plan early = {.struct_size = sizeof early};
  mla_label_plan now = {.struct_size = sizeof now};
  const mla_lease same = slot_of(0), other = slot_of(1);
  int n;
  fill_step(steps[0], parts, 2);
  admit_and_plan(steps[0], 0);
  for (n = 0; n < 6; ++n) {
    const int32_t slot = n % 2;
    mla_step* next = steps[1 - slot];
    const mla_lease lease = slot_of(1 - slot);
    fill_step(next, parts, 2);
    NOT_NOW(mla_step_runner_early_label_plan(runner, NULL, NULL, &early), "a pre-planned one");
    OK(mla_step_runner_pre_admit(runner, next, &answer));
    CHECK(answer.pages_short == 0);
    OK(mla_step_runner_pre_plan(runner, next, &lease, NULL));
    OK(mla_step_runner_early_label_plan(runner, "kv", NULL, &early));
    CHECK(early.kv_len[0] == one->num_rows + 2);
    write_and_check(parts, 2); /* the plan in use is not disturbed */
    OK(mla_step_runner_commit(runner));
    admit_and_plan(next, 1 - slot);
    OK(mla_kv_resource_label_plan(kv, NULL, &now));
    CHECK(now.kv_indices == early.kv_indices); /* promoted: not laid out again */
  }
  /* A pre-plan into the slot in use is refused and the early step dropped; one may be cleared. */
  fill_step(steps[1], parts, 2);
  OK(mla_step_runner_pre_admit(runner, steps[1], &answer));
  REFUSED(mla_step_runner_pre_plan(runner, steps[1], &same, NULL), "slot 0");
  OK(mla_step_runner_pre_admit(runner, steps[1], &answer));
  OK(mla_step_runner_pre_plan(runner, steps[1], &other, NULL));
  OK(mla_step_runner_clear_preplan(runner));
  NOT_NOW(mla_step_runner_early_label_plan(runner, NULL, NULL, &early), "a pre-planned one");
  write_and_check(parts, 2);
  OK(mla_step_runner_commit(runner));
}

static void rejected_tokens_are_taken_back(stream* one, stream* two) {
  const part drafted[] = {{one, 4}, {two, 1}};
  const part next[] = {{one, 1}};
  serve(drafted, 2);
  REFUSED(mla_kv_resource_trim(kv, name_of(one), one->num_rows + 1), "the tokens stored");
  OK(mla_kv_resource_trim(kv, name_of(one), 3));
  one->num_rows -= 3;
  check_length(one);
  serve(next, 1);
}

/* Forks at once, at a step's plan and at its commit; two labels packed as one plan. */
static void forks_share_pages_until_they_append(stream* one) {
  stream copy = *one, draft = *one, late = *one;
  const char* packed[] = {"main", "draft"};
  const mla_combined_label both = {"both", packed, 2};
  mla_fork before, after;
  mla_segment segments[2];
  mla_kv_step kv_part = {.struct_size = sizeof kv_part};
  const mla_attention_step plain = {.struct_size = sizeof plain};
  mla_page_counts counts = {.struct_size = sizeof counts};
  int32_t is_open = -1;
  part parts[2], grown[3];
  wanted rows[2];
  copy.request = 5;
  draft.label = "draft";
  late.request = 6;
  OK(mla_kv_resource_fork(kv, name_of(one), name_of(&copy)));
  OK(mla_kv_resource_check(kv, &counts));
  CHECK(counts.shared == (one->num_rows + PAGE - 1) / PAGE && counts.reserved == 0);

  before.source = name_of(one);
  before.target = name_of(&draft);
  after.source = name_of(&draft);
  after.target = name_of(&late);
  segments[0].request = draft.request;
  segments[0].label = "draft";
  segments[0].span = 2;
  segments[1].request = one->request;
  segments[1].label = NULL;
  segments[1].span = 1;
  kv_part.segments = segments;
  kv_part.num_segments = 2;
  kv_part.forks_before = &before;
  kv_part.num_forks_before = 1;
  kv_part.forks_after = &after;
  kv_part.num_forks_after = 1;
  kv_part.combined = &both;
  kv_part.num_combined = 1;
  OK(mla_step_set_kv(steps[0], NULL, &kv_part));
  OK(mla_step_set_attention(steps[0], NULL, &plain));
  admit_and_plan(steps[0], 0);
  parts[0].of = one; /* label by label: "main" first, whatever the order of the segments */
  parts[0].span = 1;
  parts[1].of = &draft;
  parts[1].span = 2;
  write_new_rows("both", parts, 2);
  rows[0].keys = one->rows;
  rows[0].num_keys = one->num_rows;
  rows[0].num_queries = 1;
  rows[1].keys = draft.rows;
  rows[1].num_keys = draft.num_rows;
  rows[1].num_queries = 2;
  rows[0].causal = rows[1].causal = 1;
  check_attends("both", 0, rows, 2, 3);
  OK(mla_step_runner_commit(runner));

  memcpy(late.rows, draft.rows, sizeof late.rows);
  late.num_rows = draft.num_rows;
  check_length(&late);
  grown[0].of = &late;
  grown[1].of = &copy;
  grown[2].of = one;
  grown[0].span = grown[1].span = grown[2].span = 1;
  serve(grown, 3);
  OK(mla_kv_resource_remove(kv, 5));
  OK(mla_kv_resource_remove(kv, 6));
  OK(mla_kv_resource_contains(kv, name_of(&draft), &is_open));
  CHECK(is_open == 1);
  OK(mla_kv_resource_contains(kv, name_of(&late), &is_open));
  CHECK(is_open == 0);
  REFUSED(mla_kv_resource_remove(kv, 6), "a request with an open stream");
}

/* A context-only pass and a draft chain: passes over one stream that see other lengths of it. */
static void passes_see_as_much_as_they_are_told(stream* two) {
  const part parts[] = {{two, 2}};
  mla_query_segment context = {NULL, 1, 0, 0}, first = {"main", 1, 1, 1}, all = {NULL, 2, 0, 0};
  mla_attention_pass passes[3];
  mla_attention_step attention_part = {.struct_size = sizeof attention_part};
  mla_tensor lengths;
  wanted row;
  memset(passes, 0, sizeof passes);
  passes[0].context_only = 1;
  passes[0].segments = &context;
  passes[1].segments = &first;
  passes[2].segments = &all;
  passes[2].causal = 1;
  passes[0].num_segments = passes[1].num_segments = passes[2].num_segments = 1;
  attention_part.passes = passes;
  attention_part.num_passes = 3;
  fill_step(steps[0], parts, 1);
  OK(mla_step_set_attention(steps[0], NULL, &attention_part));
  first.limit_appended = 0; /* the step has a copy; and this would be refused */
  REFUSED(mla_step_set_attention(steps[0], NULL, &attention_part),
          "part.passes[1].segments[0].num_appended");
  admit_and_plan(steps[0], 0);
  OK(mla_attention_resource_kv_len_buf(attention, NULL, 0, &lengths));
  CHECK(*(const int32_t*)lengths.data == two->num_rows);
  write_new_rows(NULL, parts, 1);
  row.keys = two->rows;
  row.causal = 0;
  row.num_queries = 1;
  row.num_keys = two->num_rows - 2;
  check_attends(NULL, 0, &row, 1, 1);
  row.num_keys = two->num_rows - 1;
  check_attends(NULL, 1, &row, 1, 1);
  row.num_keys = two->num_rows;
  row.num_queries = 2;
  row.causal = 1;
  check_attends(NULL, 2, &row, 1, 2);
  OK(mla_step_runner_commit(runner));
}

static void a_bucket_pads_the_step(stream* one) {
  const part parts[] = {{one, 1}};
  const mla_graph_shape shape = {4, 8, 32}, larger = {5, 8, 32};
  mla_lease lease = {
      .struct_size = sizeof lease, .walk = "decode", .bucket_rows = 4, .bucket_tokens = 8};
  mla_admission answer = {.struct_size = sizeof answer};
  mla_attend_args args = {.struct_size = sizeof args, .layer_from_cursor = 1};
  mla_label_plan plan = {.struct_size = sizeof plan};
  mla_tensor buffer;
  wanted row;
  OK(mla_step_runner_size_graph_buffers(runner, &shape, 1));
  NOT_NOW(mla_step_runner_size_graph_buffers(runner, &larger, 1), "num_rows");
  fill_step(steps[0], parts, 1);
  OK(mla_step_runner_admit(runner, steps[0], &answer));
  lease.bucket_tokens = 0;
  REFUSED(mla_step_runner_plan(runner, steps[0], &lease, NULL), "lease.bucket_tokens");
  lease.bucket_rows = 0;
  REFUSED(mla_step_runner_plan(runner, steps[0], &lease, NULL), "lease.walk");
  lease.bucket_rows = 4;
  lease.bucket_tokens = 8;
  lease.slot = -1;
  REFUSED(mla_step_runner_plan(runner, steps[0], &lease, NULL), "lease.slot");
  lease.slot = 0;
  lease.bucket_rows = 5; /* refused by a resource: the step is abandoned */
  REFUSED(mla_step_runner_plan(runner, steps[0], &lease, NULL), "num_rows: expected 1 to 4");
  NOT_NOW(mla_step_runner_abandon(runner), "step");
  lease.bucket_rows = 4;
  OK(mla_step_runner_admit(runner, steps[0], &answer));
  OK(mla_step_runner_plan(runner, steps[0], &lease, NULL));
  OK(mla_step_runner_order_replay(runner, NULL));
  OK(mla_kv_resource_label_plan(kv, NULL, &plan));
  CHECK(plan.num_new_rows == 1 && plan.num_slots == 8 && plan.slots[7] == -1);
  OK(mla_attention_resource_qo_indptr_buf(attention, NULL, 0, &buffer));
  CHECK(buffer.shape[0] == 5);
  write_new_rows(NULL, parts, 1);
  row.keys = one->rows;
  row.num_keys = one->num_rows;
  row.num_queries = 1;
  row.causal = 1;
  check_attends(NULL, 0, &row, 1, 8);
  REFUSED(mla_attention_resource_set_cursor(attention, "main", LAYERS),
          "layer: expected 0 to 1, got 2");
  REFUSED(mla_attention_resource_set_cursor(attention, "guidance", 0), "\"guidance\"");
  OK(mla_attention_resource_set_cursor(attention, "main", LAYERS - 1));
  REFUSED(mla_attention_resource_run(attention, &args, NULL), "q_nope"); /* no tensors are given */
  OK(mla_step_runner_commit(runner));
}

static void a_shortage_names_who_lacks_pages(stream* one, stream* two) {
  const part parts[] = {{two, 1}, {one, PAGES * PAGE}};
  const part fits[] = {{two, 1}};
  mla_admission answer = {.struct_size = sizeof answer};
  const int64_t free_pages = mla_kv_resource_free_pages(kv);
  fill_step(steps[0], parts, 2);
  OK(mla_step_runner_admit(runner, steps[0], &answer));
  CHECK(answer.pages_short > 0 && answer.num_shortages == 1);
  CHECK(answer.shortages[0].request == one->request);
  CHECK(strcmp(answer.shortages[0].label, "main") == 0);
  CHECK(answer.shortages[0].pages == answer.pages_short);
  CHECK(mla_kv_resource_free_pages(kv) == free_pages);
  NOT_NOW(mla_step_runner_plan(runner, steps[0], NULL, NULL), "step");
  NOT_NOW(mla_step_runner_commit(runner), "step");
  NOT_NOW(mla_step_runner_abandon(runner), "step");
  /* An abandoned step leaves nothing. */
  fill_step(steps[0], fits, 1);
  admit_and_plan(steps[0], 0);
  OK(mla_step_runner_abandon(runner));
  check_length(two);
  CHECK(mla_kv_resource_free_pages(kv) == free_pages);
  serve(fits, 1);
}

/* The second of two equal prompts finds the first's full pages. */
static void equal_prompts_share_pages(void) {
  stream first = {.request = 21}, second = {.request = 22};
  const uint64_t ids[2 * PAGE] = {3, 1, 4, 1, 5, 9, 2, 6};
  mla_page_key keys[2];
  const part prompt[] = {{&first, 2 * PAGE + 1}};
  part rest[] = {{&second, 0}};
  int64_t stored = -1;
  OK(mla_chain_page_key(NULL, ids, PAGE, &keys[0]));
  OK(mla_chain_page_key(&keys[0], ids + PAGE, PAGE, &keys[1]));
  OK(mla_kv_resource_open(kv, name_of(&first), 2 * PAGE + 1, keys, 1, &stored));
  CHECK(stored == 0);
  OK(mla_kv_resource_add_page_keys(kv, name_of(&first), keys + 1, 1));
  serve(prompt, 1);
  OK(mla_kv_resource_remove(kv, first.request));
  CHECK(mla_kv_resource_cached_pages(kv) == 2);
  OK(mla_kv_resource_open(kv, name_of(&second), 2 * PAGE, keys, 2, &stored));
  CHECK(stored == 2 * PAGE - 1); /* the last row of a known prompt is computed */
  memcpy(second.rows, first.rows, sizeof second.rows);
  second.num_rows = (int)stored;
  rest[0].span = 1;
  serve(rest, 1);
  OK(mla_kv_resource_remove(kv, second.request));
  OK(mla_kv_resource_drop_prefixes(kv));
  CHECK(mla_kv_resource_cached_pages(kv) == 0);
}

static void everything_is_given_back(const stream* one, const stream* two) {
  mla_page_counts counts = {.struct_size = sizeof counts};
  mla_admission answer = {.struct_size = sizeof answer};
  mla_step_runner_config config = {.struct_size = sizeof config};
  stream last = *two;
  const part parts[] = {{&last, 2}};
  OK(mla_kv_resource_remove(kv, one->request));
  /* A runner that goes with a step in flight abandons it; its resources may have another. */
  fill_step(steps[0], parts, 1);
  admit_and_plan(steps[0], 0);
  fill_step(steps[1], parts, 1);
  OK(mla_step_runner_pre_admit(runner, steps[1], &answer));
  mla_step_runner_destroy(runner);
  check_length(two);
  config.kv_resources = &kv;
  config.num_kv_resources = 1;
  config.attention_resources = &attention;
  config.num_attention_resources = 1;
  OK(mla_step_runner_create(&config, &runner));
  serve(parts, 1);
  OK(mla_kv_resource_remove(kv, two->request));
  OK(mla_kv_resource_check(kv, &counts));
  CHECK(counts.free == PAGES && mla_kv_resource_num_pages(kv) == PAGES);
  CHECK(counts.owned + counts.shared + counts.cached + counts.reserved == 0);
  mla_kv_resource_destroy(kv); /* in any order */
  mla_step_runner_destroy(runner);
  mla_attention_resource_destroy(attention);
  mla_step_destroy(steps[0]);
  mla_step_destroy(steps[1]);
}

int main(void) {
  stream one = {.request = 1}, two = {.request = 2};
  create_engine();
  prompts_in_chunks(&one, &two);
  views_and_arrays_say_where_rows_land(&one, &two);
  decode_is_planned_ahead(&one, &two);
  rejected_tokens_are_taken_back(&one, &two);
  a_bucket_pads_the_step(&one);
  passes_see_as_much_as_they_are_told(&two);
  a_shortage_names_who_lacks_pages(&one, &two);
  OK(mla_kv_resource_trim(kv, name_of(&one), one.num_rows - 5)); /* room for what follows */
  OK(mla_kv_resource_trim(kv, name_of(&two), two.num_rows - 5));
  one.num_rows = two.num_rows = 5;
  forks_share_pages_until_they_append(&one);
  equal_prompts_share_pages();
  everything_is_given_back(&one, &two);
  return report();
}
