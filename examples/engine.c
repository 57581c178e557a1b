/* An engine in C: a request of 9 prompt tokens is served in two chunks, then decodes; a second one
 * forks it and both go on. The model is left out: queries and latents are constants. */
#include <stdio.h>
#include <stdlib.h>

#include "mla/mla_engine.h"

enum { HEADS = 16, RANK = 512, ROPE = 64, LATENT = RANK + ROPE, MAX_TOKENS = 8 };

static float q[MAX_TOKENS * HEADS * LATENT], rows[MAX_TOKENS * LATENT];
static float out[MAX_TOKENS * HEADS * RANK];

static void need(mla_status status) {
  if (status == MLA_OK) return;
  fprintf(stderr, "%s\n", mla_last_error());
  exit(1);
}

/* [a, b, width], columns from `begin` on of the latents in `data`; [a, width] where b is 0. */
static mla_tensor part(float* data, int64_t a, int64_t b, int64_t begin, int64_t width) {
  const int64_t shape3[] = {a, b, LATENT}, shape2[] = {a, LATENT};
  mla_tensor view = b == 0 ? mla_contiguous_tensor(data + begin, MLA_FLOAT32, 2, shape2)
                           : mla_contiguous_tensor(data + begin, MLA_FLOAT32, 3, shape3);
  view.shape[view.rank - 1] = width;
  return view;
}

/* One step: these segments append their spans and attend. 0 where pages are short. */
static int serve(mla_step_runner* runner, mla_kv_resource* kv, mla_attention_resource* attention,
                 mla_step* step, const mla_segment* segments, int64_t num_segments) {
  const mla_kv_step appended = {
      .struct_size = sizeof appended, .segments = segments, .num_segments = num_segments};
  const mla_attention_step causal = {.struct_size = sizeof causal};
  mla_admission answer = {.struct_size = sizeof answer};
  mla_label_plan plan = {.struct_size = sizeof plan};
  mla_attend_args args = {.struct_size = sizeof args};
  int64_t shape[3] = {0, HEADS, RANK};
  need(mla_step_set_kv(step, NULL, &appended));
  need(mla_step_set_attention(step, NULL, &causal));
  need(mla_step_runner_admit(runner, step, &answer));
  if (answer.pages_short > 0) return 0; /* wait, or remove a request, and try again */
  need(mla_step_runner_plan(runner, step, NULL, NULL));

  need(mla_kv_resource_label_plan(kv, NULL, &plan)); /* which tokens to compute */
  shape[0] = plan.num_new_rows;
  args.q_nope = part(q, shape[0], HEADS, 0, RANK);
  args.q_pe = part(q, shape[0], HEADS, RANK, ROPE);
  args.out = mla_contiguous_tensor(out, MLA_FLOAT32, 3, shape);
  for (args.layer = 0; args.layer < 2; ++args.layer) { /* one plan serves every layer */
    const mla_tensor ckv = part(rows, shape[0], 0, 0, RANK);
    const mla_tensor kpe = part(rows, shape[0], 0, RANK, ROPE);
    need(mla_kv_resource_write(kv, args.layer, NULL, &ckv, &kpe, NULL));
    need(mla_attention_resource_run(attention, &args, NULL));
  }
  need(mla_step_runner_commit(runner));
  return 1;
}

int main(void) {
  const mla_pool_config pool_config = {.struct_size = sizeof pool_config,
                                       .num_layers = 2,
                                       .page_size = 4,
                                       .num_pages = 4,
                                       .kv_lora_rank = RANK,
                                       .qk_rope_head_dim = ROPE,
                                       .dtype = MLA_FLOAT32};
  const mla_attention_options options = {.struct_size = sizeof options,
                                         .num_heads = HEADS,
                                         .sm_scale = 0.0721688F, /* 192^-0.5 */
                                         .max_tokens = MAX_TOKENS};
  const mla_segment chunks[] = {{1, NULL, 8}, {1, NULL, 1}};
  const mla_segment both[] = {{1, NULL, 1}, {2, NULL, 1}};
  const mla_kv_stream first = {1, NULL}, second = {2, NULL};
  mla_pool* pool;
  mla_kv_resource* kv;
  mla_attention_resource* attention;
  mla_step_runner_config resources = {.struct_size = sizeof resources};
  mla_step_runner* runner;
  mla_step* step;
  int i, steps = 0;
  for (i = 0; i < MAX_TOKENS * LATENT; ++i) rows[i] = 0.5F;

  need(mla_pool_create(&pool_config, &pool));
  need(mla_kv_resource_create(pool, NULL, &kv));
  need(mla_attention_resource_create(kv, &options, &attention));
  resources.kv_resources = &kv;
  resources.attention_resources = &attention;
  resources.num_kv_resources = resources.num_attention_resources = 1;
  need(mla_step_runner_create(&resources, &runner));
  need(mla_step_create(&step));

  need(mla_kv_resource_open(kv, first, 9, NULL, 0, NULL));
  for (i = 0; i < 2; ++i) steps += serve(runner, kv, attention, step, chunks + i, 1);
  need(mla_kv_resource_fork(kv, first, second)); /* shares pages, until one of them appends */
  while (serve(runner, kv, attention, step, both, 2)) ++steps;
  printf("%d steps until pages were short, out = %g\n", steps, (double)out[0]);

  mla_step_destroy(step); /* handles keep what they stand on: any order will do */
  mla_pool_destroy(pool);
  mla_kv_resource_destroy(kv);
  mla_attention_resource_destroy(attention);
  mla_step_runner_destroy(runner);
  return 0;
}
