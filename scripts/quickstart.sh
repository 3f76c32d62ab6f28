#!/usr/bin/env bash
# From a fresh clone to a model that has learnt: builds a tiny model, warms it up with supervised
# dialogues, then trains it by reinforcement and shows its accuracy on questions it never saw.
#   scripts/quickstart.sh [seed]      a good 2 minutes on two CPU cores after installation
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
enter_venv

seed=${1:-0}
out=runs/quickstart-$seed-$(date +%Y%m%d-%H%M%S)
task=reverse:5

echo; echo "1. a tiny model: one million parameters, one token per character"
python -m roll_lite.models.tiny "$out/tiny" --seed "$seed"

echo; echo "2. warm-up: imitate a careless teacher, who forgets the last letter seven times in ten"
python recipes/sft.py --model "$out/tiny" --data $task --seed "$seed" \
  --steps 140 --careless 0.7 --run-dir "$out/sft"

echo; echo "3. reinforcement learning: sample, score, reinforce"
python recipes/rlvr.py --model "$out/sft/model" --data $task --seed "$seed" --run-dir "$out/rlvr"

echo; echo "4. the curve: accuracy on held-out questions"
python -m roll_lite.report.curve "$out/rlvr" eval/pass@1
