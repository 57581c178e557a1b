#!/usr/bin/env bash
# Is every code block of README.md that follows a marker <!-- FILE --> that file, to the letter?
# With --write, makes it so.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=$(awk '
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
  END { if (blocks == 0) { print "no block is marked" > "/dev/stderr"; exit 1 } }' README.md)
if [ "${1:-}" = --write ]; then
  printf '%s\n' "$wanted" >README.md
  exit
fi
diff -u --label README.md --label "what scripts/check_readme.sh --write makes of it" README.md \
  <(printf '%s\n' "$wanted")
echo "README.md shows its files as they are"
