#!/usr/bin/env bash
# The suites that need an NVIDIA GPU.
#
#   scripts/gpu_check.sh pack DIR           builds the programs (preset gpu) and puts them, stripped,
#                                           with their libraries, data and this script into DIR
#   DIR/gpu_check.sh STAGE... [--out OUT]   runs stages from such a folder, on a machine with a GPU and
#                                           nothing else; OUT (DIR/results) gets STAGE.json and logs
#   scripts/gpu_check.sh merge OUT COMMIT   one JSON of all stages there, on standard output; one that
#                                           did not run (calibrate apart) is a failure in it
#
# Stages: unit      operations, plans, staging, large memories, Hopper's instructions (tests/cuda)
#         contract  the contract suite over every kernel of the GPU
#         graph     captured runs and graphs
#         engine    the engine's suites, mla replay and the example on the GPU
#         layer     the MLA layer: golden files, kernels, captured steps
#         python    the Python package's tests of CUDA, by the machine's Python 3.12 and PyTorch, and
#                   what its calls cost the host, to OUT/python_host.json
#         sanitizers  memcheck, racecheck, initcheck, synccheck, each a stage of its own too, over a
#                     reduced list; a suite may take SANITIZER_SECONDS (90)
#         replay    300 requests of the trace in MLA_TRACE, a file named to pack, at full length, to
#                   OUT/replay_trace.json
#         calibrate  the planner's costs of the Hopper kernel, to OUT/costs.json
#         bench     mla bench over the whole grid, BENCH_ROUNDS (5) times, to OUT/grid.json, with every
#                   DIR/peers/*.so as a peer
# Exit status 1 if anything failed, 2 if nothing could be run. A suite of which no test ran has failed.
# Each stage takes less than 8 minutes. Several runs with the same OUT may go side by side; bench and
# calibrate want the machine for themselves.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sanitizers=(memcheck racecheck initcheck synccheck)
required=(unit contract graph engine layer python "${sanitizers[@]}" replay bench)
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; }
refuse() { echo "gpu_check: $*" >&2 && exit 2; }

programs_of() {  # stage -> gtest programs
  case $1 in
    unit) echo cuda_operations_test cuda_random_test cuda_plan_test cuda_addressing_test ptx_test ;;
    contract) echo contract_test ;;
    graph) echo cuda_capture_test capture_unit_test ;;
    engine) echo kv_resource_unit_test kv_resource_property_test kv_refusal_property_test \
      kv_step_unit_test attention_resource_unit_test seed_surface_unit_test \
      captured_engine_unit_test step_stress_property_test ;;
    layer) echo layer_cuda_test ;;
  esac
}
all_programs() {
  local stage
  for stage in unit contract graph engine layer; do programs_of "$stage"; done
}

