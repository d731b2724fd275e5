"""Each data-parallel rank of a server is a worker: requests reach the rank whose cache they were placed for.

One server with two ranks, whose load balancer is not used. Counts are those of vLLM's metrics of the rank; texts are those of the server alone;
the index of each rank equals the cache of that rank by its own events; clients that leave end their requests. Then one rank is killed.
"""

import os
import signal
import time
from pathlib import Path

from client import Client, Gate, Table, prose, together, wait_until
from cluster import Tandem
from engines import BLOCK_SIZE, LAYOUTS
from scenarios.routing import index_equals_caches

LAYOUT = LAYOUTS["ranks"]
CHANGES_ENGINES = True
DOCUMENTS, WORDS, ANSWER_TOKENS = 6, 150, 8
STREAMS = 4
EVENTS_SECONDS = 0.5
WORKERS = ("decode-0", "decode-1")


class Rank:
    """One rank of a server, as scenarios/routing.py reads an engine."""

    def __init__(self, engine, rank):
        self.engine, self.rank, self.block_size = engine, rank, engine.block_size

    def event_sources(self):
        return self.engine.event_sources(self.rank)

    def metric(self, name):
        return self.engine.metric(name, engine=str(self.rank))

    def counted(self):
        return [int(self.metric(f"vllm:prefix_cache_{what}_total")) for what in ("queries", "hits")]

    def running(self):
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")


def requests_reach_their_rank(client, engine, ranks):
    table = Table("document", "again", "worker", "prompt", "cached", "vLLM's metrics: rank 0", "rank 1", "text as vLLM's")
    used = set()
    for document in range(DOCUMENTS):
        prompt = prose(f"Document {document}", WORDS)
        expected = Client(engine.url).ask("completions", prompt, cache_salt="alone", max_tokens=ANSWER_TOKENS).check().text
        first = None
        for again in (False, True):
            before = [rank.counted() for rank in ranks]
            answer = client.ask("completions", prompt, max_tokens=ANSWER_TOKENS).check()
            at = WORKERS.index(answer.details["decode_worker"])
            wait_until("the rank counts the prompt", lambda: ranks[at].counted()[0] >= before[at][0] + answer.prompt_tokens, 10)
            counted = [[now - then for now, then in zip(rank.counted(), earlier)] for rank, earlier in zip(ranks, before)]
            table.row(document, "yes" if again else "no", WORKERS[at], answer.prompt_tokens, answer.cached_tokens, *counted, answer.text == expected)
            assert counted[at] == [answer.prompt_tokens, answer.cached_tokens], f"{answer.usage}, but the rank counted {counted[at]}"
            assert counted[1 - at] == [0, 0], f"the other rank counted {counted[1 - at]}"
            assert answer.source == "worker" and answer.text == expected, f"{answer}, not {expected!r}"
            assert answer.cached_tokens == ((answer.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE if again else 0)
            assert first in (None, at), "the second request went to the other rank"
            first = at
            used.add(at)
            time.sleep(EVENTS_SECONDS)
    assert used == {0, 1}, f"only rank {used} was used"


def clients_leave(client, ranks):
    gate = Gate()
    ask = lambda number: client.ask("chat", prose(f"Left {number}", 20), stream=True, max_tokens=300, on_chunk=gate.of(number))

    def leave():
        wait_until("all streams have begun", lambda: gate.reached(STREAMS, 3))
        running = [int(rank.running()) for rank in ranks]
        gate.closed = True
        return running

    *_, running = together([*(lambda number=number: ask(number) for number in range(STREAMS)), leave])
    assert sum(running) == STREAMS and min(running) > 0, f"the ranks ran {running} requests"
    began = time.perf_counter()
    wait_until("no rank runs a request", lambda: not any(rank.running() for rank in ranks), 30, 0.05)
    print(f"{STREAMS} clients left; the ranks ran {running} requests, and none {time.perf_counter() - began:.2f} s later", flush=True)


def rank_is_killed(client, engine):
    """vLLM's server ends as a whole when a rank ends; Tandem's workers wait for it."""
    titles = {process: Path(f"/proc/{process}/cmdline").read_text() for process in engine.processes()}
    cores = [process for process, title in titles.items() if "EngineCore_DP1" in title]
    assert len(cores) == 1, f"the core of rank 1 is none of the processes {titles}"
    os.kill(cores[0], signal.SIGKILL)
    began = time.perf_counter()
    answer = client.ask("completions", "Hello", max_tokens=4)
    print(f"kill -9 of rank 1: a request got HTTP {answer.status} after {time.perf_counter() - began:.1f} s; the server {'runs' if engine.healthy() else 'answers 503 or has ended'}", flush=True)
    wait_until("both workers have left", lambda: client.metric("tandem_router_workers", state="joined") == 0, 60)
    engine.stop()
    engine.start()
    engine.wait()
    wait_until("both workers have joined", lambda: client.metric("tandem_router_workers", state="joined") == 2, 90)
    client.ask("completions", "Hello", max_tokens=4).check()
    print("the restarted server's ranks serve again", flush=True)


def scenario(stage):
    engine = next(iter(stage.engines))
    ranks = [Rank(engine, rank) for rank in range(LAYOUT.ranks)]
    with Tandem(stage) as tandem:
        client = tandem.up("ranks", [engine], ranks=LAYOUT.ranks)
        requests_reach_their_rank(client, engine, ranks)
        sizes, prompts = index_equals_caches(client, dict(zip(WORKERS, ranks)))
        print(f"index equals the ranks' caches: {sizes} blocks, {prompts} prompts", flush=True)
        clients_leave(client, ranks)
        rank_is_killed(client, engine)
