#!/usr/bin/env bash
# One command for one data-centre GPU: from nothing to a page of results in at most 12 minutes.
#
#     bash bench/speedrun.sh          # -> out/speedrun/README.md: tables, curves, versions, GPU, date
#     bash bench/speedrun.sh --dry    # the same stages at tiny size on a CPU -> out/speedrun-dry/
#
# Trains the gpu preset's backbone for 5 minutes, then the four drafters and EAGLE-2 for a minute each, side by
# side, and decodes with all of them, and with transformers' generate, at T = 0 and 1 with trees of 64 nodes.
# Every stage has its limit. One that is done is not done again: after Ctrl-C, an error or a limit the same
# command goes on. To start anew, remove the folder.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}

case "${1:-}" in
"")
    OUT=${OUT:-out/speedrun}
    PATIENCE=1 DEVICE=cuda DATA=python BACKBONE="--minutes 5" DRAFTER="--minutes 1" EAGLE="--train-minutes 1"
    PROMPTS="--prompts 8 --prompt-tokens 64 --new-tokens 128"
    ;;
--dry)
    OUT=${OUT:-out/speedrun-dry}
    PATIENCE=5 DEVICE=cpu DATA=bench/prompts.txt    # who knows what else this CPU does: limits times 5
    BACKBONE="--minutes 0.02 --batch-size 2 --n-layer 2 --n-head 2 --n-kv-head 2 --n-embd 32 --n-ffn 64"
    BACKBONE="$BACKBONE --vocab-size 300 --block-size 128 --first-length 32"
    DRAFTER="--minutes 0.01 --batch-size 2" EAGLE="--train-minutes 0.01"
    PROMPTS="--prompts 1 --prompt-tokens 8 --new-tokens 12"
    export OMP_NUM_THREADS=1
    ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "bench/${0##*/}"
    case $1 in -h | --help) exit 0 ;; *) exit 2 ;; esac
    ;;
esac
COMMON="--device $DEVICE --data $DATA --out $OUT"

failed() {    # NAME STATUS
    case $2 in
    124) echo "error: $1 was not ready in its time: the same command goes on from here" >&2 ;;
    130) echo "stopped in $1: the same command goes on from here" >&2 ;;
    *) echo "error: $1 failed, $OUT/$1.log says why: the same command tries it again" >&2 ;;
    esac
    exit "$2"
}

stage() {    # NAME SECONDS COMMAND..: once, within its time; what it says is kept in OUT/NAME.log
    local limit=$(($2 * PATIENCE))
    if [ -e "$OUT/$1.done" ]; then
        echo "== $1: done before"
        return
    fi
    echo "== $1, at most $limit s"
    timeout --foreground "$limit" "${@:3}" 2>&1 | tee -i "$OUT/$1.log" | sed '/^{/d' || failed "$1" $?
    touch "$OUT/$1.done"
}

# What is missing? All of it at once, before the first minute is spent.
for program in "$PYTHON" timeout; do
    if ! command -v "$program" > /dev/null; then
        echo "error: missing: the command $program" >&2
        exit 2
    fi
done
mkdir -p "$OUT"
"$PYTHON" - "$DEVICE" "$OUT" <<'END'
import importlib.util, shutil, sys
device, out = sys.argv[1:]
here = lambda *names: [name for name in names if importlib.util.find_spec(name)]
needed = "torch", "transformers", "tiktoken", "tokenizers", "safetensors", "numpy", "tqdm"
missing = [f"the package {name} (pip install -r requirements.txt)" for name in needed if not here(name)]
if device == "cuda" and here("torch"):
    import torch
    if not torch.cuda.is_available():
        missing.append("a GPU (torch.cuda.is_available() says no; --dry does without)")
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        missing.append(f"a GPU that computes in bfloat16 ({torch.cuda.get_device_name()} does not)")
free = shutil.disk_usage(out).free / 1e9
if free < 5:
    missing.append(f"5 GB of disk for {out} ({free:.1f} are free)")
if missing:
    print("error: missing: " + "; ".join(missing), file=sys.stderr)
    sys.exit(2)
if not here("matplotlib"):
    print("note: without matplotlib there will be tables, but no curves (pip install matplotlib)")
END

stage backbone 390 "$PYTHON" train.py --method backbone --preset gpu --resume $COMMON $BACKBONE

DRAFTERS="medusa amphista hidden_transfer moa"
echo "== $DRAFTERS eagle2, side by side, at most $((135 * PATIENCE)) s; they write to $OUT/*.log"
set -m    # each in a process group of its own, to which Ctrl-C is passed on
for method in $DRAFTERS; do
    stage "$method" 135 "$PYTHON" train.py --method "$method" --preset gpu --resume $COMMON $DRAFTER > /dev/null &
done
stage eagle2 135 "$PYTHON" bench/run.py --methods eagle2 $EAGLE $COMMON --temperatures 0 --prompts 1 \
    --prompt-tokens 8 --new-tokens 8 --json "$OUT/eagle2.json" --resume > /dev/null &
set +m
trap 'kill -INT -- $(jobs -p | sed s/^/-/); wait; exit 130' INT TERM
wait
trap - INT TERM
for method in $DRAFTERS eagle2; do
    [ -e "$OUT/$method.done" ] || exit 1
done

stage table 135 "$PYTHON" bench/run.py --methods "${DRAFTERS// /,},eagle2,hf" --temperatures 0,1 --nodes 64 \
    $COMMON $PROMPTS --json "$OUT/table.json" --resume

if "$PYTHON" -c "import matplotlib" 2> /dev/null; then
    "$PYTHON" plumbing/plot.py --out "$OUT"
fi
"$PYTHON" bench/report.py "$OUT/table.json" > "$OUT/README.md"
echo "== $OUT/README.md, after $SECONDS s"
