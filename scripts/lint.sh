#!/usr/bin/env bash
# clang-tidy over the sources of src/ and tools/ that the release build compiles on this machine (or
# the files named, of the build in LINT_BUILD), several at a time. Needs that build configured. Says
# PASS or FAIL for each.
set -uo pipefail
cd "$(dirname "$0")/.."
export LINT_BUILD=${LINT_BUILD:-build/release}
lint_one() {
  local text
  if text=$(clang-tidy-16 -p "$LINT_BUILD" --quiet "$1" 2>/dev/null); then
    echo "PASS lint $1"
  else
    printf 'FAIL lint %s\n%s\n' "$1" "$text"
    return 1
  fi
}
export -f lint_one
files=("$@")
if [ $# -eq 0 ]; then
  mapfile -t files < <(comm -12 <(git ls-files 'src/*.cpp' 'tools/*.cpp' | sort) \
    <(sed -nE 's|^ *"file": "'"$PWD"'/(.*)",?$|\1|p' build/release/compile_commands.json | sort -u))
fi
printf '%s\0' "${files[@]}" | xargs -0 -P "${JOBS:-$(nproc)}" -I{} bash -c 'lint_one "$1"' lint {}