pack() {
  local to=$1 build program library
  cd "$here/.."
  build=build/gpu
  scripts/configure.sh gpu
  # shellcheck disable=SC2046  # one word a program
  cmake --build --preset gpu -j"${JOBS:-$(nproc)}" --target mla_tool engine $(all_programs)
  rm -rf "$to" && mkdir -p "$to/lib" "$to/data"
  cp scripts/gpu_check.sh "$to/"
  for program in mla engine $(all_programs); do
    cp "$(find $build -type f -perm -u+x -name "$program" | head -n 1)" "$to/"
  done
  for program in mla engine $(all_programs); do ldd "$to/$program"; done |
    awk '$3 ~ /^\// && $1 !~ /^(libc|libm|ld-linux.*|libpthread|libdl|librt)\.so/ {print $3}' | sort -u |
    while read -r library; do cp -L "$library" "$to/lib/"; done
  strip "$to"/lib/* 2>/dev/null || true
  cp -r tests/layer/golden "$to/data/layers"
  scripts/python.sh venv
  scripts/python.sh wheel -DMLA_CUDA=ON
  scripts/python.sh pack "$to/py"
  cp examples/traces/sample.jsonl "$to/data/"
  if [ -n "${MLA_TRACE:-}" ]; then cp "$MLA_TRACE" "$to/data/trace.jsonl"; fi
}

# Runs a command that prints its own lines and counts; adds a suite to the stage's list.
record() {  # name, passed, failed, skipped, seconds
  suites+=("{\"name\": \"$1\", \"passed\": $2, \"failed\": $3, \"skipped\": $4, \"seconds\": $5}")
  [ "$3" -eq 0 ] || failed=1
  printf '%-44s %5d passed, %d failed, %d skipped  %4d s\n' "$1" "$2" "$3" "$4" "$5"
}

run_gtest() {  # suite's name, program, arguments
  local name=$1 log=$out/logs/$1.log status=0 start=$SECONDS
  shift
  timeout "${limit:-420}" "$@" >"$log" 2>&1 || status=$?
  if [ "$status" -eq 124 ]; then echo "$name: ended after ${limit:-420} s"; fi
  # One line a test that ran. GoogleTest's own sum counts those that a global set-up skipped as passed.
  local passed failures skipped
  passed=$(grep -acE '\[       OK \] .* ms\)$' "$log")
  failures=$(grep -acE '\[  FAILED  \] .* ms\)$' "$log")
  skipped=$(grep -acE '\[  SKIPPED \] .* ms\)$' "$log")
  # A program that ended badly, or ran nothing, has a failure of its own.
  if [ "$failures" -eq 0 ] && { [ "$status" -ne 0 ] || [ "$passed" -eq 0 ]; }; then failures=1; fi
  if [ "$passed" -eq 0 ]; then
    echo "$name: no test ran"
    grep -am 1 '^\[  SKIPPED' "$log"
  fi
  record "$name" "$passed" "$failures" "$skipped" $((SECONDS - start))
  if [ "$failures" -gt 0 ]; then
    grep -aE '^\[  FAILED|Failure|terminate|off by|rror|Which is' "$log" | cut -c1-200 | head -n 25
  fi
}

run_pytest() {  # suite's name, pytest's arguments
  local name=$1 log=$out/logs/$1.log start=$SECONDS status=0 counts
  shift
  (cd "$here/py" && PYTHONPATH=site timeout 420 python3 -m pytest -q -p no:cacheprovider "$@") >"$log" 2>&1 || status=$?
  counts=$(tail -n 1 "$log")  # "3 failed, 97 passed, 20 skipped in 5.02s"
  count_of() { grep -oE "[0-9]+ $1" <<<"$counts" | cut -d' ' -f1; }
  local passed failures skipped
  passed=$(count_of passed) failures=$(count_of failed) skipped=$(count_of skipped)
  # A run that ended badly, or ran nothing, has a failure of its own.
  if [ -z "$failures" ] && { [ "$status" -ne 0 ] || [ -z "$passed" ]; }; then failures=1; fi
  record "$name" "${passed:-0}" "${failures:-0}" "${skipped:-0}" $((SECONDS - start))
  if [ "${failures:-0}" -gt 0 ]; then grep -aE '^(E  |FAILED|ERROR)|rror' "$log" | cut -c1-300 | tail -n 40; fi
}

run_command() {  # suite's name, command
  local name=$1 log=$out/logs/$1.log start=$SECONDS
  shift
  if timeout 420 "$@" >"$log" 2>&1; then
    record "$name" 1 0 0 $((SECONDS - start))
  else
    record "$name" 0 1 0 $((SECONDS - start))
    tail -n 12 "$log" | cut -c1-200
  fi
}

filter_of() {  # program -> the tests that run on a GPU
  case $1 in contract_test) echo '*/cuda_*:*/sm90_*' ;; *) echo '*' ;; esac
}

# A card has no test of another's instructions.
is_for_this_card() { [ "$1" != ptx_test ] || [ "$capability" = 9.0 ]; }

# Few tests, since racecheck slows a kernel down a hundredfold, by each of its accesses to shared
# memory: of each kernel empty rows, split rows and their merge, and rows of odd widths or of many
# heads where they are its own; the operations; captured runs, for racecheck only those of few query
# rows times keys (the 200 re-plans have 400 times as many: six stand for them, and of 128 heads, which
# have 8 times as many again, for all). The other tools take partial rows of many heads, and narrow
# rows over many steps, as well, and the 200 re-plans of all but 128 heads.
sanitized_tests() {  # tool, suite -> filter
  local few="*EmptyRows*/$2:*MakeARowIndependentOfItsBatch/$2"
  case $1-$2 in
    racecheck-sm90_dense) echo "$few:*AnyNumberOfHeadsIsServed/$2" ;;
    racecheck-cuda_tensor_core) echo "$few:*AnyShapeIsServed/$2" ;;
    *-sm90_dense) echo "$few:*AnyNumberOfHeads*/$2" ;;
    *-cuda_tensor_core) echo "$few:*AnyShapeIsServed/$2:*NarrowRows*/$2" ;;
    racecheck-capture)
      echo '*SixReplans*:*RunsOfOneCapture*:*ReplaysOnTwoStreams*:-*RunsOfOneCapture*128_heads:*ReplaysOnTwoStreams*128_heads'
      ;;
    *-capture) echo '*:-*TwoHundredReplans*128_heads' ;;
    *-operations) echo '*' ;;
    *) echo "$few" ;;
  esac
}

run_sanitizer() {  # tool
  local suite program limit=${SANITIZER_SECONDS:-90} hopper=
  if [ "$capability" = 9.0 ]; then hopper=sm90_dense; fi
  for suite in $hopper cuda_tensor_core cuda_simt operations capture; do
    program=contract_test
    case $suite in operations | capture) program=cuda_${suite}_test ;; esac
    run_gtest "$1-$suite" compute-sanitizer --tool "$1" --error-exitcode 9 \
      "$here/$program" "--gtest_filter=$(sanitized_tests "$1" "$suite")"
  done
}

