/* What the C test programs share: checks that count. */
#pragma once

#include <stdio.h>
#include <string.h>

#include "mla/mla.h"

static int failures = 0;

static void check(int good, const char* text, const char* file, int line) {
  if (good) return;
  ++failures;
  fprintf(stderr, "%s:%d: %s\n  last error: %s\n", file, line, text, mla_last_error());
}
#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__)
#define OK(call) check((call) == MLA_OK, #call, __FILE__, __LINE__)

static void check_refusal(mla_status status, mla_status wanted, const char* text, const char* file,
                          int line) {
  check(status == wanted, text, file, line);
  check(strstr(mla_last_error(), text) != NULL, text, file, line);
}
#define REFUSED(call, text) check_refusal((call), MLA_INVALID_ARGUMENT, (text), __FILE__, __LINE__)
#define NOT_NOW(call, text) check_refusal((call), MLA_INVALID_STATE, (text), __FILE__, __LINE__)

static int report(void) {
  if (failures != 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
