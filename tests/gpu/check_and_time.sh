#!/usr/bin/env bash
# Everything that needs a CUDA device, in one call: the checks first, then, if all passed, the times.
#
#     bash tests/gpu/check_and_time.sh [FOLDER [checks]]
#
# FOLDER (default ksopt-report-gpu) gets a log of every step and what the steps write; with the word
# checks nothing is timed. ksopt must be importable by $PYTHON (default python3). Exits with 1 if a
# step failed, 2 without a CUDA device.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-ksopt-report-gpu}
python=${PYTHON:-python3}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "$python finds no CUDA device through torch: there is nothing to check here" >&2
  exit 2
fi
mkdir -p "$out"
failed=0
workers=()

# step NAME SECONDS COMMAND...: runs a command under a limit, and says how it ended and its last words.
step() {
  local name=$1 limit=$2 status start=$SECONDS
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  [ "$status" -eq 124 ] && echo "stopped after $limit seconds" >>"$out/$name.log"
  if [ "$status" -eq 0 ]; then
    echo "passed  $name ($((SECONDS - start)) s): $(tail -n 1 "$out/$name.log")"
  else
    echo "FAILED  $name ($((SECONDS - start)) s, status $status):"
    tail -n 15 "$out/$name.log" | sed 's/^/    /'
    failed=1
  fi
}

devices=$("$python" -c 'import torch; print(torch.cuda.device_count())')
"$python" -c 'import xdist' 2>/dev/null && workers=(-n "$((4 * devices))")
step tests 400 "$python" -m pytest -m gpu -v --tb=short --durations=20 "${workers[@]}" \
  tests/gpu tests/measure/test_roofline.py tests/measure/test_timing.py \
  --ignore tests/gpu/test_edge_sizes_on_gpu.py

# These fill most of a device's memory, so one process runs them, with nothing beside it.
step edge-sizes 400 "$python" -m pytest -m gpu -v --tb=short --durations=5 tests/gpu/test_edge_sizes_on_gpu.py

step random-problems 240 "$python" tests/gpu/random_problems.py --count 4000 --workers $((4 * devices)) --seconds 200

# The processes above have one device each.
[ "$devices" -gt 1 ] && step two-devices 150 "$python" -m pytest -m gpu -q tests/gpu \
  --ignore tests/gpu/test_edge_sizes_on_gpu.py tests/nn/test_distributed.py -k two_devices

# The counter of energy is the whole board's, so these tests leave themselves out above.
[ "${#workers[@]}" -gt 0 ] && "$python" -c 'import pynvml' 2>/dev/null \
  && step energy-tests 120 "$python" -m pytest -m gpu -q tests/gpu/test_energy_on_gpu.py

# The sanitizers take no times, so they share the device, or take one each where there are several;
# with three, the search need not wait for them.
checks=()
beside() {
  local device=$((${#checks[@]} % devices))
  (
    failed=0
    export CUDA_VISIBLE_DEVICES=$device
    step "$@"
    exit "$failed"
  ) &
  checks+=($!)
}
wait_for_all() {
  local check
  for check in "${checks[@]}"; do wait "$check" || failed=1; done
  checks=()
}
if command -v compute-sanitizer >/dev/null; then
  sanitize=(compute-sanitizer --error-exitcode 1 --report-api-errors no)
  beside memcheck 300 "${sanitize[@]}" --tool memcheck "$python" tests/gpu/sanitize.py
  beside racecheck 300 "${sanitize[@]}" --tool racecheck "$python" tests/gpu/sanitize.py
  beside racecheck-chain_grads 300 "${sanitize[@]}" --tool racecheck "$python" tests/gpu/sanitize.py chain_grads
  for kernels in chains epilogues weight_grads input_grads chain_grads; do
    beside "memcheck-$kernels" 300 "${sanitize[@]}" --tool memcheck "$python" tests/gpu/sanitize.py "$kernels"
  done
else
  echo "skipped memcheck, racecheck: there is no compute-sanitizer on the PATH"
fi
[ "$devices" -lt 3 ] && wait_for_all
beside search 120 "$python" -m ksopt search --dims 768x3072 --budget 25% --device cuda --out "$out/search"
wait_for_all

if [ "$failed" -ne 0 ]; then
  echo "nothing is timed: a wrong kernel has no speed"
  exit 1
fi
[ "${2:-}" = checks ] && exit 0
step host-time 120 "$python" docs/experiments/host_time.py
step projection 120 "$python" docs/experiments/projection_time.py
if "$python" -c 'import pynvml' 2>/dev/null; then
  step energy 120 "$python" -m ksopt search --dims 768x3072 --budget 25% --dtype bf16 --trials 8 --energy \
    --device cuda --out "$out/energy"
else
  echo "skipped energy: there is no nvidia-ml-py (pip install 'ksopt[energy]')"
fi
step tiles 150 "$python" docs/experiments/tiles.py mma16 --tiles 20 --out "$out/tiles.csv"
for layout in batch_first batch_last; do
  step "bench-$layout" 150 "$python" -m ksopt bench kernels --patterns sample:12 --dtype float16 --layout "$layout" \
    --device cuda --out "$out/bench-$layout"
done
exit "$failed"
