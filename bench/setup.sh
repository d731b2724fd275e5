#!/usr/bin/env bash
# Sets target, TANDEM (the binary) and TANDEM_MODEL (a .gguf file) for the scripts in this folder. Builds and fetches what is not given. The
# binary is built as the one that users install.

target="${CARGO_TARGET_DIR:-target}"
if [ -z "${TANDEM:-}" ]; then
    cargo build --profile dist --locked -p tandem
    TANDEM="$target/dist/tandem"
fi
if [ -z "${TANDEM_MODEL:-}" ]; then
    lines=$("$TANDEM" model fetch)
    TANDEM_MODEL=${lines##*$'\n'}
fi
