#!/usr/bin/env bash
# Runs Tandem in front of real SGLang servers on this machine's CPU, and checks answers, counts, caches, aborts and faults. To be run by hand
# and before a release; ci/test.sh does not run it.
#
#   ci/sglang.sh                    installs what is missing, then runs all scenarios of ci/sglang/checks.py
#   ci/sglang.sh NAME...            runs only these scenarios
#   ci/sglang.sh setup              installs only: SGLang, and the default model in its format (3.8 GB in target/ci-sglang)
#   ci/sglang.sh engines mixed|p+d  starts two servers, prints their addresses, and ends them at Ctrl-C
#
# Needs Linux on x86-64 with glibc 2.34, Python 3.12 with venv, binutils and a C compiler; 8 GiB of free memory while servers run, 16 GiB for the
# scenarios whose names begin with pair_. These, and `engines p+d`, need libibverbs.so.1 (Debian: libibverbs1).
# PYTHON: the Python to use [default: python3]. TANDEM_MODEL: the model's GGUF file [default: the default model, fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/engines.sh
export PYTHONPATH="$PWD/ci/vllm"

install_sglang() {
    install_packages ci/sglang
    cp ci/sglang/sgl_kernel.py "$site"
}

setup() {
    requirements 12 13
    mkdir -p "$folder"
    unless_done sglang "$("$python" --version) $(sha256sum ci/sglang/{requirements,overrides}.txt ci/sglang/sgl_kernel.py ci/vllm/cuda_stubs.py)" install_sglang
    model
}

case "${1:-}" in
    -h | --help) usage ;;
    setup)
        [ $# -eq 1 ] || { usage >&2; exit 2; }
        setup
        du -sh "$folder" | cut -f1
        ;;
    engines)
        shift
        case "$*" in "p+d" | mixed) ;; *) usage >&2; exit 2 ;; esac
        setup
        with_engines ci/sglang/servers.py "$@"
        ;;
    *)
        setup
        [ -x "$tandem" ] || cargo build --release --locked
        with_engines ci/sglang/checks.py "$tandem" "$@"
        ;;
esac
