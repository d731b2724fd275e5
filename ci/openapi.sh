#!/usr/bin/env bash
# Tests the server against its own OpenAPI document with Schemathesis: requests that the document allows must succeed, requests that it does
# not allow must be refused, and every response must be as described. ci/test.sh runs it. Without PyPI the tests are skipped, with a message.
#
#   ci/openapi.sh          the same requests each time (about a minute)
#   ci/openapi.sh --long   all phases with many more requests, which differ each time (about half an hour); by hand and before a release
#   ci/openapi.sh lock     renews ci/openapi/requirements.txt, the versions of all packages
#
# Schemathesis is installed in target/ci-openapi. PYTHON: the Python to use, 3.10 or later [default: python3].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
folder="$target/ci-openapi" tandem="$target/release/tandem" python="${PYTHON:-python3}" lock=ci/openapi/requirements.txt

fail() {
    printf 'ci/openapi.sh: %s\n' "$*" >&2
    exit 1
}

environment() {
    rm -rf "$folder/venv"
    "$python" -m venv "$folder/venv" || fail "no venv: install Python 3.10 or later with venv (Debian: apt-get install python3-venv)"
}

install() {
    cmp -s "$lock" "$folder/installed.txt" && return
    environment
    if ! "$folder/venv/bin/python" -m pip install -q --only-binary :all: --requirement "$lock"; then
        "$folder/venv/bin/python" -m pip index versions schemathesis >/dev/null 2>&1 && fail "Schemathesis was not installed: see what pip says above"
        echo "PyPI cannot be reached: the tests of the OpenAPI document are SKIPPED"
        exit 0
    fi
    cp "$lock" "$folder/installed.txt"
}

examples=20 phases=examples,coverage,fuzzing limit_seconds=300 random=(--generation-deterministic --seed 1)
case "${1:-}" in
    "") ;;
    --long) examples=2000 phases=examples,coverage,fuzzing,stateful limit_seconds=3600 random=(--generation-database none) ;;
    lock)
        environment
        "$folder/venv/bin/python" -m pip install -q schemathesis
        "$folder/venv/bin/python" -m pip freeze >"$lock"
        exit
        ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    *) fail "unknown argument $1; see --help" ;;
esac
install
[ -x "$tandem" ] || cargo build --release --locked
export NO_PROXY=127.0.0.1
exec timeout --kill-after=20 "$limit_seconds" "$folder/venv/bin/python" -B ci/openapi/run.py "$tandem" "$folder" --phases "$phases" --max-examples "$examples" "${random[@]}"
