/* Numbers for the C test programs. */
#pragma once

#include <stdint.h>

/* In [-1, 1), without a pattern, always the same for the same numbers. */
static float noise(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t x = a * 0x9e3779b1U ^ b * 0x85ebca77U ^ c * 0xc2b2ae3dU;
  x = (x ^ (x >> 15)) * 0x2c1b3c6dU;
  x = (x ^ (x >> 12)) * 0x297a2d39U;
  return (float)((x ^ (x >> 15)) >> 8) / 8388608.0F - 1;
}
