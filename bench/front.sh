#!/usr/bin/env bash
# Compares what Tandem and vLLM's own router add to vLLM servers: CPU and time to first token. The servers are fake ones, which compute
# nothing. Exits with 1 if a goal is not met. --write writes docs/bench/front.md, --help lists all options.
# TANDEM: the binary [default: it is built]. TANDEM_MODEL: a .gguf file with SmolLM2's tokenizer [default: the default model is fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. bench/setup.sh
# The versions of dependencies are those of the workspace.
cp Cargo.lock bench/front/Cargo.lock
cargo build --release --manifest-path bench/front/Cargo.toml --target-dir bench/front/target
python="$target/bench-vllm-router-0.1.17"
if [ ! -e "$python/complete" ]; then
    python3 -m venv "$python"
    "$python/bin/pip" install -q vllm-router==0.1.17 gguf==0.19.0
    touch "$python/complete"
fi
exec "$python/bin/python" bench/front.py --tandem "$TANDEM" --model "$TANDEM_MODEL" --engine bench/front/target/release/fake-vllm "$@"
