#!/usr/bin/env bash
# The Python package in a virtual environment of its own, build/venv.
#
#   scripts/python.sh venv     makes it, with what python/requirements-test.txt pins
#   scripts/python.sh wheel    builds build/wheels/libmla-*.whl, checks it and installs it there
#   scripts/python.sh lint     ruff and mypy; says PASS or FAIL for each
#   scripts/python.sh test     pytest, with its arguments
#   scripts/python.sh pack DIR [VERSION]   a folder from which the tests run by a Python of VERSION
#                              (3.12) that has PyTorch and NumPy: DIR/site on its path, in DIR
set -euo pipefail
cd "$(dirname "$0")/.."
readonly venv=build/venv pins=python/requirements-test.txt

make_venv() {  # does nothing where the environment has these pins
  cmp -s $pins $venv/pins 2>/dev/null && return
  python3 -m venv --clear $venv
  $venv/bin/pip install --quiet --disable-pip-version-check -r $pins
  cp $pins $venv/pins
}

build_wheel() {  # CMake arguments
  local built
  rm -rf build/wheels
  $venv/bin/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps . \
    -w build/wheels "${@/#/-Ccmake.args=}"
  $venv/bin/wheel tags --remove --platform-tag "manylinux_2_34_$(uname -m)" build/wheels/*.whl >/dev/null
  built=$(echo build/wheels/*.whl)
  $venv/bin/python scripts/check_wheel.py "$built"
  $venv/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$built"
}

pack() {  # folder, Python's version
  local to=$1 version=${2:-3.12} platforms=() glibc
  for glibc in 17 24 27 28; do platforms+=(--platform "manylinux_2_${glibc}_$(uname -m)"); done
  rm -rf "$to" && mkdir -p "$to/python"
  $venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target "$to/site" \
    --python-version "$version" "${platforms[@]}" --only-binary=:all: --no-compile \
    $(grep -hE '^(apache-tvm-ffi|hypothesis|ml_dtypes|pytest)==' $pins) \
    $($venv/bin/pip freeze | grep -E '^(iniconfig|packaging|pluggy|Pygments|sortedcontainers|typing_extensions)==')
  $venv/bin/python -m zipfile -e build/wheels/*.whl "$to/site"
  rm -rf "$to"/site/{bin,tvm_ffi/{src,3rdparty,include}}
  cp -r pyproject.toml "$to/"
  cp -r python/{tests,examples,bench} "$to/python/"
  find "$to" -name __pycache__ -prune -exec rm -rf {} +
}

check() {  # name, command
  if "${@:2}"; then echo "PASS $1"; else echo "FAIL $1" && return 1; fi
}

lint() {
  local status=0
  check ruff-format $venv/bin/ruff format --check --quiet || status=1
  check ruff $venv/bin/ruff check --quiet || status=1
  check mypy $venv/bin/mypy --no-error-summary || status=1
  return $status
}

case ${1:-} in
  venv) make_venv ;;
  wheel) build_wheel "${@:2}" ;;
  lint) lint ;;
  test) exec $venv/bin/python -m pytest "${@:2}" ;;
  pack) pack "${2:?a folder}" "${@:3}" ;;
  *) sed -n '2,10p' "$0" >&2 && exit 2 ;;
esac
