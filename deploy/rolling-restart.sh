#!/usr/bin/env bash
# Replaces every container of the cluster with a new one of the current image, one after the other, without losing requests.
#   bash deploy/rolling-restart.sh [SERVICE...]      all services of Tandem, unless some are named
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Uses docker-compose 1.29 or Compose 2, with the project's name if one is set.
if command -v docker-compose >/dev/null; then compose=(docker-compose); else compose=(docker compose); fi
# The seconds to wait for a new container: longer than a worker takes to load a model.
patience=${PATIENCE_SECONDS:-300}

healthy() {
    for _ in $(seq "$patience"); do
        [ "$(docker inspect -f '{{.State.Health.Status}}' "$1")" = healthy ] && return
        sleep 1
    done
    printf 'deploy/rolling-restart.sh: container %s did not become healthy within %s s; see docker logs %s\n' "$1" "$patience" "$1" >&2
    printf 'The remaining containers were not replaced.\n' >&2
    exit 1
}

services=("$@")
[ $# -gt 0 ] || services=(prefill decode router frontend)
for service in "${services[@]}"; do
    predecessors=$("${compose[@]}" ps -q "$service")
    for container in $predecessors; do
        running=$("${compose[@]}" ps -q "$service" | wc -l)
        # The new container starts first, so that the number of running containers never falls.
        "${compose[@]}" up -d --no-deps --no-recreate --scale "$service=$((running + 1))" "$service"
        all=$("${compose[@]}" ps -q "$service")
        for successor in $all; do healthy "$successor"; done
        docker stop -t 45 "$container" >/dev/null
        docker rm "$container" >/dev/null
        printf '%s: replaced %s\n' "$service" "${container:0:12}"
    done
done
