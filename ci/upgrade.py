"""Replaces the processes of a cluster by those of another version while clients send requests: python3 upgrade.py OLD NEW FOLDER [SECONDS].
Started by upgrade.sh."""

import hashlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

# The time limit for each wait.
LIMIT_SECONDS = 60
CLIENTS = 24
PROMPTS = 60
ROLES = {"prefill-worker": ("p0", "p1"), "decode-worker": ("d0", "d1"), "router": ("r0", "r1"), "frontend": ("f0", "f1")}
PREFILL, DECODE, ROUTER, FRONTEND = ROLES
# What may not happen. The other counts are shown only.
FAULTS = ("closed", "lost", "cut", "different", "findings", "unverified", "exits", "errors")
CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


def until(what, holds):
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            if holds():
                return
        except (OSError, http.client.HTTPException):
            pass
        assert time.monotonic() < end, f"not within {LIMIT_SECONDS} s: {what}"
        time.sleep(0.05)


def free_ports(count):
    """Ports below those that the system gives to connections, so that a restarted process finds its port free."""
    ports = []
    for port in itertools.count(12_000 + os.getpid() % 8_000):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        ports.append(port)
        if len(ports) == count:
            return ports


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def prompt(number):
    """A prompt of about 20 to 28 blocks. Every third one has the beginning of the one before it."""
    words = []
    for part, length in (((number - 1 if number % 3 == 2 else number), 200), (1_000 + number, 100 + number)):
        digits = hashlib.sha256(str(part).encode()).hexdigest() * 8
        words += [f"{digits[at:at + 3]}" for at in range(length)]
    return " ".join(words)


def request(number, salt):
    """Request `number`: streamed or not, greedy or with a seed, as chat or as a completion. With another salt, nothing is cached, and the
    answer is the same."""
    body = {"model": "sim", "max_tokens": 24 + number % 17, "ignore_eos": True, "cache_salt": salt}
    body |= {"temperature": 0} if number % 2 else {"seed": number}
    if number % 4 < 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if number % 5:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt(number)}]}
    return "/v1/completions", body | {"prompt": prompt(number)}


class Cut(Exception):
    """An answer that began and did not end."""


