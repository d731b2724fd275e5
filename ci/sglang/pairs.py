"""Scenarios with prefill and decode on different SGLang servers: two pairs, so that a request can go to another one."""

import random
import signal
import subprocess
import time

import kv_events
from client import Client, Gate, InBackground, Table, prose, seconds_until, together, wait_until
from cluster import Tandem
from scenarios import reconcile, routing
from scenarios.faults import story

PROMPT = [1] + [(i * 7907) % 40_000 + 20 for i in range(199)]
# Its prefill takes seconds.
LONG = [1] + [(i * 7907) % 40_000 + 30 for i in range(3599)]
ANSWER_TOKENS = 12
SHARED, OWN = prose("The report", 210), 140
# A fault is followed by an answer on another pair within this time after its detection.
RECOVERY_SECONDS = 3
# A server that does not answer for this time counts as hung.
HUNG_SECONDS = 20
# The tokens of the health checks while one prompt is computed.
PROMPT_OF_CHECKS_MAX = 100
LEDGER_PARTS = ("first pair", "second pair")


def halves(stage):
    """Returns the prefill servers and the decode servers."""
    servers = list(stage.engines)
    return [server for server in servers if server.mode == "prefill"], [server for server in servers if server.mode == "decode"]


def alone(prefill, decode, token_ids, tokens):
    """Returns the greedy answer of a pair by itself, with a salt that Tandem never uses. Both servers get the same request, as SGLang's router does it."""
    room = random.getrandbits(62)
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.side_channel, "bootstrap_room": room}
    answers = together([lambda server=server: server.alone(token_ids, tokens, **fields) for server in (prefill, decode)])
    return answers[1]["text"]


def total(servers):
    return [sum(numbers) for numbers in zip(*(server.counted() for server in servers))]


def reusable(tokens, server):
    return (tokens - 1) // server.block_size * server.block_size


def up(tandem, name, stage, *flags):
    prefill, decode = halves(stage)
    return tandem.up(name, decode, prefill, *flags)


def idle(servers):
    for server in servers:
        wait_until(f"{server.name} is idle", lambda: server.load() == 0, 60, 0.3)


def pair_counts(stage):
    """P/D: cached tokens are the prefill server's own number: chat and completions, streamed and whole; cold, again, and with a shared beginning."""
    prefill, _ = halves(stage)
    table = Table("endpoint", "streamed", "prompt", "cached", "SGLang's metrics", "again", "SGLang's metrics", "source")
    with Tandem(stage) as tandem:
        client = up(tandem, "pair_counts", stage)
        seen = set()
        for endpoint in ("chat", "completions"):
            for stream in (False, True):
                prompt, cells = f"{SHARED} {prose(f'{endpoint} {stream}', OWN)}", []
                for again in (False, True):
                    before = total(prefill)
                    answer = client.ask(endpoint, prompt, stream=stream, max_tokens=ANSWER_TOKENS).check()
                    wait_until("SGLang counts the prompt", lambda: total(prefill)[0] > before[0], 10)
                    counted = [now - then for now, then in zip(total(prefill), before)]
                    assert answer.cached_tokens == counted[1], f"{answer.usage}, but SGLang counted {counted}"
                    assert 0 <= counted[0] - answer.prompt_tokens < PROMPT_OF_CHECKS_MAX, f"{answer.usage}, but SGLang counted {counted}"
                    assert answer.source == "worker", f"the count is an estimate: {answer.details}"
                    assert answer.usage["completion_tokens"] == ANSWER_TOKENS, answer.usage
                    if again:
                        assert counted[1] == reusable(answer.prompt_tokens, prefill[0]), f"{counted} for a prompt that was sent before"
                    elif not seen:
                        assert counted[1] == 0, f"{counted} for the first prompt"
                    seen.add(counted[1])
                    cells += [answer.cached_tokens, counted[1]]
                table.row(endpoint, "yes" if stream else "no", answer.prompt_tokens, *cells, answer.source)
        assert len(seen) > 2, f"no prompt found a shared beginning: the cached tokens were {sorted(seen)}"
        samples = client.ask("completions", PROMPT, n=3, max_tokens=4, temperature=1).check()
        assert (samples.prompt_tokens, samples.usage["completion_tokens"]) == (len(PROMPT), 12), samples.usage


