#!/usr/bin/env bash
# Measures the default cluster; exits with 1 if a goal is not met. --write writes docs/bench/cluster.md, --help lists all options.
# TANDEM_MODEL: the path of the model [default: the default model is fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cargo build --release --locked -p tandem
tandem="${CARGO_TARGET_DIR:-target}/release/tandem"
if [ -z "${TANDEM_MODEL:-}" ]; then
    lines=$("$tandem" model fetch)
    TANDEM_MODEL=${lines##*$'\n'}
fi
exec python3 bench/cluster.py --tandem "$tandem" --model "$TANDEM_MODEL" "$@"
