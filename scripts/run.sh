#!/usr/bin/env bash
# Trains a recipe with stock verl and then with WAR, on a machine without GPU, and sets the numbers side by side.
#
#   scripts/run.sh [--recipe code_agent|search_agent] [--algorithm grpo|ppo] [--steps N] [further options]
#
# Sets everything up in .venv first. May be interrupted and run again at any point: it goes on where it stopped.
# Results: runs/. All options: .venv/bin/verl-war compare --help
set -euo pipefail

case "${1:-}" in -h | --help)
    sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "$0"
    exit 0
    ;;
esac

# shellcheck source=scripts/setup_env.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"

say "1/3 set-up"
setup_env

say "2/3 verl-war doctor: versions, patches, memory"
if [ -n "${ENVIRONMENT_IS_NEW:-}" ]; then
    .venv/bin/verl-war doctor
else
    .venv/bin/verl-war doctor --quick
fi

say "3/3 verl-war compare: stock verl, then WAR"
exec .venv/bin/verl-war compare "$@"
