#!/usr/bin/env bash
# Is every tracked source formatted as .clang-format asks? Changes nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
bad=$(git ls-files '*.cpp' '*.hpp' '*.h' '*.c' | xargs clang-format-16 --dry-run 2>&1 |
  sed -nE 's/^([^:]+):[0-9]+:[0-9]+: .*/\1/p' | sort -u)
if [ -n "$bad" ]; then
  printf 'FAIL format: `make format` mends\n%s\n' "$bad"
  exit 1
fi
echo "PASS format"
