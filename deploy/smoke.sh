#!/usr/bin/env bash
# Starts docker-compose.yml unchanged, sends requests, replaces every container of Tandem, kills some while requests run, and reports how
# many requests were lost.
#   bash deploy/smoke.sh          builds images unless TANDEM_IMAGE and TANDEM_FETCH_IMAGE name local ones
#   TANDEM_MTLS=on bash deploy/smoke.sh      the same, with certificates for all processes
# The script needs the right to kill containers' processes, which root has. It uses a separate project (tandem-smoke) and the ports 18000,
# 18001, 19090 and 13000, and removes everything at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export COMPOSE_PROJECT_NAME=tandem-smoke TANDEM_PORT=127.0.0.1:18000 TANDEM_OPERATOR_PORT=127.0.0.1:18001 PROMETHEUS_PORT=127.0.0.1:19090 GRAFANA_PORT=127.0.0.1:13000
if command -v docker-compose >/dev/null; then compose=(docker-compose); else compose=(docker compose); fi
# Grafana is not started: it is not needed for serving, and its image may not be available.
services=(etcd etcd-auth nats model router prefill decode frontend proxy prometheus)
docker info >/dev/null 2>&1 || { echo "deploy/smoke.sh: the Docker engine does not answer; start it" >&2; exit 1; }
SECRETS_DIR=$(mktemp -d)
export SECRETS_DIR
trap '"${compose[@]}" down -v --remove-orphans >/dev/null 2>&1; rm -rf "$SECRETS_DIR"' EXIT
if [ -z "${TANDEM_IMAGE:-}" ]; then "${compose[@]}" build model router; fi
bash secrets.sh "$SECRETS_DIR"

"${compose[@]}" up -d --no-build "${services[@]}"
printf 'waiting until a request can be served\n'
for _ in $(seq 300); do
    curl -sf "http://$TANDEM_PORT/ready" >/dev/null && ready=1 && break
    sleep 1
done
[ -n "${ready:-}" ] || {
    "${compose[@]}" ps
    "${compose[@]}" logs --tail 20 router frontend prefill decode
    echo "deploy/smoke.sh: the cluster was not ready within 300 s; its containers and the ends of their logs are above" >&2
    exit 1
}

python3 smoke.py cached "http://$TANDEM_PORT"

log=$(mktemp)
python3 smoke.py load "http://$TANDEM_PORT" > "$log" &
load=$!
trap 'kill "$load" 2>/dev/null || true; "${compose[@]}" down -v --remove-orphans >/dev/null 2>&1; rm -rf "$log" "$SECRETS_DIR"' EXIT
bash rolling-restart.sh
for service in prefill router etcd nats; do
    # Reads the ids of the service's containers. The whole output is read, because docker-compose would end with SIGPIPE otherwise.
    mapfile -t containers < <("${compose[@]}" ps -q "$service")
    victim=${containers[0]:?no container of $service runs}
    # The process is killed from outside of Docker, as in a crash. Docker does not restart a container that it has killed itself.
    kill -KILL "$(docker inspect -f '{{.State.Pid}}' "$victim")"
    printf '%s: killed %s\n' "$service" "${victim:0:12}"
    sleep 5
done
kill -INT "$load"
wait "$load" && lost=0 || lost=$?
cat "$log"
# In ten seconds the killed processes run again, and Prometheus has scraped them.
sleep 10
for expected in frontend=2 router=2 prefill=2 decode=1; do
    target=${expected%=*}
    # The output is empty while Prometheus knows no target. This is no error.
    up=$(curl -sf "http://$PROMETHEUS_PORT/api/v1/query" --data-urlencode "query=sum(up{job=\"$target\"})" | sed -n 's/.*"\([0-9.]*\)"\].*/\1/p')
    printf 'Prometheus scrapes %s of %s %s processes\n' "${up:-none}" "${expected#*=}" "$target"
    [ "${up:-0}" -eq "${expected#*=}" ] || lost=1
done
exit "$lost"
