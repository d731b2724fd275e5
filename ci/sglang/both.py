"""What the scenarios for whole servers and for pairs share: the cluster in front of them, scenarios that run with both, and streams during a fault."""

import random
import subprocess
import time

import kv_events
from client import Client, Gate, InBackground, Table, prose, together, wait_until
from cluster import Tandem
from scenarios import reconcile, routing
from scenarios.faults import story

PROMPT = [1] + [(i * 7907) % 40_000 + 20 for i in range(199)]
# Its prefill takes seconds.
LONG = [1] + [(i * 7907) % 40_000 + 30 for i in range(3599)]
ANSWER_TOKENS = 12
# About 300 and 200 tokens.
SHARED, OWN = prose("The report", 210), 140
CLIENT_LEFT_SECONDS = 3
# The time in which the KV events of an answer reach the router.
EVENTS_SECONDS = 1
# A server that does not answer for this time counts as hung.
HUNG_SECONDS = 20
# The tokens of a prefill server's health checks while one prompt is computed.
PROMPT_OF_CHECKS_MAX = 100
# Beginnings of names of requests: each is in 100 requests.
LEDGER_PARTS = ("first", "second")


class Fleet:
    """The servers of a stage: whole ones, or prefill and decode servers."""

    def __init__(self, stage):
        self.stage, self.servers = stage, list(stage.engines)
        self.prefill = [server for server in self.servers if server.mode == "prefill"]
        self.decode = [server for server in self.servers if server not in self.prefill]
        # Those that compute prompts and cache them, by the names of their workers.
        role, caching = ("prefill", self.prefill) if self.prefill else ("decode", self.decode)
        self.caching = {f"{role}-{number}": server for number, server in enumerate(caching)}

    def up(self, tandem, *flags):
        return tandem.up(self.stage.folder.name, self.decode, self.prefill, *flags)

    def counted(self):
        """Returns the prompt tokens and the cached tokens that all servers have counted."""
        return [sum(numbers) for numbers in zip(*(server.counted() for server in self.caching.values()))]

    def alone(self, token_ids, tokens):
        """Returns the greedy text of the last server, or of the first pair, by itself. Both servers of a pair get the same request, as SGLang's router does it."""
        if not self.prefill:
            return self.servers[-1].alone(token_ids, tokens)["text"]
        prefill, decode = self.prefill[0], self.decode[0]
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.side_channel, "bootstrap_room": random.getrandbits(62)}
        return together([lambda server=server: server.alone(token_ids, tokens, **room) for server in (prefill, decode)])[1]["text"]

    def tokenize(self, text):
        return self.servers[-1].tokenize([{"role": "user", "content": text}])

    def idle(self):
        for server in self.servers:
            wait_until(f"{server.name} is idle", lambda: server.load() == 0, 90, 0.3)

    def removals(self):
        return sum(event["type"] == "BlockRemoved" for server in self.caching.values() for _, events in replayed(server) for event in events)

    def reusable(self, tokens):
        """Returns how many tokens of a prompt are cached when it comes again: full pages, without the last token."""
        size = self.servers[0].block_size
        return (tokens - 1) // size * size


def replayed(server):
    return kv_events.replay(server.event_sources()[1])


def pages(server):
    """Returns how many pages the server has cached, by its replayed KV events."""
    return len(kv_events.cache(replayed(server)))


def flush(server):
    """Empties the cache. A server refuses that while it runs a request, and Tandem's health checks make it run some."""
    wait_until(f"the cache of {server.name} is empty", lambda: server.control("/flush_cache") == 200, 60, 0.3)


def counts(stage):
    """Cached tokens are SGLang's own number: chat and completions, streamed and whole; cold, again, and with a shared beginning."""
    fleet = Fleet(stage)
    table = Table("endpoint", "streamed", "prompt", "cached", "SGLang's metrics", "again", "SGLang's metrics", "source")
    of_checks = PROMPT_OF_CHECKS_MAX if fleet.prefill else 1
    with Tandem(stage) as tandem:
        client, seen = fleet.up(tandem), set()
        for endpoint in ("chat", "completions"):
            for stream in (False, True):
                prompt, cells = f"{SHARED} {prose(f'{endpoint} {stream}', OWN)}", []
                for again in (False, True):
                    before = fleet.counted()
                    answer = client.ask(endpoint, prompt, stream=stream, max_tokens=ANSWER_TOKENS).check()
                    wait_until("SGLang counts the prompt", lambda: fleet.counted()[0] >= before[0] + answer.prompt_tokens, 10)
                    prompt_tokens, cached = (now - then for now, then in zip(fleet.counted(), before))
                    assert answer.cached_tokens == cached, f"{answer.usage}, but SGLang counted {cached} cached tokens"
                    assert 0 <= prompt_tokens - answer.prompt_tokens < of_checks, f"{answer.usage}, but SGLang counted {prompt_tokens} prompt tokens"
                    assert answer.source == "worker", f"the count is an estimate: {answer.details}"
                    assert answer.usage["completion_tokens"] == ANSWER_TOKENS, answer.usage
                    if again:
                        assert cached == fleet.reusable(answer.prompt_tokens), f"{cached} cached tokens of a prompt that was sent before"
                    elif not seen:
                        assert cached == 0, f"{cached} cached tokens of the first prompt"
                    seen.add(cached)
                    cells += [answer.cached_tokens, cached]
                table.row(endpoint, "yes" if stream else "no", answer.prompt_tokens, *cells, answer.source)
        assert len(seen) > 2, f"no prompt found a shared beginning: the cached tokens were {sorted(seen)}"
        samples = client.ask("completions", PROMPT, n=3, max_tokens=4, temperature=1).check()
        assert (samples.prompt_tokens, samples.usage["completion_tokens"]) == (len(PROMPT), 12), samples.usage


