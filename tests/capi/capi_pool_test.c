/* The pool of the C interface by itself, in lent memory. */
#include <stdlib.h>

#include "check.h"
#include "mla/mla_cache.h"

static mla_tensor rows_of(float* data, int64_t num_rows, int64_t width) {
  int64_t shape[2];
  shape[0] = num_rows;
  shape[1] = width;
  return mla_contiguous_tensor(data, MLA_FLOAT32, 2, shape);
}

static void the_pool_moves_rows(void) {
  mla_pool_config config = {.struct_size = sizeof config,
                            .page_size = 2,
                            .num_pages = 2,
                            .kv_lora_rank = 2,
                            .qk_rope_head_dim = 1,
                            .dtype = MLA_FLOAT32};
  const int64_t slots[] = {3, -1, 0}, wrong[] = {6, 0, 0}, count = 3;
  const mla_page_copy copy = {0, 2}, beyond = {0, 3};
  float ckv[] = {1, 2, 3, 4, 5, 6}, kpe[] = {10, 20, 30}, back[9] = {0};
  const mla_tensor ckv_rows = rows_of(ckv, 3, 2), kpe_rows = rows_of(kpe, 3, 1);
  const mla_tensor back_rows = rows_of(back, 3, 3);
  mla_tensor on_device = mla_contiguous_tensor((void*)slots, MLA_INT64, 1, &count), layer;
  mla_pool* pool = NULL;
  void* memory;
  size_t bytes = 0;
  OK(mla_pool_bytes(&config, &bytes));
  CHECK(bytes == 3 * 2 * 3 * sizeof(float));
  memory = calloc(1, bytes + 64);
  config.memory_bytes = bytes;
  REFUSED(mla_pool_create(&config, &pool), "config.memory: expected an address and its size");
  config.memory = (char*)memory + (64 - (uintptr_t)memory % 64);
  config.memory_bytes = 0;
  REFUSED(mla_pool_create(&config, &pool), "config.memory: expected an address and its size");
  config.memory_bytes = bytes - 1;
  REFUSED(mla_pool_create(&config, &pool), "config.memory.size()");
  config.memory_bytes = bytes;
  OK(mla_pool_create(&config, &pool));
  CHECK(mla_pool_total_pages(pool) == 3);
  OK(mla_pool_layer(pool, 0, &layer));
  CHECK(layer.data == config.memory && layer.shape[0] == 3 && layer.shape[2] == 3);
  REFUSED(mla_pool_layer(pool, 1, &layer), "layer");

  OK(mla_pool_append(pool, 0, slots, 3, &ckv_rows, &kpe_rows, NULL));
  REFUSED(mla_pool_append(pool, 0, wrong, 3, &ckv_rows, &kpe_rows, NULL), "slots[0]");
  REFUSED(mla_pool_append(pool, 0, slots, 3, &ckv_rows, NULL, NULL), "kpe");
  REFUSED(mla_pool_append(pool, 0, NULL, 3, &ckv_rows, &kpe_rows, NULL), "slots");
  REFUSED(mla_pool_append(pool, 0, slots, -3, &ckv_rows, &kpe_rows, NULL), "slots");
  OK(mla_pool_copy_pages(pool, &copy, 1, NULL));
  REFUSED(mla_pool_copy_pages(pool, &beyond, 1, NULL), "copies[0]");
  OK(mla_pool_gather(pool, 0, slots, 3, &back_rows, NULL));
  CHECK(back[0] == 1 && back[2] == 10 && back[3] == 0 && back[7] == 6 && back[8] == 30);
  CHECK(((const float*)config.memory)[4 * 3] == 5); /* page 0, copied to page 2 */

  ckv[0] = 7;
  OK(mla_pool_append_at(pool, 0, &on_device, &ckv_rows, &kpe_rows, NULL));
  CHECK(((const float*)config.memory)[3 * 3] == 7);
  on_device.dtype = MLA_INT32;
  REFUSED(mla_pool_append_at(pool, 0, &on_device, &ckv_rows, &kpe_rows, NULL), "slots.dtype");
  on_device.dtype = MLA_INT64;
  on_device.data = NULL;
  REFUSED(mla_pool_append_at(pool, 0, &on_device, &ckv_rows, &kpe_rows, NULL), "slots.data");
  mla_pool_destroy(pool);
  free(memory);
}

int main(void) {
  the_pool_moves_rows();
  return report();
}
