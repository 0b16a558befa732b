#!/usr/bin/env bash
# Check every path that needs a GPU: the tests that use one, then the benchmarks that compare its results and speed.
#
#   tools/check_gpu.sh [BEFORE]    # BEFORE: another checkout, with which times are compared in turns
#
# Run it on a machine with a GPU after a change of kernels, captured decoding or training. The tests take about five
# minutes, the benchmarks half an hour. It ends at the first failure. ONLY=tests leaves out the benchmarks.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
python=${PYTHON:-python}
$python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no GPU on this machine.")'
$python -m compileall -q regard
# Kernels compiled rather than interpreted, captured graphs, training in bfloat16, fused losses, image batches.
mapfile -t tests < <(grep -rlE 'cuda|triton' tests --include='test_*.py' | sort)
$python -m pytest -q "${tests[@]}"
[ "${ONLY:-}" != tests ] || exit 0
$python benchmarks/attention.py --device cuda --rounds 1 --no-compiled   # all scores and masks, against the reference
$python benchmarks/concat.py --device cuda --small                       # errors of additive attention
$python benchmarks/recording.py --device cuda
$python benchmarks/decoding.py --device cuda --rounds 1                  # static caches, captured steps, search kernels
$python benchmarks/serving_gpu.py --device cuda --runs 1                 # continuous batching
$python benchmarks/encoders_gpu.py
$python benchmarks/distributed_gpu.py                                    # DDP and FSDP2 with one rank
$python benchmarks/training_gpu.py --only base --seconds 120             # captured updates, fused cross-entropy
$python benchmarks/images_speed.py --batch 256
[ $# = 0 ] || $python benchmarks/compare_checkouts.py "$1" .
