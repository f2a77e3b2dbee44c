#!/usr/bin/env bash
# Prepare the data if there is none, then train: recipes/code_agent/run.sh [grpo|ppo] [hydra overrides...]
# WAR is on; add rollout@actor_rollout_ref.rollout=rollout for stock verl. NUM_TRAIN, NUM_VAL and SIZE set the data.
set -euo pipefail
cd "$(dirname "$0")/../.."
algorithm=grpo
if [[ ${1:-} == grpo || ${1:-} == ppo ]]; then
  algorithm=$1
  shift
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ ! -f data/code_agent/train.parquet ]]; then
  python -m recipes.code_agent.prepare_data --out data/code_agent --num-train "${NUM_TRAIN:-512}" --num-val "${NUM_VAL:-64}" \
    --seed 1 --size "${SIZE:-demo}"
fi
python -m recipes.datasets data/code_agent/train.parquet data/code_agent/val.parquet
exec python -m verl.trainer.main_ppo --config-path "$PWD/recipes/code_agent/config" --config-name "$algorithm" \
  rollout@actor_rollout_ref.rollout=war "$@"