def pair_salts(stage):
    """P/D: two accounts with API keys share no cached tokens, and neither do two salts of one account."""
    prefill, _ = halves(stage)
    keys, secret = stage.folder / "keys.toml", {}
    for name in ("alice", "bob"):
        command = [stage.tandem, "key", "add", name, "--api-keys-file", keys]
        secret[name] = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()[-1]
    table = Table("account", "salt", "prompt", "cached", "again")
    with Tandem(stage) as tandem:
        address = up(tandem, "pair_salts", stage, "--api-keys-file", keys).address
        for name, salt in (("alice", None), ("bob", None), ("alice", "one"), ("alice", "two"), ("bob", "one")):
            client, options = Client(address, secret[name]), {"cache_salt": salt} if salt else {}
            first, again = (client.ask("completions", PROMPT, max_tokens=2, **options).check() for _ in range(2))
            table.row(name, salt or "", first.prompt_tokens, first.cached_tokens, again.cached_tokens)
            assert (first.cached_tokens, again.cached_tokens) == (0, reusable(len(PROMPT), prefill[0]))


def pair_texts(stage):
    """P/D: greedy texts are those of a pair of SGLang servers alone for the same token ids."""
    (prefill, *_), (decode, *_) = halves(stage)
    table = Table("prompt", "streamed", "tokens", "text")
    with Tandem(stage) as tandem:
        client = up(tandem, "pair_texts", stage)
        for number in range(3):
            messages = [{"role": "user", "content": story(f"Text {number}")}]
            ids = prefill.tokenize(messages)
            expected = alone(prefill, decode, ids, 40)
            for endpoint, prompt in (("completions", ids), ("chat", messages)):
                for stream in (False, True):
                    answer = client.ask(endpoint, prompt, stream=stream, max_tokens=40).check()
                    assert answer.prompt_tokens == len(ids), f"{answer.usage}, but SGLang renders {len(ids)} tokens"
                    assert answer.text == expected, f"{answer.text!r}, not {expected!r}"
                    table.row(endpoint, "yes" if stream else "no", answer.prompt_tokens, repr(answer.text[:40]))


def pair_index(stage):
    """P/D: the router's index equals the prefill servers' caches, which their replayed KV events describe, also after evictions."""
    prefill, _ = halves(stage)
    with Tandem(stage) as tandem:
        client = up(tandem, "pair_index", stage)
        for start in range(0, 20, 4):
            prompts = [prose(f"pair {number}", 600) for number in range(start, start + 4)]
            together([lambda prompt=prompt: client.ask("completions", prompt, max_tokens=8).check() for prompt in prompts])
        workers = {f"prefill-{number}": server for number, server in enumerate(prefill)}
        sizes, prompts = routing.index_equals_caches(client, workers)
        removed = sum(event["type"] == "BlockRemoved" for server in prefill for _, events in kv_events.replay(server.event_sources()[1]) for event in events)
        print(f"blocks in the caches and in the index: {sizes}; {prompts} prompts have the same overlap; {removed} events of evictions")
        assert removed, "nothing was evicted"


def pair_documents(stage):
    """P/D: 8 documents with 5 questions each find at least 95 % of the tokens that one cache without evictions would have."""
    prefill, _ = halves(stage)
    table = Table("router", "prompt tokens", "cached", "share", "of possible")
    with Tandem(stage) as tandem:
        client = up(tandem, "pair_documents", stage)
        answers = routing.ask_all(client, "pair documents")
        prompt, cached = sum(answer.prompt_tokens for answer in answers), sum(answer.cached_tokens for answer in answers)
        tokens, at_most = routing.possible(prefill[0], "pair documents")
        table.row("kv_aware", prompt, cached, f"{cached / prompt:.3f}", f"{cached / at_most:.3f}")
        assert prompt == tokens, f"{prompt} prompt tokens, but SGLang's template and tokenizer give {tokens}"
        assert cached / at_most >= routing.OF_POSSIBLE_MIN, f"{cached} of {at_most} possible tokens were cached"


