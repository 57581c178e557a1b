#!/usr/bin/env bash
# cuda_option.sh SOURCE WORK CXX CC: what MLA_CUDA asks for, with a compiler that only says to be of
# CUDA 12.4, which is too old.
set -euo pipefail
source=$1 work=$2 cxx=$3 cc=$4
fail() { printf 'error: %s\n' "$*" >&2 && cat "$work/log" >&2 && exit 1; }

rm -rf "$work"
mkdir -p "$work"
printf '#!/bin/sh\necho "Cuda compilation tools, release 12.4, V12.4.131"\n' >"$work/nvcc"
chmod +x "$work/nvcc"
configure() {  # MLA_CUDA
  cmake -S "$source" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_CUDA_COMPILER="$work/nvcc" -DMLA_BUILD_TESTS=OFF -DMLA_BUILD_BENCH=OFF -DMLA_BUILD_TOOLS=OFF \
    -DMLA_BUILD_EXAMPLES=OFF -DMLA_LAYER=OFF -DMLA_CUDA="$1" >"$work/log" 2>&1
}
says() { tr -s ' \n' ' ' <"$work/log" | grep -qF "$1"; }

for off in OFF off FALSE 0 NO; do
  configure $off || fail "MLA_CUDA=$off asks for CUDA"
  if says "CUDA backend"; then fail "MLA_CUDA=$off looks for CUDA"; fi
done
configure AUTO || fail "MLA_CUDA=AUTO asks for CUDA"
says "The CUDA backend is left out: it needs CUDA 12.5" || fail "MLA_CUDA=AUTO does not say what is missing"
for on in ON 1; do
  if configure $on; then fail "MLA_CUDA=$on goes without CUDA"; fi
  says "MLA_CUDA is $on, but the CUDA backend cannot be built: it needs CUDA 12.5" ||
    fail "MLA_CUDA=$on does not say what is missing"
done
