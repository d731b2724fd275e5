#!/usr/bin/env bash
# Makes the passwords of docker-compose.yml and the cluster's key, unless they are there: a folder of one file each, drawn from the system's randomness.
#   bash deploy/secrets.sh [FOLDER]      FOLDER: deploy/secrets, or what SECRETS_DIR is set to for docker-compose
# To change one, delete its file, run this again and start the services that use it anew (deploy/README.md, "Passwords").
set -euo pipefail
folder=${1:-$(dirname "${BASH_SOURCE[0]}")/secrets}

# Only the owner gets into the folder. Its files can be read by all, because containers see them under users of their own.
mkdir -p "$folder"
chmod 700 "$folder"
umask 022

# 256 bits in hex: nothing that a shell, a URL or a configuration file reads as more than text.
for name in cluster_key etcd_root_password etcd_password nats_password grafana_password; do
    [ -s "$folder/$name" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$folder/$name"
done
# The key is read by Tandem's user alone (deploy/Dockerfile); without root's rights it stays readable in the folder, and processes warn.
if [ "$(id -u)" -eq 0 ]; then
    chown 10001:10001 "$folder/cluster_key"
    chmod 400 "$folder/cluster_key"
fi

# NATS reads users from its configuration file: Tandem's may use Tandem's subjects, and no others.
cat > "$folder/nats.conf" <<CONF
authorization {
  user: tandem
  password: "$(cat "$folder/nats_password")"
  permissions: { publish: ["tandem.>", "_INBOX.>"], subscribe: ["tandem.>", "_INBOX.>"] }
}
max_connections: 256
CONF
printf '%s holds passwords and key of deploy/docker-compose.yml\n' "$folder"
