#!/usr/bin/env bash
# Sets target, TANDEM (the binary) and TANDEM_MODEL (a .gguf file) for the scripts in this folder. Builds and fetches what is not given.

target="${CARGO_TARGET_DIR:-target}"
if [ -z "${TANDEM:-}" ]; then
    cargo build --release --locked -p tandem
    TANDEM="$target/release/tandem"
fi
if [ -z "${TANDEM_MODEL:-}" ]; then
    lines=$("$TANDEM" model fetch)
    TANDEM_MODEL=${lines##*$'\n'}
fi
