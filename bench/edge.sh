#!/usr/bin/env bash
# Compares what a frontend and a router of Tandem and of Dynamo spend on requests. Exits with 1 if a goal is not met. --write writes
# docs/bench/edge.md, --help lists all options.
# TANDEM: the binary [default: it is built]. TANDEM_MODEL: a .gguf file [default: the default model is fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. bench/setup.sh
# Dynamo's packages require Kubernetes' and Redis' clients, which these processes do not use.
dynamo="$target/bench-dynamo-1.6.1"
if [ ! -e "$dynamo/complete" ]; then
    python3 -m venv "$dynamo"
    "$dynamo/bin/pip" install -q --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    "$dynamo/bin/pip" install -q aiohttp certifi msgspec prometheus-client pyzmq tqdm zstandard "pydantic<=2.13.5" uvloop transformers gguf
    touch "$dynamo/complete"
fi
exec "$dynamo/bin/python" bench/edge.py --tandem "$TANDEM" --model "$TANDEM_MODEL" "$@"
