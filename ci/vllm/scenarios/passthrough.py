"""10,000 requests pass through to two servers that are killed and restarted in turn: only requests whose answer had begun fail.

The servers echo (echo_server.py), so the scenario needs no engine. Each answer must be the request's body, byte for byte; a tenth of the
requests are forms with audio. A request that has no complete answer is counted as broken if its answer had begun, and else as failed.
"""

import contextlib
import http.client
import random
import sys
import threading
import time
from pathlib import Path

from client import Client, Table, together, wait_until
from cluster import Process, Tandem, answers
from engines import Layout, free_port

LAYOUT = Layout(engines=())
REQUESTS, CLIENTS = 10_000, 16
MODEL = "echo"
KILLS_MIN = 4
# The pause between the start of one server and the kill of the other.
PAUSE_SECONDS = 0.3
ECHO = Path(__file__).parents[1] / "echo_server.py"


def body(number):
    """Returns the path, the content type and the body of a request."""
    chosen = random.Random(number)
    if number % 10:
        text = "".join(chosen.choices("abc é", k=chosen.randrange(3000)))
        return "/v1/embeddings", "application/json", f' {{"input" : "{text}","model":"{MODEL}"}}\n'.encode()
    head = b'--xYz\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
    file = head % (b"file", b'; filename="a.wav"') + chosen.randbytes(20_000) + b"\r\n"
    return "/v1/audio/transcriptions", "multipart/form-data; boundary=xYz", file + head % (b"model", b"") + MODEL.encode() + b"\r\n--xYz--\r\n"


class Load:
    """The requests of all clients, and what became of them."""

    def __init__(self, address):
        self.address, self.lock, self.next = address, threading.Lock(), 0
        self.complete, self.broken, self.failed = 0, [], []

    def take(self):
        with self.lock:
            self.next += 1
            return self.next - 1 if self.next <= REQUESTS else None

    def run(self):
        """Sends requests on one connection after the other until none is left."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        while (number := self.take()) is not None:
            path, kind, sent = body(number)
            status, began = None, False
            try:
                connection.request("POST", path, sent, {"content-type": kind})
                response = connection.getresponse()
                status, began = response.status, response.status == 200
                received = response.read()
                is_complete = began and received == sent and response.headers["content-type"] == kind
                outcome = None if is_complete else f"HTTP {status}, {received[:200]!r}"
                # An answer that is complete but differs is no broken one.
                began = False
            except (OSError, http.client.HTTPException) as error:
                outcome = f"HTTP {status}, {type(error).__name__}: {error}"
                connection.close()
            with self.lock:
                if outcome is None:
                    self.complete += 1
                else:
                    (self.broken if began else self.failed).append(outcome)
        connection.close()


class Servers:
    """Two echo servers, each at an address of its own."""

    def __init__(self, folder):
        self.folder, self.ports, self.kills = folder, [free_port(), free_port()], 0
        self.processes = [None, None]

    def start(self, at):
        self.processes[at] = Process(f"echo-{at}", [sys.executable, ECHO, self.ports[at]], self.folder)
        client = Client(f"127.0.0.1:{self.ports[at]}")
        wait_until(f"echo-{at} serves", lambda: answers(lambda: client.get("/health")[0] == 200), 30, 0.02)

    def kill_in_turn(self, load):
        """Kills and restarts one server after the other while there are requests."""
        while load.next < REQUESTS:
            at = self.kills % 2
            self.processes[at].kill()
            self.kills += 1
            self.start(at)
            time.sleep(PAUSE_SECONDS)

    def end(self):
        for process in self.processes:
            if process:
                process.end()


def scenario(stage):
    servers = Servers(stage.folder)
    with contextlib.ExitStack() as stack:
        stack.callback(servers.end)
        servers.start(0)
        servers.start(1)
        tandem = stack.enter_context(Tandem(stage))
        listen, urls = f"127.0.0.1:{free_port()}", ",".join(f"http://127.0.0.1:{port}" for port in servers.ports)
        limits = ("--max-sequences-per-account", "0")
        tandem.start("up", "up", "--engine", "sim", "--listen", listen, "--passthrough", f"{MODEL}={urls}", *limits)
        client = Client(listen)
        tandem.ready(client, "up")
        load, began = Load(listen), time.perf_counter()
        together([load.run] * CLIENTS + [lambda: servers.kill_in_turn(load)])
        seconds = time.perf_counter() - began
        counted = int(client.metric("tandem_frontend_passthrough_failures_total"))
        in_flight = client.metric("tandem_frontend_passthrough_inflight_requests") + client.metric("tandem_frontend_inflight_requests")
        table = Table("requests", "complete and equal", "broken after they had begun", "failed", "kills", "retried or broken, as counted", "seconds")
        table.row(REQUESTS, load.complete, len(load.broken), len(load.failed), servers.kills, counted, f"{seconds:.1f}")
        assert not load.failed, f"{len(load.failed)} requests failed before an answer had begun, such as {load.failed[0]}"
        assert load.complete + len(load.broken) == REQUESTS
        assert servers.kills >= KILLS_MIN, f"only {servers.kills} servers were killed"
        assert counted > 0, "no kill has met a request"
        assert in_flight == 0, f"{in_flight} requests are still in flight"
