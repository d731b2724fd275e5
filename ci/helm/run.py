"""Runs the rendered Helm chart on this machine. Each pod is a process in a network namespace of its own, in which nftables enforces the chart's
network policies. Every router and worker is replaced under load, by a process with another address. ci/helm.sh run starts it, as root, in
namespaces of its own. What Kubernetes itself does (scheduling, volumes, probes, rollouts) is not part of it.

    run.py HELM TANDEM FOLDER      FOLDER: for the logs
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).parents[2]
# The values of each run: the simulated engine, two workers of each kind, and with `static` addresses of prefill workers that do not exist.
RUNS = {
    "static": "engine=sim,decode.replicas=2,prefill.autoscaling.enabled=true",
    "etcd": "engine=sim,decode.replicas=2,discovery=etcd,nats.enabled=true",
    "certificates": "engine=sim,decode.replicas=2,clusterTls.source=secrets",
}
# The machine's address in the network of the pods. It stands for the node, whose connections network policies do not concern.
NODE = "10.99.0.1"
# Connections that the policies forbid: from a component to a component and a port.
FORBIDDEN = [("frontend", "prefill", 7100), ("prefill", "router", 7000), ("decode", "frontend", 8000), ("router", "decode", 9200)]
READY_SECONDS = 60
# The folders of a container, and the same in a pod's folder here.
FOLDERS = {"/run/secrets/tandem": "secrets", "/run/secrets/cluster-tls": "certificates", "/etc/tandem": "configuration", "/var/lib/tandem": "state", "/data": "state"}
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


def call(*command, text=None):
    subprocess.run(command, check=True, input=text, text=True)


def http(address, port, path, body=None):
    """Returns the status and the text of an answer, or status 0 and the error."""
    request = urllib.request.Request(f"http://{address}:{port}{path}", json.dumps(body).encode() if body else None)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Cluster:
    def __init__(self, name, tandem, folder, objects):
        self.tandem, self.folder, self.objects = tandem, folder / name, objects
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        # The certificates of all roles, of which each pod gets its own.
        self.certificates = self.folder / "all-certificates"
        subprocess.run([tandem, "cert", self.certificates, "--cluster", "test-tandem"], check=True, stdout=subprocess.DEVNULL)
        self.hosts = self.folder / "hosts"
        self.hosts.touch()
        self.pods, self.names, self.started = {}, {}, 0

    def of_kind(self, *kinds):
        return [item for item in self.objects if item["kind"] in kinds]

    def start_all(self):
        scalers = {item["metadata"]["name"]: item["spec"]["minReplicas"] for item in self.of_kind("HorizontalPodAutoscaler")}
        for workload in self.of_kind("Deployment", "StatefulSet"):
            name = workload["metadata"]["name"]
            for number in range(workload["spec"].get("replicas", scalers.get(name))):
                self.start(workload, f"{name}-{number}")

    def start(self, workload, name):
        """Starts a pod with a new address."""
        self.started += 1
        pod = Pod(workload, name, f"10.99.0.{self.started + 1}", f"pod{self.started}")
        self.pods[name] = pod
        # The DNS names of a StatefulSet's pods, and those of the Services of etcd and NATS, which have one pod each.
        service = workload["spec"].get("serviceName")
        self.names[f"{name}.{service}" if service else workload["metadata"]["name"]] = pod.address
        self.hosts.write_text("".join(f"{address} {host}\n" for host, address in [("localhost", "127.0.0.1"), *self.names.items()]))
        call("ip", "netns", "add", pod.space)
        call("ip", "link", "add", f"v{pod.space}", "type", "veth", "peer", "name", "eth0", "netns", pod.space)
        call("ip", "link", "set", f"v{pod.space}", "master", "br0", "up")
        call("ip", "-n", pod.space, "addr", "add", f"{pod.address}/24", "dev", "eth0")
        for device in ["eth0", "lo"]:
            call("ip", "-n", pod.space, "link", "set", device, "up")
        for other in self.pods.values():
            self.enforce(other)
        pod.start(self)
        return pod

    def enforce(self, pod):
        """Replaces the rules of a pod's namespace by those of the network policy that selects it."""
        spec = next(item["spec"] for item in self.of_kind("NetworkPolicy") if item["spec"]["podSelector"]["matchLabels"] == pod.labels)
        chains = []
        for chain, field, peers, side in [("input", "ingress", "from", "saddr"), ("output", "egress", "to", "daddr")]:
            rules = ["ct state established,related accept", "oifname lo accept" if chain == "output" else "iifname lo accept", f"ip {side} {NODE} accept"]
            for rule in spec[field]:
                selected = [peer["podSelector"]["matchLabels"] for peer in rule.get(peers, []) if "podSelector" in peer]
                addresses = [other.address for other in self.pods.values() if other.labels in selected]
                if peers in rule and not addresses:
                    continue
                match = f"ip {side} {{ {', '.join(addresses)} }} " if peers in rule else ""
                rules += [f"{match}{port.get('protocol', 'TCP').lower()} dport {port['port']} accept" for port in rule["ports"]]
            chains.append(f"chain {chain} {{ type filter hook {chain} priority 0; policy drop; {'; '.join(rules)}; }}")
        call("ip", "netns", "exec", pod.space, "nft", "-f", "-", text="\n".join(["flush ruleset", "table inet policies {", *chains, "}", ""]))

    def of_component(self, component):
        return [pod for pod in self.pods.values() if pod.component == component]

    def wait_until_ready(self):
        until = time.monotonic() + READY_SECONDS
        while waiting := [name for name, pod in self.pods.items() if not pod.is_ready()]:
            if time.monotonic() > until:
                raise SystemExit(f"not ready within {READY_SECONDS} s: {waiting}; the logs are in {self.folder}")
            time.sleep(0.2)

    def stop(self):
        running = [pod.process for pod in self.pods.values() if pod.process]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait(60)


