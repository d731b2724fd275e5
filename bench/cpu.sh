#!/usr/bin/env bash
# Compares the CPU back end's speed with llama.cpp's, on a machine that does nothing else; exits with 1 if a goal is not met.
# --write writes docs/bench/cpu.md, --help lists all options.
# TANDEM_MODEL: the path of the model [default: the default model is fetched]. BENCH_PYTHON: a Python with llama-cpp-python of the version
# below [default: a virtual environment under target/, which needs a C++ compiler and ten minutes].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.3.36

# Builds llama.cpp with all features of the processor except AMX: the code that gcc 12 generates for AMX crashes.
llama_cpp() {
    local flag word flags="-DGGML_NATIVE=OFF"
    for flag in AVX:avx AVX2:avx2 FMA:fma F16C:f16c AVX512:avx512f AVX512_VNNI:avx512_vnni AVX512_BF16:avx512_bf16; do
        word=OFF
        if grep -qw "${flag#*:}" /proc/cpuinfo; then word=ON; fi
        flags+=" -DGGML_${flag%:*}=$word"
    done
    python3 -m venv target/bench-venv
    CMAKE_ARGS="$flags" target/bench-venv/bin/python -m pip install --no-cache-dir --no-binary llama-cpp-python \
        "llama-cpp-python==$version" >&2
}

has_llama_cpp() {
    "$1" -c "import sys, llama_cpp; sys.exit(llama_cpp.__version__ != '$version')" 2>/dev/null
}

python=${BENCH_PYTHON:-target/bench-venv/bin/python}
if ! has_llama_cpp "$python"; then
    if [ -n "${BENCH_PYTHON:-}" ]; then
        printf 'bench/cpu.sh: %s has no llama-cpp-python %s: install it, or unset BENCH_PYTHON\n' "$python" "$version" >&2
        exit 1
    fi
    llama_cpp
fi
if [ -z "${TANDEM_MODEL:-}" ]; then
    lines=$(cargo run --release --locked -p tandem -- model fetch)
    TANDEM_MODEL=${lines##*$'\n'}
fi
ours=$(cargo bench --locked -p tandem-devices --bench cpu --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
exec "$python" bench/cpu.py --ours "$ours" --model "$TANDEM_MODEL" "$@"
