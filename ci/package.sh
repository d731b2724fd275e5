#!/usr/bin/env bash
# Builds a release for Linux on x86-64 from the profile `dist`, and runs it. ci/test.sh does not: it takes a quarter of an hour or more.
#
#   ci/package.sh          everything below but `check`
#   ci/package.sh build    the wheel, the tarball, the image, the SBOM and SHA256SUMS, in target/package; needs Docker and apt-get
#   ci/package.sh prove    installs and starts each of them, without a network but for the default model, and sends requests; needs root, debootstrap and Docker
#   ci/package.sh check    lints the workflows and the systemd unit, and compares versions; ci/test.sh runs it
#
# Tools are installed from PyPI and crates.io in target/ci-package (400 MB). PYTHON: the Python to use, 3.11 or later [default: python3].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
tools="$target/ci-package" out="$target/package" python="${PYTHON:-python3}"
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
name="tandem-$version-x86_64-linux" image="tandem:$version"
# The oldest glibc on which the program runs. Debian 11 has 2.31, RHEL 8 has 2.28.
glibc=2.28

fail() {
    printf 'ci/package.sh: %s\n' "$*" >&2
    exit 1
}

# Installs the packages of ci/package/$1.txt in an environment of their own.
environment() {
    cmp -s "ci/package/$1.txt" "$tools/$1/installed.txt" && return
    rm -rf "${tools:?}/$1"
    "$python" -m venv "$tools/$1" || fail "no venv: install Python 3.11 or later with venv (Debian: apt-get install python3-venv)"
    "$tools/$1/bin/pip" install -q --only-binary :all: --requirement "ci/package/$1.txt" || return
    cp "ci/package/$1.txt" "$tools/$1/installed.txt"
}

check() {
    local unit="$work" heading
    heading=$(grep -m 1 '^## ' CHANGELOG.md)
    case "${GITHUB_REF:-}" in
        refs/tags/*) [ "$GITHUB_REF, $heading" = "refs/tags/v$version, ## $version" ] ;;
        *) [ "${heading% (not released)}" = "## $version" ] ;;
    esac || fail "Cargo.toml has version $version, CHANGELOG.md begins with '$heading' (a tag needs '## $version'), the ref is ${GITHUB_REF:-none}"
    if command -v systemd-analyze >/dev/null; then
        # The program need not be installed here.
        sed 's|/usr/local/bin/tandem|/bin/true|' deploy/systemd/tandem@.service >"$unit/tandem@up.service"
        systemd-analyze verify --man=no "$unit/tandem@up.service"
        systemd-analyze security --no-pager --offline=true --threshold=15 "$unit/tandem@up.service" | tail -n 1
    else
        echo "systemd-analyze is missing: the systemd unit is NOT checked"
    fi
    if environment lint; then
        PATH="$tools/lint/bin:$PATH" actionlint .github/workflows/*.yml
        "$tools/lint/bin/zizmor" --offline --quiet --persona=regular .github
    else
        echo "actionlint and zizmor were not installed (see what pip says above): the workflows are NOT checked"
    fi
}

# Prints a file's size, and fails if it has more than $2 megabytes.
limit() {
    local bytes
    bytes=$(stat -c %s "$1")
    awk -v name="${1##*/}" -v bytes="$bytes" -v limit="$2" 'BEGIN { printf "%6.1f MB (at most %d)  %s\n", bytes / 1e6, limit, name }'
    [ "$bytes" -le $(($2 * 1000000)) ] || fail "${1##*/} has $bytes bytes, more than $2 MB"
}

