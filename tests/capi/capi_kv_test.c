/* Runners of other shapes than a KV and an attention resource: streams alone, whose label plans
 * feed an mla_attention; and two models, each with a pool of its own, in one step. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "mla/mla_engine.h"

enum { RANK = 4, PAGE = 2, TOKENS = 5 };

static mla_pool* make_pool(void) {
  const mla_pool_config config = {.struct_size = sizeof config,
                                  .page_size = PAGE,
                                  .num_pages = 8,
                                  .kv_lora_rank = RANK,
                                  .dtype = MLA_FLOAT32};
  mla_pool* pool = NULL;
  OK(mla_pool_create(&config, &pool));
  return pool;
}

/* [TOKENS, RANK], or with one head between; row i holds i + 1 everywhere. */
static mla_tensor rows_of(float* data, int32_t rank) {
  const int64_t flat[] = {TOKENS, RANK}, with_head[] = {TOKENS, 1, RANK};
  int i;
  for (i = 0; i < TOKENS * RANK; ++i) data[i] = (float)(i / RANK + 1);
  return mla_contiguous_tensor(data, MLA_FLOAT32, rank, rank == 2 ? flat : with_head);
}

/* With queries of zero, causal: row i is the mean of rows 0 .. i, (i + 2) / 2. */
static void check_means(const float* out) {
  int i;
  for (i = 0; i < TOKENS * RANK; ++i) {
    CHECK(fabs((double)out[i] - (i / RANK + 2) / 2.0) < 1e-6);
  }
}

static void label_plans_feed_an_attention(void) {
  const mla_geometry geometry = {.struct_size = sizeof geometry,
                                 .num_heads = 1,
                                 .kv_lora_rank = RANK,
                                 .page_size = PAGE,
                                 .dtype = MLA_FLOAT32,
                                 .kv_dtype = MLA_FLOAT32};
  const mla_segment segment = {3, NULL, TOKENS};
  const mla_kv_step part = {.struct_size = sizeof part, .segments = &segment, .num_segments = 1};
  const mla_kv_stream stream = {3, NULL};
  mla_plan_options options = {.struct_size = sizeof options, .sm_scale = 1, .causal = 1};
  mla_attention_config config = {.struct_size = sizeof config, .geometry = &geometry};
  mla_step_runner_config resources = {.struct_size = sizeof resources, .num_kv_resources = 1};
  mla_admission answer = {.struct_size = sizeof answer};
  mla_label_plan plan = {.struct_size = sizeof plan};
  mla_batch batch = {.struct_size = sizeof batch};
  mla_run_args args = {.struct_size = sizeof args};
  float q[TOKENS * RANK], latents[TOKENS * RANK], out[TOKENS * RANK];
  mla_pool* pool = make_pool();
  mla_kv_resource* kv = NULL;
  mla_step_runner* runner = NULL;
  mla_step* step = NULL;
  mla_attention* attention = NULL;
  mla_tensor rows = rows_of(latents, 2), layer;
  OK(mla_kv_resource_create(pool, NULL, &kv));
  resources.kv_resources = &kv;
  OK(mla_step_runner_create(&resources, &runner));
  OK(mla_step_create(&step));
  config.num_pages = mla_pool_total_pages(pool);
  OK(mla_attention_create(&config, &attention));

  OK(mla_kv_resource_open(kv, stream, 0, NULL, 0, NULL));
  OK(mla_step_set_kv(step, NULL, &part));
  OK(mla_step_runner_admit(runner, step, &answer));
  OK(mla_step_runner_plan(runner, step, NULL, NULL));
  OK(mla_kv_resource_write(kv, 0, NULL, &rows, NULL, NULL));
  OK(mla_kv_resource_label_plan(kv, NULL, &plan));
  batch.num_rows = plan.num_rows;
  batch.qo_indptr = plan.qo_indptr;
  batch.kv_indptr = plan.kv_indptr;
  batch.kv_indices = plan.kv_indices;
  batch.num_kv_indices = plan.num_kv_indices;
  batch.kv_last_page_len = plan.kv_last_page_len;
  OK(mla_attention_plan(attention, &batch, &options, NULL));
  args.q_nope = rows_of(q, 3);
  memset(q, 0, sizeof q);
  args.out = rows_of(out, 3);
  OK(mla_pool_layer(pool, 0, &layer));
  OK(mla_split_latent(&layer, RANK, &args.ckv, &args.kpe));
  OK(mla_attention_run(attention, &args, NULL));
  check_means(out);

  mla_attention_destroy(attention);
  mla_step_destroy(step);
  mla_step_runner_destroy(runner); /* with the step in flight */
  mla_kv_resource_destroy(kv);
  mla_pool_destroy(pool);
}