class Pod:
    def __init__(self, workload, name, address, space):
        template = workload["spec"]["template"]
        self.workload, self.name, self.address, self.space = workload, name, address, space
        self.labels, self.container = template["metadata"]["labels"], template["spec"]["containers"][0]
        self.user = template["spec"]["securityContext"]["runAsUser"]
        self.component = self.labels["app.kubernetes.io/component"]
        self.process = None

    def start(self, cluster):
        folder = cluster.folder / self.name
        for own in FOLDERS.values():
            (folder / own).mkdir(parents=True, exist_ok=True)
        os.chown(folder / "state", self.user, self.user)
        key = folder / "secrets/cluster_key"
        if not key.exists():
            key.write_text("0123456789abcdef" * 4)
            os.chown(key, 0, self.user)
            key.chmod(0o440)
        role = self.component + ("-worker" if self.component in ("prefill", "decode") else "")
        for source, file in {f"{role}.pem": "tls.crt", f"{role}.key": "tls.key", "ca.pem": "ca.crt"}.items():
            if (cluster.certificates / source).exists():
                shutil.copy(cluster.certificates / source, folder / "certificates" / file)
                os.chown(folder / "certificates" / file, 0, self.user)
                (folder / "certificates" / file).chmod(0o440)
        for file, text in (entry for item in cluster.of_kind("ConfigMap") for entry in item["data"].items()):
            (folder / "configuration" / file).write_text(text)

        def placed(text):
            for there, here in {"$(POD_NAME)": self.name, "$(POD_IP)": self.address, **{path: str(folder / own) for path, own in FOLDERS.items()}}.items():
                text = text.replace(there, here)
            return text

        command = [placed(arg) for arg in self.container.get("command", [cluster.tandem]) + self.container.get("args", [])]
        settings = {variable["name"]: placed(variable["value"]) for variable in self.container.get("env", []) if "value" in variable}
        inside = f'mount --bind {cluster.hosts} /etc/hosts && exec setpriv --reuid {self.user} --regid {self.user} --clear-groups -- "$@"'
        with open(folder / "log", "a") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, "unshare", "-m", "sh", "-c", inside, "sh", *command],
                env={"PATH": os.environ["PATH"], **settings}, stdout=log, stderr=log)

    def port(self, name):
        return next(port["containerPort"] for port in self.container["ports"] if port["name"] == name)

    def is_ready(self):
        probe = self.container["readinessProbe"]
        if "httpGet" in probe:
            return http(self.address, self.port(probe["httpGet"]["port"]), probe["httpGet"]["path"])[0] == 200
        port = self.port(probe["tcpSocket"]["port"])
        return subprocess.run([sys.executable, "-c", CONNECT, self.address, str(port)], stderr=subprocess.DEVNULL).returncode == 0

    def reaches(self, other, port):
        command = ["ip", "netns", "exec", self.space, sys.executable, "-c", CONNECT, other.address, str(port)]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


class Load(threading.Thread):
    """Sends one request after the other to a frontend."""

    def __init__(self, frontend):
        super().__init__()
        self.address, self.answers, self.lost, self.ends = (frontend.address, frontend.port("http")), 0, [], False

    def run(self):
        while not self.ends:
            prompt = f"Question {self.answers % 20}: " + "word " * 300
            status, text = http(*self.address, "/v1/completions", {"model": "sim", "prompt": prompt, "max_tokens": 20})
            self.answers += 1
            if status != 200:
                self.lost.append(f"{status} {text.strip()}")


def run(name, helm, tandem, folder):
    """Runs one set of values. Returns the number of problems."""
    rendered = subprocess.run([helm, "template", "test", ROOT / "deploy/helm/tandem", "--set", RUNS[name]], check=True, capture_output=True, text=True)
    cluster = Cluster(name, tandem, folder, [item for item in yaml.safe_load_all(rendered.stdout) if item])
    try:
        cluster.start_all()
        cluster.wait_until_ready()
        problems = []
        for source, target, port in FORBIDDEN:
            if cluster.of_component(source)[0].reaches(cluster.of_component(target)[0], port):
                problems.append(f"{source} reaches port {port} of {target}")
        loads = [Load(frontend) for frontend in cluster.of_component("frontend") * 2]
        for load in loads:
            load.start()
        replaced = [pod for pod in cluster.pods.values() if pod.workload["kind"] == "StatefulSet"]
        for pod in replaced:
            pod.process.send_signal(signal.SIGTERM)
            if pod.process.wait(60) != 0:
                problems.append(f"{pod.name} ended with {pod.process.returncode}")
            cluster.start(pod.workload, pod.name)
            cluster.wait_until_ready()
            # minReadySeconds is longer, because DNS servers remember addresses; here new names are known at once.
            time.sleep(5)
        for load in loads:
            load.ends = True
            load.join()
        problems += [f"lost: {answer}" for load in loads for answer in load.lost]
        answers = sum(load.answers for load in loads)
        print(f"{name}: {len(cluster.pods)} pods, {len(replaced)} replaced under load; {answers} requests, {sum(len(load.lost) for load in loads)} lost")
    finally:
        cluster.stop()
    for problem in problems:
        print(f"{name}: {problem}", file=sys.stderr)
    return len(problems)


def main(helm, tandem, folder):
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "br0", "type", "bridge")
    call("ip", "addr", "add", f"{NODE}/24", "dev", "br0")
    call("ip", "link", "set", "br0", "up")
    problems = 0
    for name in RUNS:
        problems += run(name, helm, tandem, pathlib.Path(folder))
        call("ip", "-all", "netns", "delete")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
