#!/usr/bin/env bash
# Runs all checks: ruff, mypy, and pytest (fast tests, then those with verl, vLLM and Ray, then real training).
#
#   scripts/test.sh                 everything, 40 minutes to an hour on 2 cores
#   scripts/test.sh -m "not e2e"    any arguments of pytest
#
# Sets everything up in .venv first. May be interrupted and run again; leaves no process behind.
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

say "2/3 ruff and mypy"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy

say "3/3 pytest"
# Training and tests share the cores; more threads only get into each other's way.
export OMP_NUM_THREADS=1
if (($#)); then
    exec .venv/bin/python -m pytest "$@"
fi
failed=0
# Two at a time where a test leaves a core idle; files stay together, since their fixtures are theirs. Those with several
# engines or a trainer need both cores, and most of the memory.
.venv/bin/python -m pytest -n 2 --dist loadfile -m "not e2e" || failed=1
.venv/bin/python -m pytest -m e2e || failed=1
exit "$failed"
