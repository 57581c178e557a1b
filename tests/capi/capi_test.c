/* Uses the library as a C program does: asks, plans, runs, merges, provokes errors, and checks
 * every number against loops of its own in double. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mla/mla.h"
#include "noise.h"

enum { HEADS = 3, RANK = 5, ROPE = 2, LATENT = RANK + ROPE, PAGE = 4, PAGES = 6, TOKENS = 3 };

static const float kScale = 0.25F;

/* Two requests: 2 queries on 7 keys in pages 4 and 1, 1 query on 3 keys in page 2. */
static const int32_t kQoIndptr[] = {0, 2, 3};
static const int32_t kKvIndptr[] = {0, 2, 3};
static const int32_t kPages[] = {4, 1, 2};
static const int32_t kKvLen[] = {7, 3};

static float pool[PAGES * PAGE * LATENT];
static float q_nope[TOKENS * HEADS * RANK];
static float q_pe[TOKENS * HEADS * ROPE];
static float out[TOKENS * HEADS * RANK];
static float lse[TOKENS * HEADS];

/* The pool's unused slots hold NaN. */
static void fill(void) {
  size_t i;
  int slot;
  for (i = 0; i < sizeof pool / sizeof pool[0]; ++i) pool[i] = NAN;
  for (slot = 0; slot < 7 + 3; ++slot) {
    const int page = slot < 4 ? 4 : slot < 7 ? 1 : 2;
    const int row = slot < 4 ? slot : slot < 7 ? slot - 4 : slot - 7;
    for (i = 0; i < LATENT; ++i) {
      pool[(size_t)(page * PAGE + row) * LATENT + i] = noise(0, (uint32_t)slot, (uint32_t)i);
    }
  }
  for (i = 0; i < sizeof q_nope / sizeof q_nope[0]; ++i) q_nope[i] = noise(1, (uint32_t)i, 0);
  for (i = 0; i < sizeof q_pe / sizeof q_pe[0]; ++i) q_pe[i] = noise(2, (uint32_t)i, 0);
}

/* Output row of one query and head in double; returns the LSE. */
static double expected_row(int token, int head, int causal, double* row) {
  const int request = token < 2 ? 0 : 1;
  const int num_queries = kQoIndptr[request + 1] - kQoIndptr[request];
  const int query = token - kQoIndptr[request];
  const int visible = causal ? kKvLen[request] - num_queries + query + 1 : kKvLen[request];
  double total = 0;
  int key, c;
  for (c = 0; c < RANK; ++c) row[c] = 0;
  for (key = 0; key < visible; ++key) {
    const int page = kPages[kKvIndptr[request] + key / PAGE];
    const float* latent = pool + (size_t)(page * PAGE + key % PAGE) * LATENT;
    double score = 0;
    for (c = 0; c < RANK; ++c) {
      score += (double)q_nope[(token * HEADS + head) * RANK + c] * (double)latent[c];
    }
    for (c = 0; c < ROPE; ++c) {
      score += (double)q_pe[(token * HEADS + head) * ROPE + c] * (double)latent[RANK + c];
    }
    score = exp(score * (double)kScale);
    total += score;
    for (c = 0; c < RANK; ++c) row[c] += score * (double)latent[c];
  }
  for (c = 0; c < RANK; ++c) row[c] /= total;
  return log(total);
}

static void check_output(int causal) {
  int token, head, c;
  for (token = 0; token < TOKENS; ++token) {
    for (head = 0; head < HEADS; ++head) {
      double row[RANK];
      const double row_lse = expected_row(token, head, causal, row);
      CHECK(fabs((double)lse[token * HEADS + head] - row_lse) < 1e-5);
      for (c = 0; c < RANK; ++c) {
        CHECK(fabs((double)out[(token * HEADS + head) * RANK + c] - row[c]) < 1e-5);
      }
    }
  }
}

static mla_tensor tensor(float* data, int64_t a, int64_t b, int64_t c) {
  int64_t shape[3];
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  return mla_contiguous_tensor(data, MLA_FLOAT32, c == 0 ? 2 : 3, shape);
}

