#!/usr/bin/env bash
# Checks the CUDA back end against transformers on a machine with an NVIDIA GPU, and measures its speed.
#   bench/gpu.sh build   on a machine with Rust and pip: writes the files for the other machine to target/gpu (about 50 MB)
#   bench/gpu.sh         on the machine with the GPU, which needs Python with torch, transformers and safetensors, but no network: prints
#                        tables in less than eight minutes, and exits with 1 if a result is wrong or a goal is not met
# BENCH_PYTHON: the Python with these packages [default: python3]. BENCH_LAYERS: layers of the model whose speed is measured [default: 36,
# as in Qwen3-8B].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = build ]; then
    ours=$(cargo bench --locked -p tandem-engine --bench cuda --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    mkdir -p target/gpu
    cp "$ours" target/gpu/cuda
    cargo build --release --locked -p tandem
    cp target/release/tandem target/gpu/tandem
    strip target/gpu/cuda target/gpu/tandem
    # compute-sanitizer stays packed in its wheel, because it is three times as large when unpacked.
    rm -f target/gpu/*.whl
    python3 -m pip download -q --no-deps -d target/gpu nvidia-cuda-sanitizer-api==13.0.85
    ls -l target/gpu
    exit
fi
if [ ! -x target/gpu/cuda ] || [ ! -x target/gpu/tandem ]; then
    echo "bench/gpu.sh: target/gpu is not complete: run bench/gpu.sh build on a machine with Rust" >&2
    exit 1
fi
python=${BENCH_PYTHON:-python3}
# Prints the folders of NVRTC and cuBLASLt in the installed wheels.
libraries=$("$python" - <<'PYTHON'
import glob, os, sysconfig
roots = {sysconfig.get_path("purelib"), *os.environ.get("PYTHONPATH", "").split(":")} - {""}
print(":".join(path for root in sorted(roots) for path in sorted(glob.glob(root + "/nvidia/*/lib"))))
PYTHON
)
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$python" bench/gpu.py target/gpu
