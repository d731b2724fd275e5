#!/usr/bin/env python3
"""Runs a cluster of `--engine sim` processes whose number follows the router's wanted number, under a load that changes.

    bench/autoscale.py [--tandem target/release/tandem] [--minutes 6]

A router, a frontend and at most ten workers are processes. Every five seconds the script reads `tandem_router_wanted_workers`: it starts a
worker if there are too few, after a delay, and calls `tandem drain` if there are too many. Prints a line for each change, and at the end the
requests that met the service levels and the worker-seconds; exits with 1 if a request was lost, or if the number changed twice in 15 s.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WORKERS_MAX = 10
TTFT_MS, ITL_MS = 1_500, 60
START_SECONDS = 8
POLL_SECONDS = 5
INTERVAL_SECONDS = 15
# Parts of the run, and the requests in a second. A worker serves about 1.5 of these requests in a second.
LOAD = [(0.2, 1.5), (0.3, 6.0), (0.25, 10.0), (0.25, 1.5)]
# One request: 1,600 tokens, a half of which one of 20 conversations has in common, and an answer of 100.
PROMPT, COMMON, CONVERSATIONS, ANSWER = 1_600, 800, 20, 100
DEVICE = {"prefill-tokens-per-second": 4_000, "prefill-overhead-ms": 5, "decode-step-ms": 15, "decode-per-sequence-ms": 0.3}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cluster:
    def __init__(self, tandem, folder):
        self.tandem, self.folder, self.started, self.workers, self.paid = tandem, folder, 0, {}, 0.0
        self.list = folder / "workers"
        self.list.write_text("")
        self.router, self.router_admin, self.api = free_port(), free_port(), free_port()
        levels = ["--slo-ttft", str(TTFT_MS), "--slo-itl", str(ITL_MS)]
        listed = ["--workers-file", str(self.list), "--admin-listen", f"127.0.0.1:{self.router_admin}"]
        self.roles = [self.run("router", self.router, *listed, *levels)]
        self.roles.append(self.run("frontend", self.api, "--engine", "sim", "--router", f"127.0.0.1:{self.router}"))

    def run(self, role, port, *flags):
        settings = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        command = [self.tandem, role, "--listen", f"127.0.0.1:{port}", "--log", "warn", *flags]
        with open(self.folder / f"{role}-{port}.log", "w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=settings)

    def start_worker(self):
        name, port = f"w{self.started}", free_port()
        self.started += 1
        device = [f"--sim-{flag}={value}" for flag, value in DEVICE.items()]
        engine = ["--engine", "sim", "--worker-id", name, "--admin-listen", f"127.0.0.1:{free_port()}"]
        process = self.run("decode-worker", port, *engine, *device)
        self.workers[name] = (process, port, time.monotonic())
        self.write_list()

    def write_list(self):
        lines = "".join(f"127.0.0.1:{port}\n" for _, port, _ in self.workers.values())
        self.list.with_suffix(".new").write_text(lines)
        self.list.with_suffix(".new").rename(self.list)

    def reap(self):
        """Removes the workers that have ended; a worker that was not asked to fails the run."""
        for name, (process, _, since) in list(self.workers.items()):
            if process.poll() is not None:
                if process.returncode != 0:
                    sys.exit(f"worker {name} ended with status {process.returncode}: {self.folder} has its log")
                self.paid += time.monotonic() - since
                del self.workers[name]
                self.write_list()

    def drain(self):
        command = [self.tandem, "drain", f"127.0.0.1:{self.router}"]
        return subprocess.run(command, capture_output=True, text=True)

    def wanted(self):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.router_admin, timeout=5)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        found = re.search(r'^tandem_router_wanted_workers\{.*role="decode".*\} (\d+)$', text, re.MULTILINE)
        return int(found[1]) if found else None

    def end(self):
        for process, _, since in self.workers.values():
            process.terminate()
            self.paid += time.monotonic() - since
        for process in [process for process, _, _ in self.workers.values()] + self.roles[::-1]:
            process.terminate()
            process.wait(timeout=60)


def ask(port, number, outcomes):
    """Sends a streamed completion, and appends (failure or None, time to first token in ms, mean time between tokens in ms)."""
    common = random.Random(number % CONVERSATIONS).choices(range(256), k=COMMON)
    prompt = common + random.Random(1_000 + number).choices(range(256), k=PROMPT - COMMON)
    body = json.dumps({"model": "sim", "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "stream": True})
    began, times = time.perf_counter(), []
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            lines = []
            for line in response:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                lines.append(line)
        if response.status != 200 or not any(line.startswith(b"data: [DONE]") for line in lines):
            outcomes.append((f"{response.status} {b''.join(lines)[-200:]!r}", None, None))
            return
        outcomes.append((None, (times[0] - began) * 1e3, (times[-1] - times[0]) * 1e3 / (ANSWER - 1)))
    except OSError as error:
        outcomes.append((repr(error), None, None))


def load(port, seconds, outcomes, threads):
    at, number, began = 0.0, 0, time.monotonic()
    pauses = random.Random(5)
    for part, rate in LOAD:
        end = at + part * seconds
        while at < end:
            at += pauses.expovariate(rate)
            time.sleep(max(0.0, began + at - time.monotonic()))
            thread = threading.Thread(target=ask, args=(port, number, outcomes), daemon=True)
            thread.start()
            threads.append(thread)
            number += 1


def follow(cluster, generator, began):
    """Starts and drains workers until the load has ended. Returns the times of the changes of the wanted number."""
    starting, last, changes = [], None, []
    while generator.is_alive():
        time.sleep(POLL_SECONDS)
        cluster.reap()
        now = time.monotonic()
        for due in [due for due in starting if due <= now]:
            starting.remove(due)
            cluster.start_worker()
        wanted = cluster.wanted()
        if wanted is None:
            continue
        if wanted != last:
            print(f"{now - began:6.0f} s: {wanted} wanted, {len(cluster.workers)} present, {len(starting)} starting", flush=True)
            changes.append(now)
            last = wanted
        present = len(cluster.workers) + len(starting)
        starting += [now + START_SECONDS] * (min(wanted, WORKERS_MAX) - present)
        if wanted < present and not starting:
            drained = cluster.drain()
            print(f"         {(drained.stdout or drained.stderr).strip()}", flush=True)
    return changes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", default="target/release/tandem")
    parser.add_argument("--minutes", type=float, default=6)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-autoscale-"))
    cluster, outcomes, threads = Cluster(arguments.tandem, folder), [], []
    try:
        cluster.start_worker()
        subprocess.run([arguments.tandem, "ready", "--wait", f"127.0.0.1:{cluster.api}"], check=True, stdout=subprocess.DEVNULL)
        began, seconds = time.monotonic(), arguments.minutes * 60
        generator = threading.Thread(target=load, args=(cluster.api, seconds, outcomes, threads), daemon=True)
        generator.start()
        changes = follow(cluster, generator, began)
        for thread in threads:
            thread.join()
        ended = time.monotonic() - began
    finally:
        cluster.end()
    refused = [failure for failure, _, _ in outcomes if failure and failure.startswith("503")]
    lost = [failure for failure, _, _ in outcomes if failure and not failure.startswith("503")]
    good = sum(1 for failure, ttft, itl in outcomes if not failure and ttft <= TTFT_MS and itl <= ITL_MS)
    print(f"{len(outcomes)} requests: {good / len(outcomes):.1%} met the levels, {len(refused)} refused, {len(lost)} lost")
    print(f"{cluster.paid:.0f} worker-seconds, {cluster.paid / ended / WORKERS_MAX:.0%} of ten workers all the time")
    for failure in lost[:5]:
        print(f"  lost: {failure}")
    flaps = sum(1 for one, other in zip(changes, changes[1:]) if other - one < INTERVAL_SECONDS - POLL_SECONDS)
    sys.exit(1 if lost or flaps or len(outcomes) < len(threads) else 0)


if __name__ == "__main__":
    main()
