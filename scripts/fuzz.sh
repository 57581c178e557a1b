#!/usr/bin/env bash
# Builds every fuzz target and runs each from its kept corpus, as many at a time as JOBS says.
#
#   scripts/fuzz.sh [SECONDS]   for each target; FUZZ_SECONDS, else 60, where it is not given
#
# Says "PASS fuzz_NAME" or "FAIL fuzz_NAME" for each and fails where one failed; the input
# that ends a target is then in build/fuzz/artifacts. New inputs go to build/fuzz/corpus, never into
# the repository: merge the ones worth keeping with
#   build/fuzz/fuzz/fuzz_NAME -merge=1 tests/fuzz/corpus/NAME build/fuzz/corpus/NAME
set -uo pipefail
cd "$(dirname "$0")/.."
export seconds=${1:-${FUZZ_SECONDS:-60}} out=build/fuzz jobs=${JOBS:-$(nproc)}

fuzz_one() {  # program
  local name kept grown log
  name=$(basename "$1")
  kept=tests/fuzz/corpus/${name#fuzz_} grown=$out/corpus/${name#fuzz_} log=$out/$name.log
  mkdir -p "$grown"
  if "$1" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=4096 \
    -print_final_stats=1 -artifact_prefix="$out/artifacts/" "$grown" "$kept" >"$log" 2>&1; then
    echo "PASS $name ($(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs)"
  else
    tail -n 30 "$log"
    echo "FAIL $name"
    return 1
  fi
}
export -f fuzz_one

scripts/configure.sh fuzz && cmake --build --preset fuzz -j"$jobs" --target fuzz_targets || {
  echo "FAIL fuzz_build"
  exit 1
}
mkdir -p "$out/artifacts"
printf '%s\0' "$out"/fuzz/fuzz_* | xargs -0 -P "$jobs" -I{} bash -c 'fuzz_one "$1"' fuzz {}