def salts(stage):
    """Two accounts with API keys share no cached tokens, and neither do two salts of one account."""
    fleet, keys, secret = Fleet(stage), stage.folder / "keys.toml", {}
    for name in ("alice", "bob"):
        command = [stage.tandem, "key", "add", name, "--api-keys-file", keys]
        secret[name] = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()[-1]
    table = Table("account", "salt", "prompt", "cached", "again")
    with Tandem(stage) as tandem:
        address = fleet.up(tandem, "--api-keys-file", keys).address
        for name, salt in (("alice", None), ("bob", None), ("alice", "one"), ("alice", "two"), ("bob", "one")):
            client, options = Client(address, secret[name]), {"cache_salt": salt} if salt else {}
            first = client.ask("completions", PROMPT, max_tokens=2, **options).check()
            time.sleep(EVENTS_SECONDS)
            again = client.ask("completions", PROMPT, max_tokens=2, **options).check()
            table.row(name, salt or "", first.prompt_tokens, first.cached_tokens, again.cached_tokens)
            assert (first.cached_tokens, again.cached_tokens) == (0, fleet.reusable(len(PROMPT)))


def texts(stage):
    """Greedy texts are those of SGLang alone for the same token ids; a chat is rendered to the same tokens, with the same text."""
    fleet, table = Fleet(stage), Table("prompt", "streamed", "tokens", "text")
    with Tandem(stage) as tandem:
        client = fleet.up(tandem)
        for number in range(3):
            prompt = story(f"Text {number}")
            ids = fleet.tokenize(prompt)
            expected = fleet.alone(ids, 40)
            for endpoint, sent in (("completions", ids), ("chat", prompt)):
                for stream in (False, True):
                    answer = client.ask(endpoint, sent, stream=stream, max_tokens=40).check()
                    assert answer.prompt_tokens == len(ids), f"{answer.usage}, but SGLang renders {len(ids)} tokens"
                    assert answer.text == expected, f"{answer.text!r}, not {expected!r}"
                    table.row(endpoint, "yes" if stream else "no", answer.prompt_tokens, repr(answer.text[:40]))


def index(stage):
    """The router's index equals the servers' caches, which their replayed KV events describe, also after evictions and a flush."""
    fleet = Fleet(stage)
    with Tandem(stage) as tandem:
        client = fleet.up(tandem)
        for part in ("before the flush", "after the flush"):
            for start in range(0, 20, 4):
                prompts = [prose(f"{part} {number}", 600) for number in range(start, start + 4)]
                together([lambda prompt=prompt: client.ask("completions", prompt, max_tokens=8).check() for prompt in prompts])
            sizes, prompts = routing.index_equals_caches(client, fleet.caching)
            removed = fleet.removals()
            print(f"{part}: {', '.join(f'{worker} {blocks} blocks' for worker, blocks in sizes.items())}; {prompts} leaves compared, {removed} removals seen")
            assert all(sizes.values()) and removed, "nothing was cached, or nothing was evicted"
            for server in fleet.caching.values():
                flush(server)


def documents(stage):
    """Questions about more documents than one server can cache find at least 95 % of what could be cached (8 documents, 5 questions)."""
    fleet, subject = Fleet(stage), f"{stage.folder.name} of"
    table = Table("placement", "prompt tokens", "cached", "share", "of what is possible")
    with Tandem(stage) as tandem:
        answers = routing.ask_all(fleet.up(tandem), subject)
        prompt, cached = sum(answer.prompt_tokens for answer in answers), sum(answer.cached_tokens for answer in answers)
        tokens, at_most = routing.possible(fleet.servers[0], subject)
        table.row("kv_aware", prompt, cached, f"{cached / prompt:.3f}", f"{cached / at_most:.3f}")
        assert prompt == tokens, f"{prompt} prompt tokens, but SGLang's template and tokenizer give {tokens}"
        assert cached / at_most >= routing.OF_POSSIBLE_MIN, f"{cached} of {at_most} possible tokens were cached"


