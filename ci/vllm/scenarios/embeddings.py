"""Embeddings, scores and rankings of real vLLM servers pass through unchanged, and none fails while a server is killed.

Two servers with the default model as an embedding model. Each answer must be the one that a server gives itself, but for its id and time, and
vLLM's count of prompt tokens must grow by the usage of the answers.
"""

import threading
import time

from client import Client, Table, prose, together
from cluster import Tandem
from engines import LAYOUTS, MODEL, free_port

LAYOUT = LAYOUTS["embeddings"]
CHANGES_ENGINES = True
REQUESTS, CLIENTS = 400, 8
KILL_AFTER = REQUESTS // 4
# What differs between two answers to the same request.
OWN = ("id", "created")
# Vectors of two servers: the last bits depend on what else is in a batch.
DIFFERENCE_MAX = 1e-4


def request(number):
    """Returns the path and the body of a request."""
    texts = [prose(f"text {number} {part}", 5 + number % 40) for part in range(1 + number % 3)]
    match number % 4:
        case 0:
            return "/v1/score", {"model": MODEL, "text_1": prose("query", 8), "text_2": texts}
        case 1:
            return "/v1/rerank", {"model": MODEL, "query": prose("query", 8), "documents": texts}
        case _:
            return "/v1/embeddings", {"model": MODEL, "input": texts}


def same(one, other):
    """Whether two answers are equal, but for what is one answer's own and the last bits of numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(name in OWN or same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= DIFFERENCE_MAX
    return one == other


class Load:
    def __init__(self, client):
        self.client, self.lock, self.next, self.answers, self.failed = client, threading.Lock(), 0, {}, []

    def run(self):
        while True:
            with self.lock:
                number, self.next = self.next, self.next + 1
            if number >= REQUESTS:
                return
            try:
                status, answer = self.client.post(*request(number))
            except (OSError, ValueError) as error:
                status, answer = 0, f"{type(error).__name__}: {error}"
            with self.lock:
                if status == 200:
                    self.answers[number] = answer
                else:
                    self.failed.append((number, status, answer))

    def kill(self, engine):
        while self.next < KILL_AFTER:
            time.sleep(0.02)
        engine.kill()


def counted(engine):
    return int(engine.metric("vllm:prompt_tokens_total"))


def scenario(stage):
    first, second = stage.engines
    with Tandem(stage) as tandem:
        listen = f"127.0.0.1:{free_port()}"
        passthrough = ("--passthrough", f"{MODEL}={first.url},{second.url}")
        tandem.start("up", "up", "--engine", "sim", "--listen", listen, *passthrough)
        client = Client(listen)
        tandem.ready(client, "up")
        before = counted(first) + counted(second)
        usage = [client.post(*request(number))[1]["usage"]["prompt_tokens"] for number in range(20)]
        both = counted(first) + counted(second) - before
        print(f"20 requests: {sum(usage)} prompt tokens in the answers, {both} as vLLM counts")
        assert sum(usage) == both
        load = Load(client)
        together([load.run] * CLIENTS + [lambda: load.kill(second)])
        differing = [number for number, answer in load.answers.items() if not same(answer, Client(first.url).post(*request(number))[1])]
        table = Table("requests", "answered", "failed", "other than the server's own", "retried or broken, as counted")
        retried = int(client.metric("tandem_frontend_passthrough_failures_total"))
        table.row(REQUESTS, len(load.answers), len(load.failed), len(differing), retried)
        assert not load.failed, f"request {load.failed[0]}"
        assert not differing, f"{request(differing[0])}: {load.answers[differing[0]]}"
