#!/usr/bin/env python3
"""Runs a cluster of `tandem up --engine sim` under mixed load, and checks that nothing fails, grows or stays behind.

    bench/soak.py [--minutes 20] [--tandem target/release/tandem]

Twelve clients, each with requests of its own kind: chats, streams, clients that leave, JSON schemas, regular expressions, tools, custom tools
with a grammar, n = 4, messages, responses, completions, and bad requests. Prints a line a minute with the answers, the memory and the files of
the process; exits with 1 if a request failed, if memory grew by more than 25 % in the second half, or if work, bookings or lost lines remain.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
GROWTH_MAX = 1.25
TIMEOUT_SECONDS = 60


def words(random_of_client):
    """Returns one of 40 long beginnings with an end of its own, so that caches fill, are used and evict."""
    head = random.Random(random_of_client.randrange(40))
    return " ".join(f"w{head.randrange(5000)}" for _ in range(head.randrange(20, 400))) + f" {random_of_client.random()}"


def chat(**fields):
    return lambda text: ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 60, **fields})


KINDS = {
    "chat": chat(),
    "stream": chat(stream=True),
    "leaves": chat(stream=True, max_tokens=900),
    "schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}),
    "regex": chat(structured_outputs={"regex": "[a-z]{2,9}"}),
    "tool": chat(tools=[TOOL], tool_choice="required"),
    "four": chat(n=4),
    "messages": lambda text: ("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 40}),
    "responses": lambda text: ("/v1/responses", {"input": text, "max_output_tokens": 40}),
    "grammar": lambda text: (
        "/v1/responses",
        {
            "input": text,
            "max_output_tokens": 60,
            "tools": [{"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{1,5}"}}],
            "tool_choice": {"type": "custom", "name": "patch"},
        },
    ),
    "completions": lambda text: ("/v1/completions", {"prompt": text, "max_tokens": 40, "logprobs": 2}),
    "bad": lambda text: ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "temperature": "hot"}),
}


def request(port, kind, text, model):
    """Sends a request. Returns what went wrong; `left` if the client has left, and None if the answer is right."""
    path, body = KINDS[kind](text)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", path, json.dumps({"model": model, **body}), {"content-type": "application/json"})
        answer = connection.getresponse()
        if kind == "leaves" and answer.status == 200:
            answer.read(random.randrange(1, 4000))
            return "left"
        data = answer.read().decode()
        if answer.status != (400 if kind == "bad" else 200):
            return f"{kind}: {answer.status} {data[:200]}"
        answer = "[DONE]" in data if kind == "stream" else json.loads(data)
        if kind == "schema" and answer["choices"][0]["finish_reason"] == "stop":
            answer = json.loads(answer["choices"][0]["message"]["content"])
        return None if answer else f"{kind}: incomplete"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{kind}: {type(error).__name__} {error}"
    finally:
        connection.close()


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def state(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024, len(os.listdir(f"/proc/{pid}/fd"))


def metric(text, name):
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}(\{{|\s)", line))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--tandem", default="target/release/tandem")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-soak-"))
    port = free_port()
    command = [options.tandem, "up", "--engine", "sim", "--sim-speedup", "20", "--prefill-workers", "2", "--decode-workers", "2"]
    command += ["--listen", f"127.0.0.1:{port}", "--ledger", str(folder / "ledger")]
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "XDG_RUNTIME_DIR": str(folder)})
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if get(port, "/ready")[0] == 200:
                    break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the cluster did not start: see {folder}/log")
            time.sleep(0.2)
        model = json.loads(get(port, "/v1/models")[1])["data"][0]["id"]
        counts, problems, stop = Counter(), [], time.monotonic() + options.minutes * 60

        def client(kind):
            of_client = random.Random(kind)
            while time.monotonic() < stop:
                problem = request(port, kind, words(of_client), model)
                counts["right" if problem is None else "left" if problem == "left" else "failed"] += 1
                if problem not in (None, "left"):
                    problems.append(problem)

        clients = [threading.Thread(target=client, args=[kind]) for kind in KINDS]
        for thread in clients:
            thread.start()
        sizes = []
        while time.monotonic() < stop:
            time.sleep(min(60, max(0.0, stop - time.monotonic())))
            sizes.append(state(process.pid))
            print(f"{dict(counts)}; RSS {sizes[-1][0]:.0f} MiB, {sizes[-1][1]} files", flush=True)
        for thread in clients:
            thread.join()
        remaining = ("tandem_router_bookings", "tandem_worker_queue_depth", "tandem_frontend_inflight_requests", "tandem_frontend_inflight_sequences")
        for _ in range(100):
            metrics = get(port, "/metrics")[1]
            rest = {name: metric(metrics, name) for name in remaining}
            if not any(rest.values()):
                break
            time.sleep(0.2)
        lost = {name: metric(metrics, name) for name in set(re.findall(r"^(tandem_\w*lost\w*_total)", metrics, re.M))}
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        process.kill()
    half = [size for size, _ in sizes[len(sizes) // 2 :]]
    grown = max(half) / half[0]
    print(f"{dict(counts)}; remaining {rest}; lost {lost}; RSS grew by {grown - 1:.1%} in the second half; exit {code}; {folder}")
    print("\n".join(problems[:10]))
    sys.exit(bool(problems or any(rest.values()) or any(lost.values()) or grown > GROWTH_MAX or code))


if __name__ == "__main__":
    main()
