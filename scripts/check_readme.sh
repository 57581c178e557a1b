#!/usr/bin/env bash
# Is every code block of the pages below that follows a marker <!-- FILE --> that file, to
# the letter? With --write, makes it so.
set -euo pipefail
cd "$(dirname "$0")/.."
with_files() {
  awk '
    inside && /^```$/ { inside = 0 }
    !inside { print }
    /^<!-- [A-Za-z0-9_\/.-]+ -->$/ { file = $2; next }
    file != "" && /^```/ {
      inside = 1
      while ((getline line < file) > 0) print line
      close(file)
      ++blocks
    }
    { file = "" }
    END { if (blocks == 0) { print FILENAME ": no block is marked" > "/dev/stderr"; exit 1 } }' "$1"
}
for page in README.md docs/capi.md docs/python.md docs/migrating_from_flash_mla.md \
  docs/migrating_from_flashinfer.md docs/mstar.md; do
  wanted=$(with_files "$page")
  if [ "${1:-}" = --write ]; then
    printf '%s\n' "$wanted" >"$page"
    continue
  fi
  diff -u --label "$page" --label "what scripts/check_readme.sh --write makes of it" "$page" \
    <(printf '%s\n' "$wanted")
  echo "$page shows its files as they are"
done