# Writes completions, man pages and the documentation to $work/share, and the licences of all that is in the program to $work/licences.
documents() {
    local about="$tools/about/bin/cargo-about" share="$work/share"
    mkdir -p "$work/licences" "$share/doc/tandem" "$share/bash-completion/completions" "$share/zsh/site-functions" "$share/fish/vendor_completions.d"
    "$tandem" completions bash >"$share/bash-completion/completions/tandem"
    "$tandem" completions zsh >"$share/zsh/site-functions/_tandem"
    "$tandem" completions fish >"$share/fish/vendor_completions.d/tandem.fish"
    "$tandem" man "$share/man/man1"
    # Files to which the documentation links are at the same places as in the source.
    cp -r ./*.md LICENSE-* docs deploy "$share/doc/tandem"
    "$about" --version >/dev/null 2>&1 || cargo install cargo-about@0.9.3 --locked --features cli --root "$tools/about"
    "$about" about generate --locked --fail -m crates/tandem/Cargo.toml -c ci/package/about.toml -o "$work/licences/LIBRARIES" ci/package/licences.hbs
    cp LICENSE-APACHE LICENSE-MIT "$work/licences"
}

build_wheel() {
    local wheel="$work/tandem_serve-$version" newest
    environment build || fail "maturin and zig were not installed: see what pip says above"
    PATH="$tools/build/bin:$PATH" maturin build --zig --compatibility "manylinux_${glibc/./_}" -m crates/tandem/Cargo.toml --out "$work/maturin"
    "$tools/build/bin/wheel" unpack -d "$work" "$work"/maturin/*.whl
    tandem="$wheel/tandem_serve-$version.data/scripts/tandem"
    newest=$(objdump -T "$tandem" | grep -oP '\(GLIBC_\K[0-9.]+' | sort -uV | tail -n 1)
    [ "$(printf '%s\n' "$newest" "$glibc" | sort -V | tail -n 1)" = "$glibc" ] || fail "the program needs glibc $newest, newer than $glibc"
    documents
    mkdir "$wheel/tandem_serve-$version.data/data"
    cp -r "$work/share" "$wheel/tandem_serve-$version.data/data/share"
    cp -r "$work/licences" "$wheel/tandem_serve-$version.dist-info/licenses"
    "$tools/build/bin/wheel" pack -d "$out" "$wheel"
    cp "$wheel/tandem_serve-$version.dist-info/sboms/"*.json "$out/$name.cyclonedx.json"
}

build_tarball() {
    local folder="$work/$name"
    install -D -m 755 -t "$folder/bin" "$tandem"
    install -D -m 644 -t "$folder/lib/systemd/system" deploy/systemd/*.service
    cp -r "$work/share" "$folder/share"
    cp -r "$work/licences/." "$folder/share/doc/tandem"
    tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -c "$name" | gzip -9n >"$out/$name.tar.gz"
}

# The image has the program, this distribution's glibc and certificates, and nothing that could be run besides.
build_image() {
    local context="$work/image" root="$work/image/root"
    mkdir -p "$context/home/models" "$root/etc/ssl/certs" "$root/usr/share/doc"
    (cd "$work" && apt-get download -q libc6 ca-certificates)
    for package in "$work"/libc6_*.deb "$work"/ca-certificates_*.deb; do dpkg-deb --extract "$package" "$root"; done
    cat "$root"/usr/share/ca-certificates/mozilla/*.crt >"$root/etc/ssl/certs/ca-certificates.crt"
    rm -rf "$root"/usr/lib/*/gconv "$root"/{sbin,usr/sbin} "$root"/usr/share/{ca-certificates,lintian,man}
    # In some distributions the package's files are in /usr/lib, and these links are not part of it.
    for folder in lib lib64; do [ -e "$root/$folder" ] || ln -s "usr/$folder" "$root/$folder"; done
    echo "hosts: files dns" >"$root/etc/nsswitch.conf"
    echo "tandem:x:10001:10001::/var/lib/tandem:/nonexistent" >"$root/etc/passwd"
    install -d -m 1777 "$root/tmp"
    install -D -m 755 -t "$root/usr/local/bin" "$tandem"
    cp -r "$work/licences" "$root/usr/share/doc/tandem"
    cp deploy/release.Dockerfile "$context/Dockerfile"
    docker build -q -t "$image" "$context"
    docker save "$image" | gzip -9n >"$out/$name-image.tar.gz"
}

