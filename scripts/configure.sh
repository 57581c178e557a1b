#!/usr/bin/env bash
# scripts/configure.sh PRESET [cmake argument...]: configures a preset. Where only what the build
# needs is installed, the tests and micro-benchmarks are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
with_tests=OFF
if scripts/setup.sh have test || ! command -v dpkg-query >/dev/null; then with_tests=ON; fi
log=$(cmake --preset "$1" -DMLA_BUILD_TESTS=$with_tests -DMLA_BUILD_BENCH=$with_tests "${@:2}" 2>&1) ||
  { echo "$log" >&2 && exit 1; }