static void two_models_go_through_one_step(void) {
  const char* keys[] = {"target", "draft"};
  const char* attention_keys[] = {"target attention", "draft attention"};
  const mla_segment segment = {3, NULL, TOKENS};
  const mla_kv_step part = {.struct_size = sizeof part, .segments = &segment, .num_segments = 1};
  const mla_attention_step causal = {.struct_size = sizeof causal};
  const mla_attention_pass pass = {.causal = 1};
  const mla_attention_step one_pass = {
      .struct_size = sizeof one_pass, .passes = &pass, .num_passes = 1};
  const mla_kv_stream stream = {3, NULL};
  mla_kv_options kv_options = {.struct_size = sizeof kv_options};
  mla_attention_options options = {
      .struct_size = sizeof options, .num_heads = 1, .sm_scale = 1, .max_tokens = 64};
  mla_step_runner_config resources = {.struct_size = sizeof resources};
  mla_admission answer = {.struct_size = sizeof answer};
  mla_attend_args args = {.struct_size = sizeof args};
  float q[TOKENS * RANK], latents[TOKENS * RANK], out[TOKENS * RANK];
  mla_pool* pool;
  mla_kv_resource* kv[2] = {NULL, NULL};
  mla_attention_resource* attention[2] = {NULL, NULL};
  mla_step_runner* runner = NULL;
  mla_step* step = NULL;
  mla_tensor rows = rows_of(latents, 2);
  int model;
  args.q_nope = rows_of(q, 3);
  memset(q, 0, sizeof q);
  args.out = rows_of(out, 3);
  OK(mla_step_create(&step));
  for (model = 0; model < 2; ++model) {
    pool = make_pool();
    kv_options.key = keys[model];
    options.key = attention_keys[model];
    OK(mla_kv_resource_create(pool, &kv_options, &kv[model]));
    OK(mla_attention_resource_create(kv[model], &options, &attention[model]));
    OK(mla_kv_resource_open(kv[model], stream, 0, NULL, 0, NULL));
    OK(mla_step_set_kv(step, keys[model], &part));
    OK(mla_step_set_attention(step, attention_keys[model], model == 0 ? &causal : &one_pass));
    mla_pool_destroy(pool);
  }
  REFUSED(mla_step_set_attention(step, "draft", &causal), "\"draft\"");
  resources.kv_resources = kv;
  resources.attention_resources = attention;
  resources.num_kv_resources = 2;
  resources.num_attention_resources = 1;
  OK(mla_step_runner_create(&resources, &runner));
  REFUSED(mla_step_runner_admit(runner, step, &answer), "\"draft attention\"");
  mla_step_runner_destroy(runner);
  resources.num_attention_resources = 2;
  OK(mla_step_runner_create(&resources, &runner));
  OK(mla_step_runner_admit(runner, step, &answer));
  OK(mla_step_runner_plan(runner, step, NULL, NULL));
  for (model = 0; model < 2; ++model) {
    memset(out, 0xff, sizeof out);
    OK(mla_kv_resource_write(kv[model], 0, NULL, &rows, NULL, NULL));
    OK(mla_attention_resource_run(attention[model], &args, NULL));
    check_means(out);
  }
  OK(mla_step_runner_commit(runner));
  for (model = 0; model < 2; ++model) {
    mla_attention_resource_destroy(attention[model]);
    mla_kv_resource_destroy(kv[model]);
  }
  mla_step_runner_destroy(runner);
  mla_step_destroy(step);
}

int main(void) {
  label_plans_feed_an_attention();
  two_models_go_through_one_step();
  return report();
}