run_stage() {
  local program
  suites=()
  rm -f "$out/$1.json"  # of an earlier run
  case $1 in
    memcheck | racecheck | initcheck | synccheck) run_sanitizer "$1" ;;
    replay)
      run_command replay-trace "$here/mla" replay "$here/data/trace.jsonl" --requests 300 --layers 1 \
        --check 1 --device cuda --threads "$(nproc)" --json "$out/replay_trace.json"
      ;;
    calibrate)
      run_command calibrate "$here/mla" bench --device cuda --calibrate --note "${COMMIT:-}" \
        --json "$out/costs.json"
      ;;
    bench)
      local peers=() peer
      for peer in "$here"/peers/*.so; do [ -e "$peer" ] && peers+=(--peer "$peer"); done
      run_command bench "$here/mla" bench --device cuda --rounds "${BENCH_ROUNDS:-5}" --note "${COMMIT:-}" \
        --json "$out/grid.json" "${peers[@]}"
      ;;
    python)
      run_pytest pytest-cuda -m cuda
      run_command python-host env PYTHONPATH="$here/py/site" python3 "$here/py/python/bench/host_time.py" \
        --device cuda --note "${COMMIT:-}" --json "$out/python_host.json"
      ;;
    *)
      for program in $(programs_of "$1"); do
        is_for_this_card "$program" || continue
        run_gtest "$program" "$here/$program" "--gtest_filter=$(filter_of "$program")"
      done
      ;;
  esac
  if [ "$1" = engine ]; then
    run_command example "$here/engine" cuda
    run_command replay-sample "$here/mla" replay "$here/data/sample.jsonl" --device cuda
    run_command replay-speculate "$here/mla" replay "$here/data/sample.jsonl" --device cuda \
      --speculate 3 --layers 2
  fi
  if [ "$1" = layer ]; then
    for file in "$here"/data/layers/*.safetensors; do
      run_command "layer-$(basename "$file" .safetensors)" "$here/mla" layer "$file" --device cuda
    done
  fi
  local IFS=,
  echo "{\"stage\": \"$1\", \"suites\": [${suites[*]}]}" >"$out/$1.json"
}

merge() {
  python3 - "$1" "$2" "${required[@]}" <<'PY'
import json, os, sys
out, commit, *required = sys.argv[1:]
machine = json.load(open(os.path.join(out, "machine.json")))
suites = []
for stage in sorted([*required, "calibrate"]):
    missing = None
    try:
        found = json.load(open(os.path.join(out, stage + ".json")))["suites"]
        if not found:
            missing = "did not run"
    except FileNotFoundError:
        found, missing = [], "did not run" if stage in required else None
    except (ValueError, KeyError):
        found, missing = [], "its results are cut off"
    suites += [dict(stage=stage, **suite) for suite in found]
    if missing:
        suites.append({"stage": stage, "name": missing, "passed": 0, "failed": 1, "skipped": 0, "seconds": 0})
failed = sum(s["failed"] for s in suites)
print(json.dumps({**machine, "commit": commit,
                  "passed": sum(s["passed"] for s in suites),
                  "failed": failed,
                  "skipped": sum(s["skipped"] for s in suites),
                  "suites": suites}, indent=1))
sys.exit(1 if failed else 0)
PY
}

case ${1:-} in
  -h | --help) usage && exit ;;
  pack)
    [ $# -eq 2 ] || refuse "pack wants a folder"
    pack "$2"
    exit
    ;;
  merge)
    [ $# -eq 3 ] || refuse "merge wants the folder of the results and their commit"
    [ -f "$2/machine.json" ] || refuse "$2 is no folder of results: it has no machine.json"
    merge "$2" "$3"
    exit
    ;;
esac

out=$here/results stages=() failed=0
while [ $# -gt 0 ]; do
  case $1 in
    --out)
      [ -n "${2:-}" ] || refuse "--out wants a folder"
      out=$2 && shift
      ;;
    sanitizers) stages+=("${sanitizers[@]}") ;;
    *)
      [[ " ${required[*]} calibrate " == *" $1 "* ]] ||
        refuse "no stage $1; there are: ${required[*]} sanitizers calibrate"
      stages+=("$1")
      ;;
  esac
  shift
done
[ ${#stages[@]} -gt 0 ] || { usage >&2 && exit 2; }
nvidia-smi >/dev/null 2>&1 || refuse "this machine has no NVIDIA GPU"

set +e +o pipefail  # a failure is counted, and the rest still runs
mkdir -p "$out/logs"
export LD_LIBRARY_PATH=$here/lib:${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64
export MLA_TEST_DEVICE=cuda MLA_GOLDEN_LAYERS=$here/data/layers
IFS=, read -r card driver memory capability < <(
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader)
capability=${capability# }
printf '{"card": "%s", "driver": "%s", "memory": "%s", "date": "%s"}\n' \
  "$card" "${driver# }" "${memory# }" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >"$out/machine.json"
for stage in "${stages[@]}"; do
  printf '\n== %s\n' "$stage"
  run_stage "$stage"
done
exit $failed
