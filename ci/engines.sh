#!/usr/bin/env bash
# What ci/vllm.sh and ci/sglang.sh share: both read this file from the repository's folder.
name="${0##*/}"
name="${name%.sh}"
folder="${CARGO_TARGET_DIR:-$PWD/target}/ci-$name"
case "$folder" in /*) ;; *) folder="$PWD/$folder" ;; esac
tandem="${CARGO_TARGET_DIR:-target}/release/tandem"
# The time after which a script ends every process that it has started.
limit_seconds=3600

fail() {
    printf 'ci/%s.sh: %s\n' "$name" "$*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "ci/$name.sh"
}

# Skips a step if its inputs are the same as at its last success.
unless_done() {
    local step=$1 inputs=$2 done_file="$folder/$1.done"
    shift 2
    if [ "$(cat "$done_file" 2>/dev/null)" != "$inputs" ]; then
        local from=$SECONDS
        rm -f "$done_file"
        "$@"
        printf '%s' "$inputs" >"$done_file"
        printf '%s: %d s\n' "$step" $((SECONDS - from))
    fi
}

# Checks the machine; $1 is the first version of Python that fits, and $2 the first later one that does not.
requirements() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "the engine's wheels are tested on Linux on x86-64 only, this is $(uname -s) on $(uname -m)"
    python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "$python is missing: install Python 3.12 (Debian: apt-get install python3 python3-venv)"
    "$python" -c "import sys; sys.exit(not (3, $1) <= sys.version_info < (3, $2))" ||
        fail "$("$python" --version) does not fit the engine: it needs Python 3.$1 or later, before 3.$2; set PYTHON to one"
    command -v readelf >/dev/null || fail "readelf is missing: install binutils (Debian: apt-get install binutils)"
    command -v cc >/dev/null || fail "a C compiler is missing (Debian: apt-get install gcc)"
}

# Makes the virtual environment from requirements.txt and overrides.txt of the folder $1, and stand-ins for CUDA's libraries; sets `site`.
install_packages() {
    rm -rf "$folder/venv" "$folder/stubs"
    "$python" -m venv "$folder/venv" || fail "no venv: install Python 3 with venv (Debian: apt-get install python3-venv)"
    # Only uv can override the dependencies of a package.
    "$folder/venv/bin/python" -m pip install -q uv==0.13.9 || fail "uv was not fetched: see what pip says above"
    "$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --only-binary :all: --no-cache \
        --override "$1/overrides.txt" --requirement "$1/requirements.txt" || fail "the engine was not installed: see what uv says above"
    site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$folder/venv/bin/python" ci/vllm/cuda_stubs.py "$site" "$folder/stubs"
}

# Makes the model's folder from a GGUF file.
make_model() {
    rm -rf "$folder/model"
    LD_LIBRARY_PATH="$folder/stubs" "$folder/venv/bin/python" ci/vllm/model_folder.py "$1" "$folder/model"
}

model() {
    local lines
    if [ -z "${TANDEM_MODEL:-}" ]; then
        [ -x "$tandem" ] || cargo build --release --locked
        lines=$("$tandem" model fetch) || fail "the default model was not fetched: see what tandem model fetch says above"
        TANDEM_MODEL=${lines##*$'\n'}
    fi
    [ -s "$TANDEM_MODEL" ] || fail "the model file $TANDEM_MODEL is missing or empty: correct TANDEM_MODEL"
    export TANDEM_MODEL
    unless_done model "$TANDEM_MODEL $(stat -c '%s %Y' "$TANDEM_MODEL") $(sha256sum ci/vllm/model_folder.py)" make_model "$TANDEM_MODEL"
}

# Sends SIGTERM to the Python program, which then ends its engines, and kills the processes that remain.
end_engines() {
    local file
    if [ -n "${program:-}" ] && kill -TERM "$program" 2>/dev/null; then
        for _ in {1..100}; do
            kill -0 "$program" 2>/dev/null || break
            sleep 0.2
        done
        kill -KILL "$program" 2>/dev/null || true
    fi
    for file in "$run"/*.group "$run"/*/*.group; do
        [ ! -s "$file" ] || kill -KILL -- "-$(<"$file")" 2>/dev/null || true
    done
}

# Runs a Python program in the background, because bash runs traps immediately only while it waits.
with_engines() {
    local program_file=$1 status=0
    shift
    # The logs of earlier runs are kept for a day.
    find "$folder" -maxdepth 1 -name 'run.*' -mtime +0 -exec rm -rf {} +
    run=$(mktemp -d "$folder/run.XXXXXX")
    trap end_engines EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    timeout --kill-after=20 "$limit_seconds" "$folder/venv/bin/python" -B "$program_file" "$folder" "$run" "$@" &
    program=$!
    wait "$program" || status=$?
    program=
    [ "$status" -ne 124 ] || fail "not finished after $limit_seconds s, so everything was ended: see the logs in $run"
    exit "$status"
}
