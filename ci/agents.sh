#!/usr/bin/env bash
# Runs coding agents, Claude Code, Codex and mistral-vibe, against Tandem in front of a server whose answers a script writes, in the formats of
# six chat templates: a greeting, a tool loop that writes a file, a second turn, a cut and an interrupted call, a conversation that outgrows the
# context, and a session of 40 requests whose cached share the client reports. To be run by hand and before a release; ci/test.sh does not run it.
#
#   ci/agents.sh                        all scenarios (ten minutes), with a release build
#   ci/agents.sh --binary PATH          with this build of tandem
#   ci/agents.sh --only TEXT            only scenarios whose titles contain the text, such as "codex qwen-3.5 "
#
# The programs come from PyPI (320 MB, and 400 MB for mistral-vibe) and are kept in target/ci-agents. PYTHON: the Python to use, 3.10 or later
# [default: python3]. VIBE_PYTHON: the Python for mistral-vibe, 3.12 or later [default: python3.12]; without it, mistral-vibe is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
folder="$target/ci-agents" python="${PYTHON:-python3}" packages=ci/agents/packages.txt binary="" only=""

fail() {
    printf 'ci/agents.sh: %s\n' "$*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case "$1" in
        --binary) binary="${2:?--binary needs a path}"; shift 2 ;;
        --only) only="${2:?--only needs a text}"; shift 2 ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        *) fail "unknown argument $1; see --help" ;;
    esac
done
if ! cmp -s "$packages" "$folder/installed.txt"; then
    mkdir -p "$folder"
    rm -rf "$folder/packages"
    "$python" -m pip install -q --only-binary :all: --no-deps --target "$folder/packages" --requirement "$packages" ||
        fail "the agents were not installed: see what pip says above"
    chmod +x "$folder"/packages/claude_agent_sdk/_bundled/claude "$folder"/packages/codex_cli_bin/bin/codex
    cp "$packages" "$folder/installed.txt"
fi
vibe_python="${VIBE_PYTHON:-python3.12}" vibe=ci/agents/vibe.txt
if ! cmp -s "$vibe" "$folder/vibe/installed.txt"; then
    rm -rf "$folder/vibe"
    if "$vibe_python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        "$vibe_python" -m venv "$folder/vibe"
        "$folder/vibe/bin/python" -m pip install -q --only-binary :all: --requirement "$vibe" ||
            fail "mistral-vibe was not installed: see what pip says above"
        cp "$vibe" "$folder/vibe/installed.txt"
    else
        echo "$vibe_python is no Python 3.12 or later (VIBE_PYTHON selects another): the scenarios of mistral-vibe are SKIPPED"
    fi
fi
if [ -z "$binary" ]; then
    cargo build --release --locked
    binary="$target/release/tandem"
fi
[ -x "$binary" ] || fail "$binary is no program"
exec timeout --kill-after=20 3600 "$python" -B ci/agents/run.py "$binary" "$folder/packages" "$folder/runs" "$only"
