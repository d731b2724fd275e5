#!/usr/bin/env bash
# Checks the CUDA back end on a machine with an NVIDIA GPU, and measures its speed.
#   bench/gpu.sh build       on a machine with Rust and pip: writes the files for the other machine to target/gpu (about 60 MB), and packed to
#                            target/gpu.tar.xz (about 25 MB); one of the two has to be on the machine with the GPU
#   bench/gpu.sh [PART...]   on the machine with the GPU, which needs Python with numpy (and torch and transformers for the comparison with
#                            them), but no network. Parts, in the order of a first run: smoke, right, kernels, speed, handoff, turns,
#                            sanitize; without parts it runs all of them. Each part has its own time limit, and every result is written at
#                            once to target/gpu/results.jsonl. Exits with 1 if a result is wrong or a goal is missed.
#   bench/gpu.sh report      prints the tables and goals of all results so far
# BENCH_PYTHON: the Python with these packages [default: python3]. BENCH_SANITIZER: the path of compute-sanitizer [default: in PATH, in
# /usr/local/cuda/bin, or the one that the build has downloaded].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = build ]; then
    ours=$(cargo bench --locked -p tandem-devices --features cuda --bench cuda --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    mkdir -p target/gpu
    cp "$ours" target/gpu/cuda
    cargo build --release --locked -p tandem
    cp target/release/tandem target/gpu/tandem
    strip target/gpu/cuda target/gpu/tandem
    # compute-sanitizer stays packed in its wheel, because it is three times as large when unpacked.
    rm -f target/gpu/*.whl
    python3 -m pip download -q --no-deps -d target/gpu nvidia-cuda-sanitizer-api==13.0.85
    # The kernels are compiled here, for Hopper and for the driver R580, so that no time of the GPU is spent on it.
    python3 -m venv target/gpu/venv
    target/gpu/venv/bin/pip install -q numpy nvidia-cuda-nvrtc==13.0.88
    libraries=$(echo target/gpu/venv/lib/python3*/site-packages/nvidia/cu13/lib)
    LD_LIBRARY_PATH="$PWD/$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" target/gpu/venv/bin/python bench/gpu.py target/gpu compile
    rm -rf target/gpu/venv
    rm -f target/gpu/results.jsonl
    tar -C target -c gpu | xz -T0 -6 >target/gpu.tar.xz
    ls -l target/gpu target/gpu/kernels target/gpu.tar.xz
    exit
fi
if [ ! -x target/gpu/cuda ] && [ -e target/gpu.tar.xz ]; then
    tar -C target -xJf target/gpu.tar.xz
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
exec "$python" bench/gpu.py target/gpu "$@"
