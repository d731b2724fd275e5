#!/usr/bin/env bash
# Runs bench/gpu.sh's programs on a machine without a GPU: all parts of bench/gpu.py with small models, and refusals. The libraries of NVIDIA
# are replaced by crates/devices/src/cuda/emulation/gpu.cpp, which runs the real kernels on this machine's processor; so times mean nothing.
# ci/test.sh runs it. It needs g++, Python with venv and pip, and target/release/tandem.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
folder="$target/ci-gpu"

fail() {
    printf 'ci/gpu.sh: %s\n' "$*" >&2
    exit 1
}

rm -rf "${folder:?}"/{bench,lib,built,cache}
mkdir -p "$folder/bench" "$folder/lib" "$folder/built"
if ! "$folder/venv/bin/python" -c 'import numpy' 2>/dev/null; then
    python3 -m venv "$folder/venv" || fail "no venv: install Python 3 with venv (Debian: apt-get install python3-venv)"
    "$folder/venv/bin/pip" install -q numpy || fail "numpy was not installed: see what pip says above"
fi
cuda=$(cargo build --release --locked --workspace --bench cuda --message-format=json |
    sed -n 's/.*"name":"cuda".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -x "$cuda" ] || fail "cargo has built no benchmark program"
cp "$cuda" "$folder/bench/cuda"
ln -sf "$target/release/tandem" "$folder/bench/tandem"

g++ -std=c++17 -O2 -Wall -Wextra -Werror -shared -fPIC -o "$folder/lib/libcuda.so.1" crates/devices/src/cuda/emulation/gpu.cpp -ldl
for name in libnvrtc.so.13 libcublasLt.so.13 libnccl.so.2; do ln -sf libcuda.so.1 "$folder/lib/$name"; done
# The sanitizer of the dry run runs the program without looking at it.
cat >"$folder/sanitizer" <<'SANITIZER'
#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
SANITIZER
chmod +x "$folder/sanitizer"
export LD_LIBRARY_PATH="$folder/lib" BENCH_SANITIZER="$folder/sanitizer"
# The compiled kernels of the emulated GPU must not get into the user's cache.
export XDG_CACHE_HOME="$folder/cache"
export EMULATED_GPU_SOURCES="$PWD/crates/devices/src/cuda/emulation" EMULATED_GPU_BUILT="$folder/built"
PYTHONPATH=bench PYTHONDONTWRITEBYTECODE=1 exec "$folder/venv/bin/python" ci/gpu/dry_run.py "$folder/bench"