static mla_geometry geometry(void) {
  const mla_geometry shape = {.struct_size = sizeof(mla_geometry),
                              .num_heads = HEADS,
                              .kv_lora_rank = RANK,
                              .qk_rope_head_dim = ROPE,
                              .page_size = PAGE,
                              .dtype = MLA_FLOAT32,
                              .kv_dtype = MLA_FLOAT32};
  return shape;
}

static mla_batch batch(void) {
  const mla_batch both = {.struct_size = sizeof(mla_batch),
                          .num_rows = 2,
                          .qo_indptr = kQoIndptr,
                          .kv_indptr = kKvIndptr,
                          .kv_indices = kPages,
                          .num_kv_indices = 3,
                          .kv_len = kKvLen};
  return both;
}

static mla_run_args run_args(void) {
  mla_run_args args = {.struct_size = sizeof(mla_run_args)};
  const mla_tensor layer = tensor(pool, PAGES, PAGE, LATENT);
  args.q_nope = tensor(q_nope, TOKENS, HEADS, RANK);
  args.q_pe = tensor(q_pe, TOKENS, HEADS, ROPE);
  CHECK(mla_split_latent(&layer, RANK, &args.ckv, &args.kpe) == MLA_OK);
  args.out = tensor(out, TOKENS, HEADS, RANK);
  args.lse = tensor(lse, TOKENS, HEADS, 0);
  return args;
}

static void poison_output(void) {
  size_t i;
  for (i = 0; i < sizeof out / sizeof out[0]; ++i) out[i] = NAN;
  for (i = 0; i < sizeof lse / sizeof lse[0]; ++i) lse[i] = NAN;
}

static void supports_names_a_kernel_or_a_reason(void) {
  const mla_device cpu = {MLA_CPU, 0};
  mla_geometry shape = geometry();
  mla_support support = {.struct_size = sizeof support};
  CHECK(mla_supports(&shape, cpu, NULL, NULL, &support) == MLA_OK);
  CHECK(support.supported == 1 && support.capturable == 0 && strlen(support.kernel) > 0);
  CHECK(support.num_considered > 0 && support.considered[0].kernel != NULL);
  shape.num_heads = 0;
  CHECK(mla_supports(&shape, cpu, NULL, NULL, &support) == MLA_OK);
  CHECK(support.supported == 0 && strlen(support.kernel) == 0);
  CHECK(strstr(support.reason, "num_heads") != NULL);
  CHECK(mla_supports(NULL, cpu, NULL, NULL, &support) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "mla_supports: geometry: expected a pointer, got null") != NULL);
}

/* Plans and runs; with an executor and lent scratch as an engine would. */
static void attention_computes(int causal, int32_t forced_splits) {
  const mla_geometry shape = geometry();
  const mla_batch requests = batch();
  const mla_run_args args = run_args();
  const mla_plan_options options = {
      .struct_size = sizeof options, .sm_scale = kScale, .causal = causal};
  mla_attention_config config = {.struct_size = sizeof config,
                                 .geometry = &shape,
                                 .num_pages = PAGES,
                                 .max_rows = 4,
                                 .max_tokens = 8,
                                 .max_listed_pages = 16,
                                 .forced_splits = forced_splits};
  mla_plan_info info = {.struct_size = sizeof info};
  mla_executor* executor = NULL;
  mla_attention* attention = NULL;
  mla_tensor lengths;
  char* memory;
  CHECK(mla_executor_create(2, &executor) == MLA_OK);
  CHECK(mla_executor_num_threads(executor) == 2);
  config.executor = executor;
  CHECK(mla_attention_scratch_bytes(&config, &config.scratch_bytes) == MLA_OK);
  memory = malloc(config.scratch_bytes + 64);
  config.scratch = memory + (64 - (uintptr_t)memory % 64);
  memset(memory, 0xff, config.scratch_bytes + 64);
  CHECK(mla_attention_create(&config, &attention) == MLA_OK);
  mla_executor_destroy(executor); /* the object keeps the threads */

  CHECK(mla_attention_run(attention, &args, NULL) == MLA_INVALID_STATE);
  CHECK(mla_attention_info(attention, &info) == MLA_INVALID_STATE);
  CHECK(mla_attention_plan(attention, &requests, &options, NULL) == MLA_OK);
  poison_output();
  CHECK(mla_attention_run(attention, &args, NULL) == MLA_OK);
  check_output(causal);
  CHECK(mla_attention_info(attention, &info) == MLA_OK);
  CHECK(info.num_rows == 2 && info.num_tokens == TOKENS && info.num_tiles > 0);
  CHECK(forced_splits == 0 || info.num_splits == forced_splits);
  CHECK(mla_attention_kv_len_buf(attention, &lengths) == MLA_OK);
  CHECK(lengths.dtype == MLA_INT32 && lengths.rank == 1 && lengths.shape[0] == 2);
  CHECK(memcmp(lengths.data, kKvLen, sizeof kKvLen) == 0);
  CHECK(mla_attention_qo_indptr_buf(attention, &lengths) == MLA_OK);
  CHECK(lengths.shape[0] == 3 && memcmp(lengths.data, kQoIndptr, sizeof kQoIndptr) == 0);
  CHECK(strlen(mla_attention_kernel(attention)) > 0);
  mla_attention_destroy(attention);
  free(memory);
}

