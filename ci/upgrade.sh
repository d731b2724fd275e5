#!/usr/bin/env bash
# Replaces the processes of a cluster by those of another version, role by role and in several orders, while clients send requests, and checks
# that no answer is lost, cut, different or wrongly counted (docs/versions.md). To be run by hand and before a release; ci/test.sh does not
# run it.
#
#   ci/upgrade.sh REV [SECONDS]                     the commit or tag REV against this tree; both are built with the release profile
#   ci/upgrade.sh --old FILE --new FILE [SECONDS]   two binaries
#
# SECONDS of load before and after each replacement [default: 4]. The simulated engine needs no model. If etcd and nats-server are
# installed, some runs use them. Logs, ledgers and what clients received are in target/ci-upgrade. PYTHON: the Python to use [default:
# python3].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
folder="$target/ci-upgrade"

fail() {
    printf 'ci/upgrade.sh: %s\n' "$*" >&2
    exit 1
}

# Builds the binary of a commit in a worktree of its own, so that this tree may have changes.
build_old() {
    local commit
    commit=$(git rev-parse --verify --quiet "$1^{commit}") || fail "git does not know the commit $1"
    if [ "$(git -C "$folder/tree" rev-parse HEAD 2>/dev/null)" != "$commit" ]; then
        git worktree remove --force "$folder/tree" 2>/dev/null || true
        rm -rf "$folder/tree"
        git worktree prune
        mkdir -p "$folder"
        git worktree add --detach "$folder/tree" "$commit"
    fi
    (cd "$folder/tree" && CARGO_TARGET_DIR="$folder/target" cargo build --release --locked --bin tandem)
    old="$folder/target/release/tandem"
}

revision='' old='' new='' seconds=4
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        --old) old=${2:?"--old needs a file"}; shift ;;
        --new) new=${2:?"--new needs a file"}; shift ;;
        -*) fail "unknown argument $1; see --help" ;;
        *) if [ -z "$revision$old" ]; then revision=$1; else seconds=$1; fi ;;
    esac
    shift
done
if [ -n "$revision" ]; then
    [ -z "$old$new" ] || fail "REV excludes --old and --new; see --help"
    build_old "$revision"
    cargo build --release --locked --bin tandem
    new="$target/release/tandem"
fi
if [ ! -x "$old" ] || [ ! -x "$new" ]; then fail "name a commit, or two binaries with --old and --new; see --help"; fi
printf 'old: %s (%s)\nnew: %s (%s)\n' "$old" "$("$old" --version)" "$new" "$("$new" --version)"
exec "${PYTHON:-python3}" ci/upgrade.py "$(realpath "$old")" "$(realpath "$new")" "$folder/run" "$seconds"
