#!/usr/bin/env bash
# Generates the passwords of docker-compose.yml and the cluster's key from the system's randomness, one file each. Existing files are kept.
#   bash deploy/secrets.sh [FOLDER]      FOLDER: the SECRETS_DIR of docker-compose [default: deploy/secrets]
# With TANDEM_MTLS=on, in the environment or in deploy/.env, the script also makes an authority, and a certificate for each role. Each run renews
# the certificates, and keeps the authority. TANDEM: the program to use [default: that in the PATH, or else the one in the image TANDEM_IMAGE].
# To change a secret, delete its file, run this script again and recreate the services that use it (deploy/README.md, "Passwords").
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
folder=${1:-$here/secrets}

# Prints a setting of docker-compose: the variable, or else its line in deploy/.env, or else the default.
setting() {
    local line
    line=$(grep -s "^$1=" "$here/.env" | tail -n 1) || true
    line=${line#*=}
    printf '%s' "${!1:-${line:-$2}}"
}
mtls=$(setting TANDEM_MTLS off)
case "$mtls" in on | off) ;; *) echo "deploy/secrets.sh: TANDEM_MTLS is $mtls; set it to on or off" >&2; exit 1 ;; esac

# Only the owner can enter the folder. Its files are readable by all users, because the users of the containers differ.
mkdir -p "$folder"
chmod 700 "$folder"
umask 022

# 256 bits in hex contain no character that a shell, a URL or a configuration file interprets.
for name in cluster_key etcd_root_password etcd_password nats_password grafana_password; do
    [ -s "$folder/$name" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$folder/$name"
done
# Only Tandem's user may read the key (deploy/Dockerfile). If this script does not run as root, the file stays readable for all
# users that can enter the folder, and processes log a warning.
if [ "$(id -u)" -eq 0 ]; then
    chown 10001:10001 "$folder/cluster_key"
    chmod 400 "$folder/cluster_key"
fi

# NATS reads users from its configuration file: Tandem's user may use Tandem's subjects only.
cat > "$folder/nats.conf" <<CONF
authorization {
  user: tandem
  password: "$(cat "$folder/nats_password")"
  permissions: { publish: ["tandem.>", "_INBOX.>"], subscribe: ["tandem.>", "_INBOX.>"] }
}
max_connections: 256
CONF
# Each service reads the folder of its role only. A folder without certificates is mounted as well, with TANDEM_MTLS=off.
certificates=$folder/certificates
roles=(frontend router prefill-worker decode-worker)
for role in "${roles[@]}"; do mkdir -p "$certificates/$role"; done

# Makes the certificates in the folder $1.
make_certificates() {
    local cluster image program=${TANDEM:-$(command -v tandem || true)}
    cluster=$(setting TANDEM_CLUSTER tandem)
    image=$(setting TANDEM_IMAGE tandem:cpu)
    if [ -n "$program" ]; then
        "$program" cert "$1" --cluster "$cluster" >/dev/null
    elif docker image inspect "$image" >/dev/null 2>&1; then
        docker run --rm --network none --user "$(id -u):$(id -g)" -v "$(realpath "$1"):/certificates" "$image" cert /certificates --cluster "$cluster" >/dev/null
    else
        echo "deploy/secrets.sh: TANDEM_MTLS=on needs the program; build the image $image first, or name a binary with TANDEM" >&2
        exit 1
    fi
}

# Copies a file, so that a process that reads it while it changes finds the old or the new one.
copy() {
    cp "$1" "$2.new"
    chmod 444 "$2.new"
    # As for the cluster key, only Tandem's user may read a private key.
    case "$1" in *.key) if [ "$(id -u)" -eq 0 ]; then chown 10001:10001 "$2.new" && chmod 400 "$2.new"; fi ;; esac
    mv -f "$2.new" "$2"
}

if [ "$mtls" = on ]; then
    # No service reads this folder, which has the key of the authority.
    made=$certificates/all
    mkdir -p "$made"
    chmod 700 "$made"
    make_certificates "$made"
    for role in "${roles[@]}"; do
        copy "$made/$role.key" "$certificates/$role/cert.key"
        copy "$made/$role.pem" "$certificates/$role/cert.pem"
        copy "$made/ca.pem" "$certificates/$role/ca.pem"
    done
    # For `tandem top` in the container of a router.
    copy "$made/tool.key" "$certificates/router/tool.key"
    copy "$made/tool.pem" "$certificates/router/tool.pem"
    printf '%s holds a certificate for each role, valid for a year\n' "$certificates"
fi
printf '%s holds the passwords and the cluster key for deploy/docker-compose.yml\n' "$folder"
