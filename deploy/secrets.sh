#!/usr/bin/env bash
# Generates the passwords of docker-compose.yml and the cluster's key from the system's randomness, one file each. Existing files are kept.
#   bash deploy/secrets.sh [FOLDER]      FOLDER: the SECRETS_DIR of docker-compose [default: deploy/secrets]
# To change a secret, delete its file, run this script again and recreate the services that use it (deploy/README.md, "Passwords").
set -euo pipefail
folder=${1:-$(dirname "${BASH_SOURCE[0]}")/secrets}

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
printf '%s holds the passwords and the cluster key for deploy/docker-compose.yml\n' "$folder"
