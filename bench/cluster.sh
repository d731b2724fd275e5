#!/usr/bin/env bash
# Measures the default cluster; exits with 1 if a goal is not met. --write writes docs/bench/cluster.md, --help lists all options.
# TANDEM: the binary [default: it is built]. TANDEM_MODEL: the path of the model [default: the default model is fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. bench/setup.sh
exec python3 bench/cluster.py --tandem "$TANDEM" --model "$TANDEM_MODEL" "$@"
