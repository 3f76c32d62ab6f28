#!/usr/bin/env bash
# From a fresh clone to a model that has learnt: builds a tiny model, warms it up with supervised
# dialogues, then trains it by reinforcement and shows its accuracy on what it never saw.
#   scripts/quickstart.sh [seed]             reverses words: a good 2 minutes on two CPU cores
#   scripts/quickstart.sh agentic [seed]     walks over frozen lakes, turn by turn: 3 minutes
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
enter_venv

kind=rlvr
if [ "${1:-}" = agentic ]; then
  kind=agentic
  shift
fi
seed=${1:-0}
out=runs/quickstart-$seed-$(date +%Y%m%d-%H%M%S)

echo; echo "1. a tiny model: one million parameters, one token per character"
roll-lite tiny "$out/tiny" --seed "$seed"

if [ $kind = rlvr ]; then
  task=reverse:5
  echo; echo "2. warm-up: imitate a careless teacher, who forgets the last letter seven times in ten"
  python recipes/sft.py --model "$out/tiny" --data $task --seed "$seed" \
    --steps 140 --careless 0.7 --run-dir "$out/sft"

  echo; echo "3. reinforcement learning: sample, score, reinforce"
  python recipes/rlvr.py --model "$out/sft/model" --data $task --seed "$seed" --run-dir "$out/rlvr"
else
  lake=frozen_lake:size=3,style=short
  echo; echo "2. warm-up: imitate a careless player, who plays three moves in ten at random"
  roll-lite envs traces $lake --history 0 --mistakes 0.3 --seed "$seed" \
    --out "$out/traces.jsonl"
  python recipes/sft.py --model "$out/tiny" --data "$out/traces.jsonl" --seed "$seed" \
    --steps 60 --eval-every 0 --run-dir "$out/sft"

  echo; echo "3. reinforcement learning: play, reinforce (random play reaches the goal in 36% of the lakes)"
  python recipes/agentic.py --model "$out/sft/model" --data $lake --history 0 --seed "$seed" \
    --max-tokens 6 --steps 20 --prompts-per-step 24 --env-workers 1 --eval-prompts 128 \
    --eval-samples 2 --run-dir "$out/agentic"
fi

echo; echo "4. the curve: share that is right, of questions or lakes it never saw"
roll-lite report "$out/$kind" --curve eval/pass@1
