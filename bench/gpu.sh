#!/bin/bash
# Every check that needs a GPU, in under five minutes: bench/gpu.sh [FOLDER]
# Leaves FOLDER/gpu.json and a log of each part, and prints one table. A part that fails, or takes too long, is recorded; the next one runs.
# DEVICE=cpu bench/gpu.sh tries the script itself on tiny shapes, where there is no GPU.
cd "$(dirname "$0")/.." || exit
out=${1:-out/gpu} device=${DEVICE:-cuda} python=${PYTHON:-python} deadline=285
mkdir -p "$out/warm" || exit
rm -rf "$out"/*.json "$out"/*.log "$out"/*.status "$out/warm"/* "$out/mlm"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1
dtypes="bfloat16 float16 float32" compile="true false"
if [ "$device" = cpu ]; then
    export TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1
    dtypes=float32 compile=false deadline=900 quick="--head_dim 16 --dtype float32" train="--device cpu --max_iters 10 --tokens_per_iter 1024 --eval_tokens 1024"
elif ! "$python" -c "import torch, sys; sys.exit(not torch.cuda.is_available())"; then
    echo "no GPU that PyTorch can use here; DEVICE=cpu $0 tries the script itself"
    exit 1
fi

part() {  # NAME SECONDS COMMAND...: its output to FOLDER/NAME.log, its exit status and seconds to FOLDER/NAME.status
    local name=$1 limit=$2 begun=$SECONDS status=skipped
    shift 2
    if [ "$device" = cpu ]; then limit=300; fi
    if [ $((deadline - SECONDS)) -lt "$limit" ]; then limit=$((deadline - SECONDS)); fi
    if [ "$limit" -gt 3 ]; then
        timeout -k 10 "$limit" "$@" > "$out/$name.log" 2>&1 < /dev/null
        status=$?
    fi
    echo "$status $((SECONDS - begun))" > "$out/$name.status"
    echo "$name: $status, $((SECONDS - begun)) s"
}

step() {  # NAME SECONDS FOLDER OBJECTIVE ATTENTION COMPILE
    part "$1" "$2" "$python" bench/gpu_checks.py step --device "$device" --objective "$4" --attention "$5" --compile "$6" --json "$3/step-$4-$5-$6.json"
}

# side by side, since nothing is timed: correctness, and compiled steps that fill torch.compile's cache
for dtype in $dtypes; do
    part "correct-$dtype" 110 "$python" bench/gpu_checks.py correct --device "$device" --dtype "$dtype" --json "$out/correct-$dtype.json" &
done
if [ "$device" != cpu ]; then for objective in mlm clm; do for attention in triton sdpa; do
    step "warm/$objective-$attention" 110 "$out/warm" $objective $attention true &
done; done; fi
wait

# one at a time
part attention 75 "$python" bench/attention.py --quick --device "$device" --json "$out/attention.json" $quick
for compile in $compile; do for objective in mlm clm; do for attention in triton sdpa; do
    step "step-$objective-$attention-$compile" 40 "$out" $objective $attention $compile
done; done; done
part train 60 "$python" -m torch.distributed.run --nproc_per_node=1 train.py --objective mlm --mask_ratio 0.4 --out_dir "$out/mlm" $train
"$python" bench/gpu_checks.py report "$out"