def ledger(stage):
    """Usage, ledger, Tandem's metrics and SGLang's metrics agree over 200 requests, of which 20 % are aborted."""
    fleet = Fleet(stage)
    table = Table("worker", "prompt tokens: Tandem", "SGLang", "cached: Tandem", "SGLang", "prompts without a count", "audit")
    with Tandem(stage) as tandem:
        client = fleet.up(tandem)
        before = {worker: server.counted() for worker, server in fleet.caching.items()}
        calls, answers = [call for part in LEDGER_PARTS for call in reconcile.requests(client, part)], []
        for start in range(0, len(calls), reconcile.AT_ONCE):
            answers += together(calls[start : start + reconcile.AT_ONCE])
        failed = [answer for answer in answers if not answer.complete and answer.error != "left"]
        assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
        wait_until("the cluster is idle", lambda: reconcile.idle(client), 90, 0.5)
        fleet.idle()
        estimates = [answer for answer in answers if answer.complete and answer.source != "worker"]
        assert not estimates, f"{len(estimates)} answers have an estimate"
        verdict = tandem.audit(answers, client.get("/metrics")[1])
        print(f"{len(answers)} requests, {sum(not answer.complete for answer in answers)} aborted")
        for worker, server in fleet.caching.items():
            queried, found = (now - then for now, then in zip(server.counted(), before[worker]))
            prompt, cached = (int(client.metric(f"tandem_worker_{what}_tokens_total", worker=worker)) for what in ("prompt", "cached"))
            missing = reconcile.uncounted(tandem.ledgers[-1], worker)
            table.row(worker, prompt, queried, cached, found, f"{len(missing)} ({sum(missing)} tokens)", verdict)
            more = queried - prompt
            # A prefill server also counts the prompts of its own health checks, which no one else knows.
            known = more >= 0 if fleet.prefill else reconcile.is_sum_of_some(more, missing)
            assert known, f"{worker} counted {prompt} prompt tokens, its server {queried}; without a count are {missing}"
            assert 0 <= found - cached <= min(more, sum(missing)), f"{worker} counted {cached} cached tokens, its server {found}; without a count are {missing}"


class Streams:
    """Streams during a fault: all answers are complete, and their texts are those of SGLang alone."""

    def __init__(self, fleet, client, count, tokens):
        self.fleet, self.client, self.tokens = fleet, client, tokens
        self.table = Table("fault", "requests", "failed", "other texts", "resumed or repeated", "seconds until the last answer")
        self.prompts = [story(f"Stream {number}") for number in range(count)]
        self.expected = [fleet.alone(fleet.tokenize(prompt), tokens) for prompt in self.prompts]

    def repeated(self):
        """Returns how many attempts were resumed or repeated so far."""
        return sum(int(self.client.metric(f"tandem_frontend_{name}_total")) for name in ("migrations", "attempts_failed"))

    def during(self, name, fault, in_prefill=False):
        """Sends the prompts. The fault comes when all answers have begun, or with `in_prefill` while their prompts are computed; such answers
        have no reference."""
        gate, before = Gate(), self.repeated()
        prompts = [f"{prose(f'{name} {at}', 400)} {prompt}" if in_prefill else prompt for at, prompt in enumerate(self.prompts)]
        tokens = self.tokens
        asked = [lambda at=at, prompt=prompt: self.client.ask("chat", prompt, stream=True, max_tokens=tokens, on_chunk=gate.of(at)) for at, prompt in enumerate(prompts)]
        streams = InBackground(asked)
        if in_prefill:
            time.sleep(1)
        else:
            wait_until("all streams have begun", lambda: gate.reached(len(prompts), 3), 120)
            assert not gate.reached(1, tokens), "a stream ended before the fault"
        began = time.perf_counter()
        fault()
        answers = streams.results()
        took = time.perf_counter() - began
        failed = [answer for answer in answers if not answer.complete]
        differ = [] if in_prefill else [(answer.text, text) for answer, text in zip(answers, self.expected) if answer.text != text]
        repeated = self.repeated() - before
        self.table.row(name, len(answers), len(failed), "–" if in_prefill else len(differ), repeated, f"{took:.1f}")
        assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
        assert not differ, f"{len(differ)} texts differ, such as {differ[0][0]!r} from {differ[0][1]!r}"
        assert repeated, "the fault came too late: no attempt was resumed or repeated"

    def joined(self, count):
        wait_until("all workers have joined", lambda: self.client.metric("tandem_router_workers", state="joined") == count, 90)

    def back(self, server, worker):
        """Starts a server that was killed; its worker joins with an empty index."""
        server.start()
        server.wait()
        self.joined(len(self.fleet.servers))
        wait_until(f"the index of {worker} is empty", lambda: not self.client.metric("tandem_router_index_blocks", worker=worker), 60)


BOTH = (counts, salts, texts, index, documents, ledger)
