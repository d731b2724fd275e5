"""Engines, workers and clients that end in the middle of requests: no request fails, no text changes, no block stays in use.

Killed with SIGKILL: the decode engine with ten streams, a worker process with four, the prefill engine with prompts in prefill. Engines start
again at their addresses, and no block of their former cache is predicted. Clients that leave end their requests in the engines. The prefill
engine comes back without --enable-prompt-tokens-details: its counts are estimates, and marked as such.

KV handles that are used twice, late or for other tokens cannot be provoked from outside; tests with the fake engine show that they are
refused.
"""

import signal
import time

from client import Client, Gate, InBackground, Table, prose, seconds_until, together, wait_until
from cluster import NIXL, Tandem
from engines import LAYOUTS, LEASE_SECONDS
from scenarios.counts import prefix_cache
from scenarios.routing import index_equals_caches

LAYOUT = LAYOUTS["p+d"]
# Engines are other processes afterwards, and one reports less.
CHANGES_ENGINES = True
STREAMS, STREAM_TOKENS = 10, 40
LONG_PROMPTS, LONG_WORDS, IN_PREFILL_MIN = 12, 400, 5
CLIENT_LEFT_SECONDS = 1.0


def story(name):
    """Returns a prompt of about 80 tokens whose answer repeats little, so that a wrong continuation shows."""
    return f"Write a story. It is about these things: {prose(name, 30)}. Begin with a surprise, name each person, and explain why they travel."


def alone(engine, prompts, tokens):
    """Returns the answers of one engine by itself."""
    client = Client(engine.url)
    calls = [lambda prompt=prompt: client.ask("chat", prompt, cache_salt="alone", max_tokens=tokens).check() for prompt in prompts]
    return [answer.text for answer in together(calls)]


def running(engine):
    return engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting")


def in_use(engine):
    return engine.metric("vllm:kv_cache_usage_perc")