/* The first four keys and the rest of the first request, merged, are one pass over all. */
static void merging_parts_gives_the_whole(void) {
  const mla_geometry shape = geometry();
  const mla_attention_config config = {
      .struct_size = sizeof config, .geometry = &shape, .num_pages = PAGES};
  const mla_plan_options options = {.struct_size = sizeof options, .sm_scale = kScale};
  const int32_t lengths[2][2] = {{4, 3}, {3, 0}};
  const int32_t indptr[2][3] = {{0, 1, 2}, {0, 1, 1}};
  const int32_t pages[2][2] = {{4, 2}, {1, -1}};
  float part_out[2][TOKENS * HEADS * RANK];
  float part_lse[2][TOKENS * HEADS];
  mla_partial_state states[2];
  mla_attention* attention = NULL;
  mla_tensor merged, merged_lse;
  int part;
  memset(states, 0, sizeof states);
  CHECK(mla_attention_create(&config, &attention) == MLA_OK);
  for (part = 0; part < 2; ++part) {
    mla_batch requests = batch();
    mla_run_args args = run_args();
    requests.kv_indptr = indptr[part];
    requests.kv_indices = pages[part];
    requests.num_kv_indices = 2;
    requests.kv_len = lengths[part];
    args.out = states[part].out = tensor(part_out[part], TOKENS, HEADS, RANK);
    args.lse = states[part].lse = tensor(part_lse[part], TOKENS, HEADS, 0);
    CHECK(mla_attention_plan(attention, &requests, &options, NULL) == MLA_OK);
    CHECK(mla_attention_run(attention, &args, NULL) == MLA_OK);
  }
  CHECK(isinf(part_lse[1][2 * HEADS])); /* the second request has no key there */
  mla_attention_destroy(attention);
  poison_output();
  merged = tensor(out, TOKENS, HEADS, RANK);
  merged_lse = tensor(lse, TOKENS, HEADS, 0);
  CHECK(mla_merge_states(states, 2, &merged, &merged_lse, MLA_LSE_NATURAL, NULL, NULL) == MLA_OK);
  check_output(0);
  CHECK(mla_merge_states(states, 2, &merged, NULL, MLA_LSE_BASE_2, NULL, NULL) ==
        MLA_INVALID_ARGUMENT);
  CHECK(mla_merge_states(states, 0, &merged, NULL, MLA_LSE_NATURAL, NULL, NULL) ==
        MLA_INVALID_ARGUMENT);
  CHECK(mla_merge_states(NULL, 2, &merged, NULL, MLA_LSE_NATURAL, NULL, NULL) ==
        MLA_INVALID_ARGUMENT);
}

