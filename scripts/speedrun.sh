#!/usr/bin/env bash
# A model learns GSM8K from right answers alone, on one GPU: accuracy on the whole test set before
# and after, and the seconds of each part.
#   scripts/speedrun.sh MODEL TRAIN TEST OUT [options of recipes/rlvr.py]
# MODEL is a Hugging Face folder (from_gguf.py makes one of a GGUF file), TRAIN and TEST are GSM8K's
# train.jsonl and test.jsonl as published. Training takes 40 GiB for 0.5B; with less, give
# --tokens-per-microbatch 16384 (25 GiB). Two seeds of it may be a record: see docs/records.md.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 4 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
model=$1 train=$2 test=$3 out=$4
shift 4
source scripts/venv.sh
enter_venv

data=$(dirname "$out")  # the same for all seeds
mkdir -p "$out"
python scripts/convert_data.py gsm8k "$train" "$data/gsm8k-train.jsonl"
python scripts/convert_data.py gsm8k "$test" "$data/gsm8k-test.jsonl"
asked=(--data "$data/gsm8k-test.jsonl" --max-tokens 512 --kv-cache-gib 16)
python recipes/evaluate.py --model "$model" "${asked[@]}" --run-dir "$out/before"
python recipes/rlvr.py --model "$model" --data "$data/gsm8k-train.jsonl" --run-dir "$out/rlvr" \
  --eval-every 0 --max-tokens 512 --prompts-per-step 128 --samples-per-prompt 8 --steps 90 \
  --updates-per-step 4 --drop-equal --max-refills 0 --lr 3e-6 --schedule linear \
  --kv-cache-gib 16 --tokens-per-microbatch 32768 --rollouts-every 0 --checkpoint-minutes 0 "$@"
python recipes/evaluate.py --model "$out/rlvr/model" "${asked[@]}" --run-dir "$out/after"
python scripts/record.py "$out"
