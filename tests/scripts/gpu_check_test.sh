#!/usr/bin/env bash
# gpu_check_test.sh SOURCE FAKE_SUITE WORK: what scripts/gpu_check.sh counts and refuses, with programs
# and an nvidia-smi that only pretend. Stops at the first thing that is wrong.
set -euo pipefail
source=$1 suite=$2 work=$3
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }

rm -rf "$work"
mkdir -p "$work/pack" "$work/bin" "$work/none"
cp "$source/scripts/gpu_check.sh" "$work/pack/"
for program in contract_test cuda_capture_test capture_unit_test \
  cuda_operations_test cuda_random_test cuda_plan_test cuda_addressing_test ptx_test; do
  cp "$suite" "$work/pack/$program"
done
has_card() {  # compute capability
  printf '#!/bin/sh\necho "A card, 1.2, 3 MiB, %s"\n' "$1" >"$work/bin/nvidia-smi"
  chmod +x "$work/bin/nvidia-smi"
}
has_card 9.0
plain_path=$PATH

# What a call says, and that it ends as it should.
check() {  # exit status, pattern of a line, the script's arguments
  local status=0
  "$work/pack/gpu_check.sh" "${@:3}" >"$work/said" 2>&1 || status=$?
  if [ "$status" -ne "$1" ] || ! grep -qE "$2" "$work/said"; then
    cat "$work/said" >&2
    fail "gpu_check.sh ${*:3}: exit status $status, expected $1 and a line like: $2"
  fi
}
says_one_line() { [ "$(wc -l <"$work/said")" -eq 1 ] || fail "more than one line: $(cat "$work/said")"; }

# A driver that answers nothing.
printf '#!/bin/sh\necho "no driver"\nexit 9\n' >"$work/none/nvidia-smi"
chmod +x "$work/none/nvidia-smi"
PATH=$work/none:$plain_path check 2 '^gpu_check: this machine has no NVIDIA GPU$' graph
says_one_line

PATH=$work/bin:$plain_path
check 0 '^Stages: unit' --help
check 2 '^Stages: unit'
check 2 '^gpu_check: no stage unti; there are: unit contract .* calibrate$' graph unti
says_one_line
[ ! -e "$work/pack/results" ] || fail "a stage ran beside one that does not exist"
check 2 '^gpu_check: --out wants a folder$' graph --out
check 2 '^gpu_check: pack wants a folder$' pack
check 2 '^gpu_check: merge wants the folder of the results and their commit$' merge "$work"
check 2 '^gpu_check: .* has no machine.json$' merge "$work" 0123abc

# A suite: how it goes, and its line.
graph() { FAKE_SUITE=$1 check "$2" "^cuda_capture_test +$3 " graph --out "$work/out"; }
graph well 0 '3 passed, 0 failed, 0 skipped'
graph skipping 0 '2 passed, 0 failed, 1 skipped'
graph failing 1 '2 passed, 1 failed, 0 skipped'
graph ending 1 '2 passed, 1 failed, 0 skipped'
graph skipping_all 1 '0 passed, 1 failed, 3 skipped'
graph without_device 1 '0 passed, 1 failed, 0 skipped'
grep -q 'cuda:0 is not there' "$work/said" || fail "does not say why no test ran"
# No test of this program is one of a GPU's kernels.
check 1 '^contract_test +0 passed, 1 failed, 0 skipped ' contract --out "$work/out"

# Tests of Hopper's instructions would all be skipped elsewhere: they are not run there.
FAKE_SUITE=well check 0 '^ptx_test +3 passed, 0 failed, 0 skipped ' unit --out "$work/hopper"
has_card 8.0
FAKE_SUITE=well check 0 '^cuda_plan_test +3 passed, 0 failed, 0 skipped ' unit --out "$work/ampere"
! grep -q ptx_test "$work/said" || fail "Hopper's instructions are tested on another card"

# Results of one stage: the others are missing, and said to be.
graph well 0 '3 passed, 0 failed, 0 skipped'
rm "$work/out/contract.json"
check 1 '"failed": 11,' merge "$work/out" 0123abc
check 1 '"passed": 6,' merge "$work/out" 0123abc
check 1 '"stage": "replay",' merge "$work/out" 0123abc
for stage in unit contract engine layer python memcheck racecheck initcheck synccheck replay bench; do
  echo "{\"stage\": \"$stage\", \"suites\": [{\"name\": \"s\", \"passed\": 1, \"failed\": 0, \"skipped\": 0, \"seconds\": 1}]}" \
    >"$work/out/$stage.json"
done
check 0 '"failed": 0,' merge "$work/out" 0123abc

# Other files of the folder are none of its business; a stage's that is cut off is a failure.
: >"$work/out/check.json"
check 0 '"failed": 0,' merge "$work/out" 0123abc
echo '{"stage": "layer", "sui' >"$work/out/layer.json"
check 1 '"name": "its results are cut off",' merge "$work/out" 0123abc
echo "gpu_check.sh counts and refuses as it should"