static void bad_input_is_refused_by_name(void) {
  mla_geometry shape = geometry();
  mla_attention_config config = {
      .struct_size = sizeof config, .geometry = &shape, .num_pages = PAGES};
  mla_plan_options options = {.struct_size = sizeof options, .sm_scale = kScale};
  const int32_t decreasing[] = {0, 2, 1};
  mla_attention* attention = NULL;
  mla_batch requests = batch();
  mla_run_args args = run_args();

  REFUSED(mla_attention_create(NULL, &attention), "config: expected a pointer, got null");
  REFUSED(mla_attention_create(&config, NULL), "attention: expected a pointer, got null");
  config.struct_size = 0;
  REFUSED(mla_attention_create(&config, &attention), "config->struct_size");
  config.struct_size = sizeof config;
  config.geometry = NULL;
  REFUSED(mla_attention_create(&config, &attention), "geometry: expected a pointer, got null");
  config.geometry = &shape;
  shape.dtype = 77;
  REFUSED(mla_attention_create(&config, &attention), "geometry.dtype");
  shape.dtype = MLA_FLOAT32;
  config.capture = 1;
  REFUSED(mla_attention_create(&config, &attention), "capture");
  config.capture = 0;
  config.bucket_rows = 4;
  REFUSED(mla_attention_create(&config, &attention), "config.bucket_tokens: expected at least 1");
  config.bucket_tokens = -1;
  REFUSED(mla_attention_create(&config, &attention), "config.bucket_tokens: expected at least 1");
  config.bucket_rows = config.bucket_tokens = 0;
  config.scratch_bytes = 64;
  REFUSED(mla_attention_create(&config, &attention), "config.scratch: expected an address and");
  config.scratch_bytes = 0;
  CHECK(attention == NULL);
  CHECK(mla_attention_create(&config, &attention) == MLA_OK);

  REFUSED(mla_attention_plan(NULL, &requests, &options, NULL), "attention: expected a pointer");
  REFUSED(mla_attention_plan(attention, NULL, &options, NULL), "batch: expected a pointer");
  REFUSED(mla_attention_plan(attention, &requests, NULL, NULL), "options: expected a pointer");
  requests.qo_indptr = NULL;
  REFUSED(mla_attention_plan(attention, &requests, &options, NULL), "batch.qo_indptr");
  requests.qo_indptr = decreasing;
  REFUSED(mla_attention_plan(attention, &requests, &options, NULL), "qo_indptr[2]");
  requests = batch();
  requests.num_rows = -1;
  REFUSED(mla_attention_plan(attention, &requests, &options, NULL), "batch.num_rows");
  requests = batch();
  requests.kv_indices = NULL;
  REFUSED(mla_attention_plan(attention, &requests, &options, NULL), "batch.kv_indices");
  requests = batch();
  options.sm_scale = 0;
  REFUSED(mla_attention_plan(attention, &requests, &options, NULL), "sm_scale");
  options.sm_scale = kScale;
  options.causal = 2;
  REFUSED(mla_attention_plan(attention, &requests, &options, NULL), "options.causal");
  options.causal = 0;
  CHECK(mla_attention_plan(attention, &requests, &options, NULL) == MLA_OK);

  REFUSED(mla_attention_run(attention, NULL, NULL), "args: expected a pointer, got null");
  args.out.rank = 2;
  REFUSED(mla_attention_run(attention, &args, NULL), "out.rank: expected 3, got 2");
  args = run_args();
  args.lse.dtype = MLA_BFLOAT16;
  REFUSED(mla_attention_run(attention, &args, NULL), "lse.dtype");
  args = run_args();
  args.q_nope.device.kind = 9;
  REFUSED(mla_attention_run(attention, &args, NULL), "q_nope.device.kind");
  args = run_args();
  memset(&args.q_nope, 0, sizeof args.q_nope);
  REFUSED(mla_attention_run(attention, &args, NULL), "q_nope");
  args = run_args();
  memset(&args.lse, 0, sizeof args.lse); /* may be left out */
  poison_output();
  CHECK(mla_attention_run(attention, &args, NULL) == MLA_OK);
  CHECK(isnan(lse[0]) && !isnan(out[0]));
  mla_attention_destroy(attention);

  mla_attention_destroy(NULL);
  mla_executor_destroy(NULL);
  CHECK(mla_attention_kernel(NULL) == NULL);
  CHECK(mla_executor_num_threads(NULL) == 0);
}

int main(void) {
  CHECK(mla_abi_version() == MLA_ABI_VERSION);
  CHECK(strchr(mla_version(), '.') != NULL);
  CHECK(strcmp(mla_last_error(), "") == 0);
  fill();
  supports_names_a_kernel_or_a_reason();
  attention_computes(0, 0);
  attention_computes(1, 0);
  attention_computes(0, 3);
  merging_parts_gives_the_whole();
  bad_input_is_refused_by_name();
  return report();
}
