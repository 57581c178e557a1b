#!/usr/bin/env bash
# Installs the Debian packages that the work at hand needs, or says what is missing.
#
#   scripts/setup.sh build   what `make build` and `make demo` need
#   scripts/setup.sh test    the same and what the tests, the format check and the lint need
#   scripts/setup.sh have KIND   exit status only: is everything of that kind installed?
#
# Does nothing, in a few milliseconds, where all is there. Never asks for a password.
set -euo pipefail
cd "$(dirname "$0")/.."

packages_of() {  # kind -> names; test includes build
  awk -v kind="$1" '$1 == "build" || $1 == kind && kind == "test" {print $2}' scripts/packages.txt
}

missing_of() {  # kind -> the names that dpkg does not list as installed
  local wanted installed
  wanted=$(packages_of "$1" | sort)
  installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' $wanted 2>/dev/null |
    awk '$2 == "installed" {print $1}' | sort -u) || true
  comm -23 <(echo "$wanted") <(echo "$installed")
}

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

check_tools() {  # a system without dpkg: only the commands can be looked for
  local absent=() tool
  for tool in cmake ninja g++; do
    command -v "$tool" >/dev/null || absent+=("$tool")
  done
  [ ${#absent[@]} -eq 0 ] || fail "setup: this is not a Debian system and these commands are missing: ${absent[*]}" \
    "Install them and the libraries listed in scripts/packages.txt with this system's package manager."
  echo "setup: not a Debian system; the libraries of scripts/packages.txt are taken to be here"
}

install() {  # kind, missing names
  local kind=$1 as_root=()
  shift
  local by_hand="apt-get update && apt-get install --no-install-recommends $*"
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      as_root=(sudo -n)
    else
      fail "setup: these packages are missing and this user may not install them:" "  $*" \
        "Install them as root and run the command again:" "  $by_hand"
    fi
  fi
  echo "setup: installing $*"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300
    -o Acquire::Retries=3)
  # An update that fails in part (one mirror of several) may still have what is needed.
  "${apt[@]}" update || echo "setup: apt-get update failed, trying to install all the same" >&2
  "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null ||
    fail "setup: apt-get could not install what is missing. By hand, as root:" "  $by_hand"
}

kind=${1:-test}
case $kind in
  build | test)
    if ! command -v dpkg-query >/dev/null; then
      check_tools
      exit 0
    fi
    missing=$(missing_of "$kind")
    # shellcheck disable=SC2086  # one word a package
    [ -z "$missing" ] || install "$kind" $missing
    ;;
  have)
    command -v dpkg-query >/dev/null && [ -z "$(missing_of "${2:-test}")" ]
    ;;
  *)
    fail "usage: scripts/setup.sh build|test|have KIND"
    ;;
esac
