#!/usr/bin/env bash
# Generates the passwords of docker-compose.yml and the cluster's key from the system's randomness, one file each. Existing files are kept.
#   bash deploy/secrets.sh [FOLDER]      FOLDER: deploy/secrets, or what SECRETS_DIR is set to for docker-compose
# To change one, delete its file, run this again and recreate the services that use it (deploy/README.md, "Passwords").
set -euo pipefail
folder=${1:-$(dirname "${BASH_SOURCE[0]}")/secrets}

# Only the owner can enter the folder. Its files are readable by all users, because the users of the containers differ.
mkdir -p "$folder"
chmod 700 "$folder"
umask 022

# 256 bits in hex: no character that a shell, a URL or a configuration file interprets.
for name in cluster_key etcd_root_password etcd_password nats_password grafana_password; do
    [ -s "$folder/$name" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$folder/$name"
done
# Only Tandem's user may read the key (deploy/Dockerfile). Without root it stays readable for all in the folder, and processes warn.
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
printf '%s holds the passwords and the cluster key for deploy/docker-compose.yml\n' "$folder"