def pair_ledger(stage):
    """P/D: usage, ledger, Tandem's metrics and the prefill servers' metrics agree over 200 requests, of which 20 % are aborted."""
    prefill, decode = halves(stage)
    servers = {f"prefill-{number}": server for number, server in enumerate(prefill)}
    table = Table("worker", "prompt tokens: Tandem", "SGLang", "cached: Tandem", "SGLang", "prompts without a count", "audit")
    with Tandem(stage) as tandem:
        client = up(tandem, "pair_ledger", stage)
        before = {worker: server.counted() for worker, server in servers.items()}
        calls, answers = [call for part in LEDGER_PARTS for call in reconcile.requests(client, part)], []
        for start in range(0, len(calls), reconcile.AT_ONCE):
            answers += together(calls[start : start + reconcile.AT_ONCE])
        failed = [answer for answer in answers if not answer.complete and answer.error != "left"]
        assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
        wait_until("the cluster is idle", lambda: reconcile.idle(client), 90, 0.5)
        idle(prefill + decode)
        estimates = [answer for answer in answers if answer.complete and answer.source != "worker"]
        assert not estimates, f"{len(estimates)} answers have an estimate"
        verdict = tandem.audit(answers, client.get("/metrics")[1])
        print(f"{len(answers)} requests, {sum(not answer.complete for answer in answers)} aborted")
        for worker, server in servers.items():
            queried, found = (now - then for now, then in zip(server.counted(), before[worker]))
            prompt, cached = (int(client.metric(f"tandem_worker_{what}_tokens_total", worker=worker)) for what in ("prompt", "cached"))
            missing = reconcile.uncounted(tandem.ledgers[-1], worker)
            table.row(worker, prompt, queried, cached, found, f"{len(missing)} ({sum(missing)} tokens)", verdict)
            assert queried >= prompt, f"{worker} counted {prompt} prompt tokens, its server {queried}; without a count are {missing}"
            assert 0 <= found - cached <= sum(missing), f"{worker} counted {cached} cached tokens, its server {found}; without a count are {missing}"


def pair_abort(stage):
    """P/D: when clients leave, no server runs a request 3 seconds later: streams, and a long prompt that is being computed."""
    prefill, decode = halves(stage)
    with Tandem(stage) as tandem:
        client, gate = up(tandem, "pair_abort", stage), Gate()
        asked = [lambda number=number: client.ask("chat", story(f"Left {number}"), stream=True, max_tokens=400, on_chunk=gate.of(number)) for number in range(5)]
        streams = InBackground(asked)
        wait_until("all streams have begun", lambda: gate.reached(5, 3), 120)
        gate.closed = True
        streams.results()
        ended = seconds_until("the servers run nothing", lambda: not any(server.load() for server in prefill + decode), 60, 0.1)
        print(f"the servers run nothing {ended:.2f} s after the last client has left")
        assert ended <= RECOVERY_SECONDS
        client.ask("completions", LONG, stream=True, max_tokens=4, leave=1.5)
        # A step that has begun is finished.
        ended = seconds_until("the servers run nothing", lambda: not any(server.load() for server in prefill + decode), 60, 0.1)
        print(f"the servers run nothing {ended:.2f} s after the client of a long prompt has left")
        client.ask("completions", PROMPT, max_tokens=2).check()