build() {
    rm -rf "$out"
    mkdir -p "$out"
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
    export SOURCE_DATE_EPOCH
    build_wheel
    build_tarball
    build_image
    limit "$out"/*.whl 25
    limit "$out/$name.tar.gz" 25
    limit "$out/$name-image.tar.gz" 30
    (cd "$out" && sha256sum -- * >SHA256SUMS)
}

# Sends two requests to the cluster at port 8000 of a process's network, which has no other host, and ends the cluster.
answers() {
    local process=$1 what=$2
    for _ in $(seq 300); do
        kill -0 "$process" 2>/dev/null || fail "$what ended before it was ready"
        # The process has its own network a moment after its start.
        ! [ "/proc/$process/ns/net" -ef /proc/self/ns/net ] &&
            nsenter --net --target "$process" curl -sf http://127.0.0.1:8000/ready >/dev/null && break
        sleep 0.2
    done
    nsenter --net --target "$process" "$python" deploy/smoke.py cached http://127.0.0.1:8000 || fail "$what did not answer"
    kill -TERM "$process"
}

# Becomes a command in a network without other hosts.
offline() {
    # shellcheck disable=SC2016 # The inner shell has the arguments.
    exec unshare --net bash -c 'ip link set lo up && exec "$@"' bash "$@"
}

# Starts a cluster with the program that the arguments name, after a title.
serves() {
    local what=$1 process
    shift
    printf '\n== %s: %s\n' "$what" "$("$@" --version)"
    offline "$@" up --engine sim --listen 127.0.0.1:8000 >"$work/log" 2>&1 &
    process=$!
    (answers "$process" "$what") || { cat "$work/log"; exit 1; }
    wait "$process" || fail "$what ended with status $? after SIGTERM"
}

prove() {
    local old="$tools/debian-11" wheel process
    [ "$(id -u)" -eq 0 ] || fail "networks without other hosts, and chroot, need root"
    for program in debootstrap docker unshare nsenter ip curl; do
        command -v "$program" >/dev/null || fail "$program is missing (Debian: apt-get install debootstrap docker.io util-linux iproute2 curl)"
    done
    (cd "$out" && sha256sum --check --quiet SHA256SUMS) || fail "run ci/package.sh build first"
    wheel=$(echo "$out"/*.whl)

    "$python" -m venv "$work/venv"
    (offline "$work/venv/bin/pip" install -q --no-index "$wheel")
    serves "wheel, on this machine" "$work/venv/bin/tandem"
    for file in man/man1/tandem-up.1 doc/tandem/docs/engines.md; do
        [ -s "$work/venv/share/$file" ] || fail "the wheel has no share/$file"
    done

    [ -e "$old/installed" ] || {
        rm -rf "$old"
        debootstrap --variant=minbase --include=python3-venv bullseye "$old" >"$work/log" || { tail "$work/log"; fail "Debian 11 was not installed"; }
        touch "$old/installed"
    }
    rm -rf "$old/opt/venv"
    cp "$wheel" "$old/tmp"
    chroot "$old" python3 -m venv /opt/venv
    (offline chroot "$old" /opt/venv/bin/pip install -q --no-index "/tmp/${wheel##*/}")
    serves "wheel, on Debian 11 with glibc $(chroot "$old" ldd --version | grep -oP '[0-9.]+$' | head -n 1)" chroot "$old" /opt/venv/bin/tandem

    tar -C "$work" -xzf "$out/$name.tar.gz"
    serves tarball "$work/$name/bin/tandem"

    docker load -q -i "$out/$name-image.tar.gz"
    contains image --read-only --tmpfs /tmp --env XDG_RUNTIME_DIR=/tmp -- up --engine sim
    first_answer "$wheel"
    # The image has no pip, so the model is in a folder of the host.
    chmod -R a+rX "$work/models"
    contains "image with a mounted model" --volume "$work/models:/var/lib/tandem/models:ro" -- up
}

# Starts the image without a network, after a title. The arguments after the title are those of `docker run` and, after `--`, of the program.
contains() {
    local what=$1 options=() process
    shift
    while [ "${1:---}" != -- ]; do options+=("$1"); shift; done
    shift
    printf '\n== %s: %s\n' "$what" "$(docker run --rm "$image" --version)"
    process=$(docker run -d --network none --cap-drop ALL --security-opt no-new-privileges "${options[@]}" "$image" "$@")
    # shellcheck disable=SC2064 # The container is this one.
    trap "docker rm -f $process >/dev/null; rm -rf '$work'" EXIT
    (docker exec "$process" tandem ready --wait && docker exec "$process" tandem top --once &&
        answers "$(docker inspect -f '{{.State.Pid}}' "$process")" "$what") || { docker logs "$process"; exit 1; }
    [ "$(docker wait "$process")" -eq 0 ] || fail "$what ended with an error after SIGTERM"
    docker rm -f "$process" >/dev/null
    trap 'rm -rf "$work"' EXIT
}

# Installs the wheel as a new user does, with the network, and prints the time until the default model has answered a chat.
first_answer() {
    local started=$SECONDS process
    printf '\n== wheel, with the default model\n'
    "$python" -m venv "$work/new"
    "$work/new/bin/pip" install -q "$1"
    TANDEM_MODELS_DIR="$work/models" PATH="$work/new/bin:$PATH" tandem up --listen 127.0.0.1:28000 >"$work/log" 2>&1 &
    process=$!
    "$work/new/bin/tandem" ready 127.0.0.1:28000 --wait || { cat "$work/log"; fail "the wheel did not start with the default model"; }
    echo "What is a tandem bicycle?" | "$work/new/bin/tandem" chat 127.0.0.1:28000
    printf 'answered %d s after the start of the installation\n' $((SECONDS - started))
    kill -TERM "$process"
    wait "$process" || fail "the wheel ended with status $? after SIGTERM"
    [ $((SECONDS - started)) -le 60 ] || fail "the first answer took longer than 60 s"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case "${1:-}" in
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" ;;
    build | prove | check) "$1" ;;
    "")
        build
        prove
        ;;
    *) fail "unknown argument $1: see ci/package.sh --help" ;;
esac