def answer(port, path, body):
    """Returns the answer's id, status and, if it is complete, its text and its usage as lines of `tandem audit` have it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
    try:
        headers = {"content-type": "application/json", "x-tandem-details": "true"}
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        try:
            text = reply.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise Cut(repr(error)) from error
        identity = reply.getheader("x-request-id")
        if reply.status != 200:
            return identity, reply.status, text, None
        return identity, 200, *complete(text, body.get("stream"))
    finally:
        connection.close()


def complete(text, streamed):
    frames = [text]
    if streamed:
        frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
        if not frames or frames.pop() != "data: [DONE]":
            raise Cut(text[-300:])
        frames = [frame.removeprefix("data: ") for frame in frames]
    frames = [json.loads(frame) for frame in frames]
    pieces, finish = [], None
    for choice in (choice for frame in frames for choice in frame.get("choices", [])):
        part = choice.get("message") or choice.get("delta") or choice
        pieces.append(part.get("content") or part.get("text") or "")
        finish = choice.get("finish_reason") or finish
    usage = next((frame["usage"] for frame in reversed(frames) if frame.get("usage")), None)
    if usage is None or finish is None:
        raise Cut(text[-300:])
    details = next((frame["tandem"] for frame in reversed(frames) if frame.get("tandem")), {})
    source = details.get("cached_tokens_source", "unknown")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    line = {"prompts": 1, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached, "source": source}
    return ["".join(pieces), finish, usage["prompt_tokens"], usage["completion_tokens"]], line


class Load:
    """Clients that send one request after the other, each to the frontends in turn, as behind a load balancer: a request whose connection
    a frontend has refused, or that it has answered with 503, is sent to the other one, for LIMIT_SECONDS at most."""

    def __init__(self, frontends, expected):
        self.frontends, self.expected = frontends, expected
        self.counts = dict.fromkeys(("answers", "repeated", "closed", "estimates", "cached", "lost", "cut", "different"), 0)
        self.lines, self.first, self.lock, self.stopped = [], {}, threading.Lock(), threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(client,)) for client in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def run(self, client):
        for nth in itertools.count(client):
            if self.stopped.is_set():
                return
            # A prompt is asked for again, so that a part of it is cached.
            self.ask((nth * 7 + client * 5) % PROMPTS, f"salt {client % 4} {nth // 40}", nth)

    def count(self, name, line=None, fault=None, add=1):
        with self.lock:
            self.counts[name] += add
            if line:
                self.lines.append(line)
            if fault:
                self.first.setdefault(name, fault)

    def ask(self, number, salt, nth):
        path, body = request(number, salt)
        end = time.monotonic() + LIMIT_SECONDS
        for attempt in itertools.count(nth):
            identity, status, text, usage = None, None, None, None
            try:
                identity, status, text, usage = answer(self.frontends[attempt % len(self.frontends)], path, body)
            except ConnectionRefusedError as error:
                text = repr(error)
            except CLOSED as error:
                text = repr(error)
                self.count("closed", fault=f"request {number}: {error!r}")
            except Cut as error:
                return self.count("cut", {}, f"request {number}: {error}")
            except OSError as error:
                return self.count("lost", {}, f"request {number}: {error!r}")
            line = {key: value for key, value in (("request_id", identity), ("usage", usage)) if value}
            if status == 200:
                return self.judge(number, text, line)
            if status not in (None, 503) or time.monotonic() > end:
                return self.count("lost", line, f"request {number}: {status} {text}")
            self.count("repeated", line)
            time.sleep(0.02)

    def judge(self, number, text, line):
        usage = line["usage"]
        self.count("answers", line)
        self.count("cached", add=usage["cached_tokens"])
        self.count("estimates", add=int(usage["source"] != "worker"))
        if self.expected is not None and text != self.expected[number]:
            self.count("different", fault=f"request {number}: {text}, not {self.expected[number]}")


class Cluster:
    """Two processes of each role, with ledgers, a cluster key and fixed ports. `services`: they find each other in etcd, and workers publish
    their KV events over NATS; otherwise they have lists of addresses."""

    def __init__(self, binaries, folder, services):
        self.binaries, self.folder, self.running, self.helpers = binaries, Path(folder), {}, []
        shutil.rmtree(folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        names = [name for role in ROLES.values() for name in role]
        ports = free_ports(2 * len(names) + 3)
        self.ports, self.admin = dict(zip(names, ports)), dict(zip(names, ports[len(names):]))
        key = self.folder / "key"
        key.touch(mode=0o600)
        key.write_text("the secret of a cluster whose versions are mixed")
        self.common = ["--cluster-key-file", str(key)]
        self.etcd = self.nats = None
        if services:
            self.start_services(*ports[2 * len(names):])
        self.restarted = set()

    def start_services(self, etcd, peers, nats):
        self.etcd, self.nats = etcd, nats
        client, peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}"
        flags = ["--data-dir", str(self.folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
        flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        for name, command in (("etcd", ["etcd", *flags]), ("nats", ["nats-server", "-a", "127.0.0.1", "-p", str(nats)])):
            log = open(self.folder / f"{name}.log", "ab")
            self.helpers.append(subprocess.Popen(command, stdout=log, stderr=log))
        for port in (etcd, nats):
            until("etcd and NATS listen", lambda port=port: not socket.create_connection(("127.0.0.1", port)).close())

    def flags(self, role, name):
        own = ["--listen", f"127.0.0.1:{self.ports[name]}", "--grace-period", "30", *self.common]
        own += ["--admin-listen", f"127.0.0.1:{self.admin[name]}"]
        if self.etcd:
            own += ["--etcd", f"127.0.0.1:{self.etcd}", "--lease-ttl", "3"]
            own += [] if role == FRONTEND else ["--nats", f"127.0.0.1:{self.nats}"]
        addresses = {role: ",".join(f"127.0.0.1:{self.ports[name]}" for name in ROLES[role]) for role in ROLES}
        if role in (PREFILL, DECODE):
            return own + ["--engine", "sim", "--worker-id", name, "--ledger", str(self.folder / f"{name}.ledger")]
        if role == ROUTER:
            lists = ["--workers", addresses[PREFILL] + "," + addresses[DECODE], "--peers", addresses[ROUTER]]
            return own + ["--prefill", "remote"] + ([] if self.etcd else lists)
        return own + ["--engine", "sim"] + ([] if self.etcd else ["--router", addresses[ROUTER]])

    def start(self, role, name, version):
        log = open(self.folder / f"{name}.log", "ab")
        self.running[name] = subprocess.Popen([self.binaries[version], role, *self.flags(role, name)], stdout=log, stderr=log)

    def start_all(self, version):
        for role, names in ROLES.items():
            for name in names:
                self.start(role, name, version)
        self.wait_until_connected()

    def metric(self, name, series):
        status, text = get(self.admin[name], "/metrics")
        assert status == 200, f"{name}: {status} {text}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(series))

    def wait_until_connected(self):
        for router in ROLES[ROUTER]:
            for worker in ROLES[PREFILL] + ROLES[DECODE]:
                series = f'tandem_router_worker_info{{worker="{worker}"'
                until(f"{router} knows {worker}", lambda r=router, s=series: self.metric(r, s) == 1)
            until(f"{router} knows the other router", lambda r=router: self.metric(r, "tandem_router_peers ") == 1)
        for frontend in ROLES[FRONTEND]:
            until(f"{frontend} has both routers", lambda f=frontend: self.metric(f, "tandem_frontend_routers ") == 2)
            until(f"{frontend} is ready", lambda f=frontend: get(self.admin[f], "/ready")[0] == 200)

    def stop(self, name):
        """Ends the process as an operator does, and returns its exit code."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "none within the time limit"

    def replace(self, role, version):
        """Replaces the role's processes one by one. Returns the exit codes that are not 0."""
        codes = []
        for name in ROLES[role]:
            codes.append((name, self.stop(name)))
            self.restarted.add(name)
            self.start(role, name, version)
            self.wait_until_connected()
        return [f"{name}: {code}" for name, code in codes if code != 0]

    def audit(self, lines):
        """Runs `tandem audit check` of the new version over what clients received, the ledgers and the running processes' metrics."""
        for name in ROLES[PREFILL] + ROLES[DECODE]:
            until(f"{name} is idle", lambda n=name: self.metric(n, f'tandem_worker_kv_blocks{{worker="{n}",state="in_use"}}') == 0)
        client = self.folder / "client.jsonl"
        client.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [self.binaries["new"], "audit", "check", "--client", client]
        for worker in ROLES[PREFILL] + ROLES[DECODE]:
            command += ["--ledger", self.folder / f"{worker}.ledger"]
            command += ["--lost-worker", worker] if worker in self.restarted else []
        command += ["--lost-frontend"] if self.restarted & set(ROLES[FRONTEND]) else []
        command += ["--result", self.folder / "result.json", *(str(self.admin[name]) for name in self.running)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert (self.folder / "result.json").exists(), found.stdout + found.stderr
        return json.loads((self.folder / "result.json").read_text()), found.stdout

    def errors(self):
        """Lines of the logs with the level ERROR, or of a panic."""
        colours = re.compile(r"\x1b\[[0-9;]*m")
        lines = []
        for name in self.ports:
            log = colours.sub("", (self.folder / f"{name}.log").read_text())
            lines += [f"{name}: {line}" for line in log.splitlines() if " ERROR " in line or '"ERROR"' in line or "panicked" in line]
        return lines

    def end(self):
        codes = [f"{name}: {code}" for name in reversed(list(self.ports)) if name in self.running and (code := self.stop(name)) != 0]
        for helper in self.helpers:
            helper.kill()
            helper.wait()
        return codes


def combinations():
    """Replacements of one role at a time that lead through all 16 combinations of versions (a Gray code)."""
    version = dict.fromkeys(ROLES, "old")
    for step in range(1, 16):
        role = list(ROLES)[(step & -step).bit_length() - 1]
        version[role] = "new" if version[role] == "old" else "old"
        yield role, version[role]


def scenarios():
    upgrade = [(role, "new") for role in ROLES]
    rollback = [(role, "old") for role in reversed(ROLES)]
    both = shutil.which("etcd") and shutil.which("nats-server")
    for services in (False, True) if both else (False,):
        with_them = " (etcd, NATS)" if services else ""
        yield f"workers, routers, frontends{with_them}", "old", upgrade, services
        yield f"frontends, routers, workers, new to old{with_them}", "new", rollback, services
    yield "frontends, routers, workers", "old", [(role, "new") for role in reversed(ROLES)], False
    yield "routers, frontends, workers", "old", [(role, "new") for role in (ROUTER, FRONTEND, DECODE, PREFILL)], False
    yield "all 16 combinations of roles", "old", list(combinations()), False
    if not both:
        print("etcd or nats-server is not installed: the scenarios with them are left out")


def run(binaries, folder, expected, seconds, scenario):
    title, first, steps, services = scenario
    cluster, exits = Cluster(binaries, folder, services), []
    try:
        cluster.start_all(first)
        with Load([cluster.ports[name] for name in ROLES[FRONTEND]], expected) as load:
            time.sleep(seconds)
            for role, version in steps:
                exits += cluster.replace(role, version)
                time.sleep(seconds)
        result, report = cluster.audit(load.lines)
        counts = load.counts | {"findings": result["findings"], "unverified": result["unverified"]}
        exits += cluster.end()
    finally:
        cluster.end()
    errors = cluster.errors()
    counts |= {"exits": len(exits), "errors": len(errors)}
    for line in [*exits, *errors[:5], *load.first.values()] + ([report] if result["findings"] or result["unverified"] else []):
        print(f"  {line[:2_000]}")
    return counts


def answers_of(binary, folder):
    """The answers of a cluster of one version, to which all others must be equal."""
    cluster = Cluster({"old": binary}, folder, False)
    try:
        cluster.start_all("old")
        load = Load([cluster.ports[name] for name in ROLES[FRONTEND]], None)
        found = []
        for number in range(PROMPTS):
            _, status, text, _ = answer(load.frontends[0], *request(number, "first"))
            assert status == 200, f"request {number} without a replacement: {status} {text}"
            found.append(text)
        return found
    finally:
        cluster.end()


def main():
    old, new, folder, *rest = sys.argv[1:]
    seconds = float(rest[0]) if rest else 4
    binaries = {"old": old, "new": new}
    expected = answers_of(old, f"{folder}/reference")
    header, failed = None, False
    for number, scenario in enumerate(scenarios()):
        began = time.monotonic()
        counts = run(binaries, f"{folder}/{number}", expected, seconds, scenario)
        if header is None:
            header = f"{'order of replacement':52}{''.join(f'{name:>12}' for name in counts)}     seconds"
            print(header)
        print(f"{scenario[0]:52}{''.join(f'{count:12}' for count in counts.values())}{time.monotonic() - began:12.0f}", flush=True)
        failed |= counts["answers"] == 0 or any(counts[name] for name in FAULTS)
    print("FAILED: see above" if failed else "no answer lost, cut, different or wrongly counted")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