class Story:
    """Streams during a fault: all answers are complete, and their texts are those of a pair alone."""

    def __init__(self, stage, tandem, client):
        self.stage, self.tandem, self.client = stage, tandem, client
        self.table = Table("fault", "requests", "failed", "other texts", "resumed or repeated", "seconds until the last answer")
        (prefill, *_), (decode, *_) = halves(stage)
        self.prompts = [story(f"Pair {number}") for number in range(6)]
        self.expected = [alone(prefill, decode, prefill.tokenize([{"role": "user", "content": prompt}]), 40) for prompt in self.prompts]

    def again(self):
        """Returns how many attempts were repeated or resumed so far."""
        return sum(int(self.client.metric(f"tandem_frontend_{name}_total")) for name in ("migrations", "attempts_failed"))

    def during(self, name, fault, in_prefill=False):
        """Sends the prompts; the fault comes when all answers have begun, or with `in_prefill` as soon as all are sent."""
        gate, before = Gate(), self.again()
        prompts = self.prompts if not in_prefill else [f"{prose(name, 250)} {prompt}" for prompt in self.prompts]
        asked = [lambda at=at, prompt=prompt: self.client.ask("chat", prompt, stream=True, max_tokens=40, on_chunk=gate.of(at)) for at, prompt in enumerate(prompts)]
        streams = InBackground(asked)
        if in_prefill:
            time.sleep(1)
        else:
            wait_until("all streams have begun", lambda: gate.reached(len(prompts), 3), 120)
        began = time.perf_counter()
        fault()
        answers = streams.results()
        took = time.perf_counter() - began
        failed = [answer for answer in answers if not answer.complete]
        differ = [] if in_prefill else [(answer.text, text) for answer, text in zip(answers, self.expected) if answer.text != text]
        self.table.row(name, len(answers), len(failed), len(differ), self.again() - before, f"{took:.1f}")
        assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
        assert not differ, f"{len(differ)} texts differ, such as {differ[0][0]!r} from {differ[0][1]!r}"

    def back(self, server, worker):
        server.start()
        server.wait()
        wait_until(f"{worker} joins", lambda: self.client.metric("tandem_router_workers", state="joined") == 4, 90)


def pair_faults(stage):
    """P/D: no answer fails when servers and workers are killed, stand still, or abort one half; a room never waits for its other half."""
    (prefill, other), (decode, _) = halves(stage)
    with Tandem(stage) as tandem:
        client = up(tandem, "pair_faults", stage, "--step-timeout", HUNG_SECONDS)
        stories = Story(stage, tandem, client)
        stories.during("prefill server aborts all its requests", lambda: prefill.control("/abort_request", abort_all=True), in_prefill=True)
        stories.during("decode server aborts all its requests", lambda: decode.control("/abort_request", abort_all=True))
        stories.during("kill -9 of a prefill server", prefill.kill, in_prefill=True)
        stories.back(prefill, "prefill-0")
        stories.during("kill -9 of a decode server", decode.kill)
        stories.back(decode, "decode-0")
        stories.during("SIGSTOP of a prefill server", lambda: prefill.send(signal.SIGSTOP), in_prefill=True)
        prefill.send(signal.SIGCONT)
        stories.during("SIGSTOP of a decode server", lambda: decode.send(signal.SIGSTOP))
        decode.send(signal.SIGCONT)
        idle([prefill, other, decode])
        # With one prefill server left, and that one gone, requests wait or fail, but nothing hangs.
        client.ask("completions", PROMPT, max_tokens=4).check()
        wait_until("the cluster is idle", lambda: reconcile.idle(client), 90, 0.5)


def pair_workers(stage):
    """P/D: no answer fails when worker processes are killed; their servers are free 3 seconds later."""
    (prefill, second), (decode, reserve) = halves(stage)
    with Tandem(stage) as tandem:
        router = tandem.router()
        roles = {"prefill-0": ("prefill", prefill), "prefill-1": ("prefill", second), "decode-0": ("decode", decode), "decode-1": ("decode", reserve)}
        for name, (role, server) in roles.items():
            tandem.worker(name, role, server)
        client = tandem.frontend(router)
        tandem.join(*roles)
        tandem.ready(client, "frontend")
        stories = Story(stage, tandem, client)
        for name, in_prefill in (("prefill-0", True), ("decode-0", False)):
            role, server = roles[name]
            stories.during(f"kill -9 of the worker {name}", tandem.processes[name].kill, in_prefill)
            ended = seconds_until("its server runs nothing", lambda: server.load() == 0, 60, 0.1)
            print(f"the server of {name} runs nothing {ended:.2f} s after the last answer")
            tandem.worker(name, role, server)
            tandem.join(*roles)
        idle([prefill, second, decode, reserve])


PAIRS = (pair_counts, pair_salts, pair_texts, pair_index, pair_documents, pair_abort, pair_ledger, pair_workers, pair_faults)