class Faults:
    def __init__(self, stage, tandem):
        self.tandem, self.prefill, self.decode = tandem, stage.engines["prefill"], stage.engines["decode"]
        router = tandem.router()
        tandem.worker("prefill-0", "prefill", self.prefill, *NIXL)
        tandem.worker("decode-0", "decode", self.decode, *NIXL)
        # The prefill engine decodes in place of the other one, by itself.
        tandem.worker("reserve", "decode", self.prefill)
        self.client = tandem.frontend(router)
        self.router = Client(tandem.router_admin)
        self.pair()
        tandem.ready(self.client, "frontend")
        self.table = Table("fault", "requests", "failed", "other texts", "resumed", "attempts failed", "seen")
        self.counted = self.failures()

    def pair(self):
        self.tandem.join("prefill-0", "decode-0")

    def all(self):
        self.tandem.join("prefill-0", "decode-0", "reserve")

    def failures(self):
        return [int(self.client.metric(f"tandem_frontend_{name}_total")) for name in ("migrations", "attempts_failed")]

    def row(self, fault, answers, expected, seen):
        failed = [answer for answer in answers if not answer.complete]
        other = [(answer.text, text) for answer, text in zip(answers, expected) if answer.text != text]
        now = self.failures()
        resumed, attempts = (after - before for after, before in zip(now, self.counted))
        self.counted = now
        self.table.row(fault, len(answers), len(failed), len(other), resumed, attempts, seen)
        assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
        assert not other, f"{len(other)} texts differ, such as {other[0][0]!r} from {other[0][1]!r}"
        return resumed

    def streams(self, prompts, tokens, gate):
        """Starts streams, and returns when each has had three chunks."""
        asked = [
            lambda number=number, prompt=prompt: self.client.ask("chat", prompt, stream=True, max_tokens=tokens, on_chunk=gate.of(number))
            for number, prompt in enumerate(prompts)
        ]
        streams = InBackground(asked)
        wait_until("all streams have begun", lambda: gate.reached(len(prompts), 3))
        return streams

    def decode_engine_is_killed(self):
        prompts = [story(f"Stream {number}") for number in range(STREAMS)]
        expected = alone(self.prefill, prompts, STREAM_TOKENS)
        gate = Gate()
        streams = self.streams(prompts, STREAM_TOKENS, gate)
        # One more prompt is prefilled, and its KV is not pulled: the decode engine stands still, and ends.
        self.decode.send(signal.SIGSTOP)
        queries = prefix_cache([self.prefill])[0]
        abandoned = InBackground([lambda: self.client.ask("completions", prose("Abandoned", 150), stream=True, max_tokens=4, leave=8)])
        wait_until("the prefill engine has computed the prompt", lambda: prefix_cache([self.prefill])[0] > queries and running(self.prefill) == 0, 60)
        held, held_since = in_use(self.prefill), time.perf_counter()
        assert held > 0, "the prefill engine does not hold the KV of the prompt"
        self.all()
        assert not gate.reached(1, STREAM_TOKENS), "a stream ended before the fault"
        self.decode.kill()
        answers = streams.results()
        assert self.row("kill -9 of the decode engine, 10 streams", answers, expected, "resumed on the other engine") == STREAMS
        abandoned.results()
        self.decode.start()
        wait_until("the prefill engine's blocks are free", lambda: in_use(self.prefill) == 0, LEASE_SECONDS + 15, 0.5)
        free_after = time.perf_counter() - held_since
        self.table.row("client left, KV never pulled", 1, 0, 0, 0, 0, f"{held:.1%} of the prefill engine's blocks, free after {free_after:.0f} s (lease {LEASE_SECONDS} s)")
        return prompts, expected

    def decode_engine_restarts(self, prompts, expected):
        self.decode.wait()
        self.pair()
        tokens = self.prefill.tokenize([{"role": "user", "content": prompts[0]}])
        overlap = self.client.explain([[*tokens, 1]])[0]["decode-0"]["overlap_blocks"]
        assert overlap == 0, f"{overlap} blocks of the former engine are predicted"
        answers = together([lambda prompt=prompt: self.client.ask("chat", prompt, max_tokens=STREAM_TOKENS) for prompt in prompts])
        predicted = self.router.metric("tandem_router_overlap_over_tokens_total", worker="decode-0")
        self.row("decode engine restarted at its address", answers, expected, f"{predicted:.0f} tokens predicted on it that were not cached")
        assert predicted == 0

    def clients_leave(self):
        gate = Gate()
        streams = self.streams([story(f"Left {number}") for number in range(5)], 200, gate)
        gate.closed = True
        streams.results()
        ended = seconds_until("the decode engine runs nothing", lambda: running(self.decode) == 0, 30, 0.01)
        freed = max(seconds_until(f"{engine.name}'s blocks are free", lambda: in_use(engine) == 0, LEASE_SECONDS, 0.1) for engine in (self.prefill, self.decode))
        self.table.row("clients leave, 5 streams", 5, 0, 0, 0, 0, f"engine runs 0 requests after {ended:.2f} s, its blocks are free {freed:.2f} s later")
        assert ended <= CLIENT_LEFT_SECONDS, f"the engine ran requests for {ended:.2f} s after the last client left"
        self.client.ask("completions", prose("Left in prefill", LONG_WORDS), stream=True, max_tokens=4, leave=1)
        both = (self.prefill, self.decode)
        ended = seconds_until("both engines run nothing", lambda: not any(map(running, both)), 60, 0.01)
        freed = seconds_until("all blocks are free", lambda: not any(map(in_use, both)), LEASE_SECONDS + 15, 0.1)
        seen = f"engines run 0 requests after {ended:.2f} s (vLLM ends its step first), blocks are free {freed:.2f} s later"
        self.table.row("client leaves in prefill", 1, 0, 0, 0, 0, seen)

    def worker_is_killed(self):
        prompts, tokens = [story(f"Worker {number}") for number in range(4)], 3 * STREAM_TOKENS
        expected = alone(self.prefill, prompts, tokens)
        gate = Gate()
        streams = self.streams(prompts, tokens, gate)
        self.all()
        assert not gate.reached(1, tokens), "a stream ended before the fault"
        self.tandem.processes["decode-0"].kill()
        ended = seconds_until("the decode engine runs nothing", lambda: running(self.decode) == 0, 30, 0.01)
        seen = f"its engine runs 0 requests after {ended:.2f} s"
        self.row("kill -9 of the decode engine's worker, 4 streams", streams.results(), expected, seen)
        self.tandem.worker("decode-0", "decode", self.decode, *NIXL)
        self.all()
        engines = {"prefill-0": self.prefill, "reserve": self.prefill, "decode-0": self.decode}
        sizes, _ = index_equals_caches(self.client, engines, self.router)
        blocks = ", ".join(f"{worker} {blocks}" for worker, blocks in sizes.items())
        self.table.row("worker started again", 0, 0, 0, 0, 0, f"index equals the engines' caches: {blocks} blocks")

    def prefill_engine_is_killed(self):
        self.pair()
        prompts = [prose(f"Long {number}", LONG_WORDS) for number in range(LONG_PROMPTS)]
        placed = lambda: self.router.metric("tandem_router_placements_total", worker="prefill-0", kind="prefill")
        before = placed()
        asked = InBackground([lambda prompt=prompt: self.client.ask("chat", prompt, max_tokens=8) for prompt in prompts])
        # vLLM's metrics do not change during a step, which takes seconds for these prompts.
        wait_until("five prompts are placed on the prefill engine", lambda: placed() - before >= IN_PREFILL_MIN, 10, 0.02)
        time.sleep(1)
        self.prefill.kill()
        self.prefill.start(reports_cached=False)
        answers, failures = asked.results(), self.failures()[1] - self.counted[1]
        seen = f"{failures} prompts were in prefill; the decode engine prefills them"
        self.row(f"kill -9 of the prefill engine, {LONG_PROMPTS} prompts", answers, alone(self.decode, prompts, 8), seen)
        assert failures >= IN_PREFILL_MIN, f"only {failures} prompts were in prefill"
        self.prefill.wait()

    def engine_reports_no_counts(self):
        self.tandem.join("reserve")
        for again in (False, True):
            hits = prefix_cache([self.prefill])[1]
            answer = self.client.ask("chat", prose("Unreported", 100), max_tokens=4).check()
            found = int(prefix_cache([self.prefill])[1] - hits)
            cached = f"{answer.cached_tokens} of {answer.prompt_tokens} tokens, source {answer.source}; vLLM's metrics: {found}"
            self.table.row(f"engine reports no counts{', again' if again else ''}", 1, 0, 0, 0, 0, cached)
            assert answer.source == "router_estimate", f"the count is not marked as an estimate: {answer.details}"
            assert (answer.cached_tokens > 0) == again, "the estimate is not the router's overlap"


def scenario(stage):
    with Tandem(stage) as tandem:
        faults = Faults(stage, tandem)
        prompts, expected = faults.decode_engine_is_killed()
        faults.decode_engine_restarts(prompts, expected)
        faults.clients_leave()
        faults.worker_is_killed()
        faults.prefill_engine_is_killed()
        faults.engine_reports_no_counts()
