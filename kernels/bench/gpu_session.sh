#!/bin/bash
# Checks, kernel times and whole steps in one go; the first pass compiles on all cores and its times are thrown away.
# usage: kernels/bench/gpu_session.sh OUT_DIR ["bench_step arguments" ...]
out=$1
shift
export PYTHONPATH=$PWD:$PWD/kernels PYTHONUNBUFFERED=1
bench=kernels/bench
for checks in attention rows,write_kv sample,moe; do
  python3 $bench/check_and_time.py --checks $checks --times none >"$out/check-$checks.txt" 2>&1 &
done
python3 $bench/check_and_time.py --skip-checks --times decode,prefill >"$out/warm-1.txt" 2>&1 &
python3 $bench/check_and_time.py --skip-checks --times moe >"$out/warm-2.txt" 2>&1 &
wait
cat "$out"/check-*.txt | grep -c "^check "
grep -h "FAILED\|Error" "$out"/check-*.txt
python3 $bench/check_and_time.py --skip-checks --times decode,prefill,rows,moe --out "$out/kernels.json" >"$out/kernels.txt" 2>&1
tail -n 1 "$out/kernels.txt"
number=0
for arguments in "$@"; do
  number=$((number + 1))
  python3 $bench/bench_step.py --out "$out/step-$number.json" $arguments >"$out/step-$number.txt" 2>&1
  tail -n 1 "$out/step-$number.txt" | cut -c1-300
done
