#!/usr/bin/env bash
# Runs the official client libraries against clusters on this machine: openai, anthropic, LangChain, the Agents SDK, litellm and instructor.
# ci/test.sh runs it too. Without PyPI the tests are skipped, with a message.
#
#   ci/clients.sh                runs all tests of ci/clients
#   ci/clients.sh -k langchain   passes its arguments to pytest
#   ci/clients.sh load-tools     runs the load tools aiperf and guidellm instead, which ci/test.sh does not (they need 6 GB)
#   ci/clients.sh lock           renews ci/clients/*.txt, the versions of all packages, from ci/clients/*.in
#
# The libraries are installed in target/ci-clients (400 MB). PYTHON: the Python to use, 3.11 or later [default: python3].
# TANDEM_MODEL: the model's GGUF file [default: the default model, fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
folder="$target/ci-clients" tandem="$target/release/tandem" python="${PYTHON:-python3}"
export UV_CACHE_DIR="$folder/cache" UV_LINK_MODE=hardlink

fail() {
    printf 'ci/clients.sh: %s\n' "$*" >&2
    exit 1
}

install_uv() {
    [ -x "$folder/uv/bin/uv" ] && return
    rm -rf "$folder"
    "$python" -m venv "$folder/uv" || fail "no venv: install Python 3.11 or later with venv (Debian: apt-get install python3-venv)"
    "$folder/uv/bin/python" -m pip install -q uv==0.13.9 && return
    if "$folder/uv/bin/python" -m pip index versions uv >/dev/null 2>&1; then
        fail "uv was not installed: see what pip says above"
    fi
    rm -rf "$folder"
    echo "PyPI cannot be reached: the tests of client libraries are SKIPPED"
    exit 0
}

# Installs the packages of ci/clients/$1.txt in an environment of their own.
install() {
    local environment="$folder/$1" lock="ci/clients/$1.txt"
    cmp -s "$lock" "$environment/installed.txt" && return
    rm -rf "$environment"
    "$folder/uv/bin/uv" venv -q --python "$(command -v "$python")" "$environment"
    "$folder/uv/bin/uv" pip install -q --python "$environment/bin/python" --only-binary :all: --requirement "$lock" ||
        fail "the packages of $lock were not installed: see what uv says above"
    cp "$lock" "$environment/installed.txt"
}

# Runs tests in one of the environments.
run() {
    local environment=$1 status=0
    shift
    printf '\nWith the packages of ci/clients/%s.in:\n' "$environment"
    timeout --kill-after=20 900 "$folder/$environment/bin/python" -B -m pytest -q --disable-warnings -p no:cacheprovider --rootdir ci/clients "$@" || status=$?
    # 5: the caller's arguments select no test of this environment.
    [ "$status" -eq 5 ] || [ "$status" -eq 0 ] || failed=1
}

case "${1:-}" in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    lock)
        install_uv
        for name in openai3 openai2 aiperf guidellm; do
            "$folder/uv/bin/uv" pip compile -q --universal --upgrade --no-annotate --python-version 3.11 "ci/clients/$name.in" -o "ci/clients/$name.txt" \
                --custom-compile-command "ci/clients.sh lock"
        done
        exit
        ;;
esac
install_uv
mkdir -p "$folder/logs"
export NO_PROXY=127.0.0.1
[ -x "$tandem" ] || cargo build --release --locked
if [ "${1:-}" = load-tools ]; then
    install aiperf
    install guidellm
    export TRANSFORMERS_VERBOSITY=error
    exec timeout --kill-after=20 1800 "$folder/aiperf/bin/python" -B ci/clients/load_tools.py "$tandem" "$folder"
fi
install openai3
install openai2
if [ -z "${TANDEM_MODEL:-}" ]; then
    lines=$("$tandem" model fetch) || fail "the default model was not fetched: see what tandem model fetch says above"
    TANDEM_MODEL=${lines##*$'\n'}
fi
export CLIENTS_TANDEM="$tandem" CLIENTS_MODEL="$TANDEM_MODEL" CLIENTS_LOGS="$folder/logs"
# The libraries send nothing to other hosts.
export OPENAI_AGENTS_DISABLE_TRACING=1 LANGSMITH_TRACING=false LITELLM_LOCAL_MODEL_COST_MAP=True
failed=
run openai3 ci/clients/test_{openai_*,anthropic,langchain,agents}.py "$@"
run openai2 ci/clients/test_{openai_*,litellm,instructor}.py "$@"
[ -z "$failed" ] || fail "tests failed; the clusters' logs are in $folder/logs"
