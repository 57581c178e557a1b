#!/usr/bin/env bash
# Sets up, runs every test and counts them all in one last line, "N passed, N failed".
#
#   scripts/test.sh [PART...]   parts, in this order where none is named:
#     format       clang-format check of every source
#     release      all tests of the release build (release-LABEL: those with that label)
#     lint         clang-tidy with clang's analyzer over src/ and tools/
#     asan, tsan   unit and property tests under sanitizers
#     fuzz         each fuzz target for FUZZ_SECONDS (60)
#     python       the Python package: format, lints and types, the wheel, its tests
#
# A part that fails does not stop the others. Environment: JOBS (all processors), FUZZ_SECONDS.
set -uo pipefail
cd "$(dirname "$0")/.."
export JOBS=${JOBS:-$(nproc)} FUZZ_SECONDS=${FUZZ_SECONDS:-60}
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
readonly logs=build/test-logs
passed=0 failed=0 report=()

count() {  # passed, failed
  passed=$((passed + $1)) failed=$((failed + $2))
}

# Runs a command that says "PASS name" or "FAIL name" on a line for each of its checks.
run_checks() {
  local log=$logs/$1.log status
  shift
  "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  count "$(grep -c '^PASS ' "$log")" "$(grep -c '^FAIL ' "$log")"
  return "$status"
}

build() {  # preset, targets
  local preset=$1
  shift
  scripts/configure.sh "$preset" && cmake --build --preset "$preset" -j"$JOBS" --target "$@"
}

# Counts from ctest's closing line, "97% tests passed, 3 tests failed out of 100". What was skipped
# (no GPU, no such instruction set) is in neither count.
run_ctest() {  # preset, ctest arguments
  local preset=$1 log=$logs/ctest-$1.log status numbers skipped
  shift
  ctest --preset "$preset" -j"$JOBS" "$@" 2>&1 | tee "$log" |
    grep -vE '^ +Start +[0-9]+: |\.\.\. +Passed +[0-9.]+ sec$'
  status=${PIPESTATUS[0]}
  numbers=$(sed -nE 's/^[0-9]+% tests passed, ([0-9]+) tests failed out of ([0-9]+).*/\1 \2/p' "$log")
  [ -n "$numbers" ] || return 1
  skipped=$(grep -cE '^\s+[0-9]+ - .* \(Skipped\)$' "$log")
  count $((${numbers#* } - ${numbers% *} - skipped)) "${numbers% *}"
  return "$status"
}

# Counts from pytest's closing line, "3 failed, 97 passed, 20 skipped in 5.02s".
run_pytest() {
  local log=$logs/pytest.log status
  scripts/python.sh test 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  count_of() { sed -nE "s/^=*(.*[ ,])?([0-9]+) $1.* in [0-9.]+s.*/\2/p" "$log" | tail -n 1; }
  local good bad broken
  good=$(count_of passed) bad=$(count_of failed) broken=$(count_of 'errors?')
  count "${good:-0}" $((${bad:-0} + ${broken:-0}))
  return "$status"
}

part_format() { run_checks format scripts/check_format.sh; }
part_release() { build release all && run_ctest release "$@"; }
part_lint() { scripts/configure.sh release && run_checks lint scripts/lint.sh; }
part_asan() { build asan tests_unit tests_property && run_ctest asan -L '^(unit|property)$'; }
part_tsan() { build tsan tests_unit tests_property && run_ctest tsan -L '^(unit|property)$'; }
part_fuzz() { run_checks fuzz scripts/fuzz.sh; }
part_python() {
  scripts/python.sh venv || return 1
  local status=0
  run_checks python-lint scripts/python.sh lint || status=1
  run_checks wheel scripts/python.sh wheel && run_pytest || status=1
  LINT_BUILD=build/wheel run_checks python-tidy scripts/lint.sh python/src/*.cpp || status=1
  return $status
}

run_part() {
  local name=$1 counted=$((passed + failed)) failed_before=$failed start=$SECONDS verdict=ok
  printf '\n== %s\n' "$name"
  case $name in
    release-*) part_release -L "^${name#release-}\$" ;;
    *) "part_$name" ;;
  esac || verdict=FAILED
  # A part that ran nothing has not passed, and one that broke outside its checks is a failure.
  [ $((passed + failed)) -gt "$counted" ] || verdict=FAILED
  if [ "$verdict" = FAILED ] && [ "$failed" -eq "$failed_before" ]; then count 0 1; fi
  report+=("$(printf '%-16s %-7s %5d s' "$name" "$verdict" $((SECONDS - start)))")
}

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(format release lint asan tsan fuzz python)
for part in "${parts[@]}"; do
  declare -F "part_${part%%-*}" >/dev/null || { echo "no such part: $part" >&2 && exit 2; }
done
scripts/setup.sh test || exit 1
mkdir -p "$logs"
for part in "${parts[@]}"; do run_part "$part"; done

printf '\n'
printf '%s\n' "${report[@]}"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
