#!/usr/bin/env bash
# clang-tidy over every compiled source of src/ and tools/ (or the files named), several at a time.
# Needs a configured release preset. Says PASS or FAIL for each file.
set -uo pipefail
cd "$(dirname "$0")/.."
lint_one() {
  local text
  if text=$(clang-tidy-16 -p build/release --quiet "$1" 2>/dev/null); then
    echo "PASS lint $1"
  else
    printf 'FAIL lint %s\n%s\n' "$1" "$text"
    return 1
  fi
}
export -f lint_one
files=("$@")
[ $# -gt 0 ] || mapfile -t files < <(git ls-files 'src/*.cpp' 'tools/*.cpp')
printf '%s\0' "${files[@]}" | xargs -0 -P "${JOBS:-$(nproc)}" -I{} bash -c 'lint_one "$1"' lint {}
