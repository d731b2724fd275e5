"""Runs the scenarios: Tandem in front of stock SGLang servers, whole ones and pairs. Prints PASS or FAIL for each scenario.

    python checks.py FOLDER RUN TANDEM [NAME...]

What a scenario checks is in the docstring of its function. The helpers are those of the scenarios for vLLM (ci/vllm).
"""

import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import kv_events
from client import Client, Gate, InBackground, Table, prose, seconds_until, together, wait_until
from cluster import Tandem
from engines import EngineFailed, Engines
from run import Stage
from scenarios import reconcile, routing
from pairs import PAIRS
from routers import pair_routers, routers
from scenarios.faults import story
from servers import LAYOUTS, PAGE_SIZE, Server

PROMPT = [1] + [(i * 7907) % 40_000 + 20 for i in range(199)]
LONG = [1] + [(i * 7907) % 40_000 + 30 for i in range(3999)]
ANSWER_TOKENS = 12
# About 300 and 200 tokens.
SHARED, OWN = prose("The report", 210), 140
CLIENT_LEFT_SECONDS = 3
# A server that does not answer for this time counts as hung.
HUNG_SECONDS = 20
# Beginnings of names of requests: each is in 100 requests.
LEDGER_PARTS = ("first", "second")


def reusable(tokens):
    """Returns how many tokens of a prompt are cached when it comes again: full pages, without the last token."""
    return (tokens - 1) // PAGE_SIZE * PAGE_SIZE


def of(servers):
    return {f"decode-{number}": server for number, server in enumerate(servers)}


def total(servers):
    return [sum(numbers) for numbers in zip(*(server.counted() for server in servers))]


def pages(server):
    """Returns how many pages the server has cached, by its replayed KV events."""
    return len(kv_events.cache(kv_events.replay(server.event_sources()[1])))


def flush(server):
    """Empties the cache. A server refuses that while it runs a request, and Tandem's health checks make it run some."""
    wait_until(f"the cache of {server.name} is empty", lambda: server.control("/flush_cache") == 200, 60, 0.3)


def alone(stage):
    """SGLang by itself, without Tandem: counts, salts, aborts and KV events are as the adapter expects them."""
    server = next(iter(stage.engines))
    for salt, cached in (("a", 0), ("a", reusable(len(PROMPT))), ("b", 0), ("b", reusable(len(PROMPT)))):
        answer = server.alone(PROMPT, ANSWER_TOKENS, cache_salt=f"{salt} of {stage.folder.name}")
        info = answer["meta_info"]
        assert (info["prompt_tokens"], info["cached_tokens"]) == (len(PROMPT), cached), info
    computed = tuple(PROMPT + answer["output_ids"][:-1])
    chains = kv_events.chains(kv_events.cache(kv_events.replay(server.event_sources()[1])))
    for salt in "ab":
        missing = [end for end in range(PAGE_SIZE, len(computed) + 1, PAGE_SIZE) if (computed[:end], (f"{salt} of {stage.folder.name}",)) not in chains]
        assert not missing, f"the events lack the pages of salt {salt} that end at {missing}"
    left = InBackground([lambda: server.alone(PROMPT[:50], 1000, rid="left")])
    wait_until("the request runs", lambda: server.load() == 1, 60)
    assert server.control("/abort_request", rid="left") == 200
    ended = seconds_until("the server runs nothing", lambda: server.load() == 0, CLIENT_LEFT_SECONDS)
    (answer,) = left.results()
    print(f"aborted: {answer['meta_info']['finish_reason']} after {len(answer['output_ids'])} tokens; the server is idle {ended:.2f} s later")
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


def counts(stage):
    """Cached tokens are SGLang's own number: chat and completions, streamed and whole; cold, again, and with a shared beginning."""
    servers = list(stage.engines)
    table = Table("endpoint", "streamed", "prompt", "cached", "SGLang's metrics", "again", "SGLang's metrics", "source")
    with Tandem(stage) as tandem:
        client = tandem.up("counts", servers)
        seen = set()
        for endpoint in ("chat", "completions"):
            for stream in (False, True):
                prompt, cells = f"{SHARED} {prose(f'{endpoint} {stream}', OWN)}", []
                for again in (False, True):
                    before = total(servers)
                    answer = client.ask(endpoint, prompt, stream=stream, max_tokens=ANSWER_TOKENS).check()
                    wait_until("SGLang counts the prompt", lambda: total(servers)[0] > before[0], 10)
                    counted = [now - then for now, then in zip(total(servers), before)]
                    assert [answer.prompt_tokens, answer.cached_tokens] == counted, f"{answer.usage}, but SGLang counted {counted}"
                    assert answer.source == "worker", f"the count is an estimate: {answer.details}"
                    assert answer.usage["completion_tokens"] == ANSWER_TOKENS, answer.usage
                    if again:
                        assert counted[1] == reusable(answer.prompt_tokens), f"{counted} for a prompt that was sent before"
                    elif not seen:
                        assert counted[1] == 0, f"{counted} for the first prompt"
                    seen.add(counted[1])
                    cells += [answer.cached_tokens, counted[1]]
                table.row(endpoint, "yes" if stream else "no", answer.prompt_tokens, *cells, answer.source)
        assert len(seen) > 2, f"no prompt found a shared beginning: the cached tokens were {sorted(seen)}"


def salts(stage):
    """Two accounts with API keys share no cached tokens, and neither do two salts of one account."""
    server, keys = next(iter(stage.engines)), stage.folder / "keys.toml"
    secret = {}
    for name in ("alice", "bob"):
        command = [stage.tandem, "key", "add", name, "--api-keys-file", keys]
        secret[name] = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()[-1]
    table = Table("account", "salt", "prompt", "cached", "again")
    with Tandem(stage) as tandem:
        address = tandem.up("salts", [server], (), "--api-keys-file", keys).address
        for name, salt in (("alice", None), ("bob", None), ("alice", "one"), ("alice", "two"), ("bob", "one")):
            client, options = Client(address, secret[name]), {"cache_salt": salt} if salt else {}
            first, again = (client.ask("completions", PROMPT, max_tokens=2, **options).check() for _ in range(2))
            table.row(name, salt or "", first.prompt_tokens, first.cached_tokens, again.cached_tokens)
            assert (first.cached_tokens, again.cached_tokens) == (0, reusable(len(PROMPT)))


def texts(stage):
    """Greedy texts are those of SGLang alone for the same token ids; a chat is rendered to the same tokens, with the same text."""
    server = next(iter(stage.engines))
    table = Table("prompt", "streamed", "tokens", "text")
    with Tandem(stage) as tandem:
        client = tandem.up("texts", [server])
        for number in range(3):
            messages = [{"role": "user", "content": story(f"Text {number}")}]
            ids = server.tokenize(messages)
            expected = server.alone(ids, 40)["text"]
            for endpoint, prompt in (("completions", ids), ("chat", messages)):
                for stream in (False, True):
                    answer = client.ask(endpoint, prompt, stream=stream, max_tokens=40).check()
                    assert answer.prompt_tokens == len(ids), f"{answer.usage}, but SGLang renders {len(ids)} tokens"
                    assert answer.text == expected, f"{answer.text!r}, not {expected!r}"
                    table.row(endpoint, "yes" if stream else "no", answer.prompt_tokens, repr(answer.text[:40]))


def index(stage):
    """The router's index equals the servers' caches, which their replayed KV events describe, also after evictions and a flush."""
    servers = list(stage.engines)
    with Tandem(stage) as tandem:
        client = tandem.up("index", servers)
        for part in ("before the flush", "after the flush"):
            for start in range(0, 20, 4):
                prompts = [prose(f"{part} {number}", 600) for number in range(start, start + 4)]
                together([lambda prompt=prompt: client.ask("completions", prompt, max_tokens=40).check() for prompt in prompts])
            sizes, prompts = routing.index_equals_caches(client, of(servers))
            removed = sum(event["type"] == "BlockRemoved" for server in servers for _, events in kv_events.replay(server.event_sources()[1]) for event in events)
            print(f"{part}: {', '.join(f'{worker} {blocks} blocks' for worker, blocks in sizes.items())}; {prompts} leaves compared, {removed} removals seen")
            assert all(sizes.values()) and removed, "nothing was cached, or nothing was evicted"
            for server in servers:
                flush(server)


def documents(stage):
    """Questions about more documents than one server can cache find at least 95 % of what could be cached (8 documents, 5 questions)."""
    servers = list(stage.engines)
    table = Table("placement", "prompt tokens", "cached", "share", "of what is possible")
    with Tandem(stage) as tandem:
        client = tandem.up("documents", servers)
        answers = routing.ask_all(client, "documents")
        prompt, cached = sum(answer.prompt_tokens for answer in answers), sum(answer.cached_tokens for answer in answers)
        tokens, at_most = routing.possible(servers[0], "documents")
        table.row("kv_aware", prompt, cached, f"{cached / prompt:.3f}", f"{cached / at_most:.3f}")
        assert prompt == tokens, f"{prompt} prompt tokens, but SGLang's template and tokenizer give {tokens}"
        assert cached / at_most >= routing.OF_POSSIBLE_MIN, f"{cached} of {at_most} possible tokens were cached"


def abort(stage):
    """When clients leave, the server runs no request 3 seconds later: five streams, and a long prompt that is being computed."""
    server = next(iter(stage.engines))
    with Tandem(stage) as tandem:
        client, gate = tandem.up("abort", [server]), Gate()
        asked = [lambda number=number: client.ask("chat", story(f"Left {number}"), stream=True, max_tokens=400, on_chunk=gate.of(number)) for number in range(5)]
        streams = InBackground(asked)
        wait_until("all streams have begun", lambda: gate.reached(5, 3))
        running = server.load()
        gate.closed = True
        streams.results()
        ended = seconds_until("the server runs nothing", lambda: server.load() == 0, 60, 0.02)
        print(f"{running} streams ran; the server runs none {ended:.2f} s after the last client has left")
        assert running and ended <= CLIENT_LEFT_SECONDS
        # The load does not count a prompt that is computed in several steps, but each step publishes the pages that it has computed.
        before = pages(server)
        client.ask("completions", LONG, stream=True, max_tokens=4, leave=0.5)
        time.sleep(CLIENT_LEFT_SECONDS)
        computed = pages(server) - before
        print(f"{computed} of the {len(LONG) // PAGE_SIZE} pages of a long prompt are computed {CLIENT_LEFT_SECONDS} s after its client has left")
        assert computed < len(LONG) // PAGE_SIZE, "the server has computed the whole prompt"
        time.sleep(CLIENT_LEFT_SECONDS)
        assert pages(server) - before <= computed, "the server continues the prompt"
        client.ask("completions", PROMPT, max_tokens=2).check()


def ledger(stage):
    """Usage, ledger, Tandem's metrics and SGLang's metrics agree over 200 requests, of which 20 % are aborted."""
    servers = of(stage.engines)
    table = Table("worker", "prompt tokens: Tandem", "SGLang", "cached: Tandem", "SGLang", "prompts without a count", "audit")
    with Tandem(stage) as tandem:
        client = tandem.up("ledger", list(servers.values()))
        before = {worker: server.counted() for worker, server in servers.items()}
        calls, answers = [call for part in LEDGER_PARTS for call in reconcile.requests(client, part)], []
        for start in range(0, len(calls), reconcile.AT_ONCE):
            answers += together(calls[start : start + reconcile.AT_ONCE])
        failed = [answer for answer in answers if not answer.complete and answer.error != "left"]
        assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
        wait_until("the cluster is idle", lambda: reconcile.idle(client), 90, 0.5)
        for server in servers.values():
            wait_until(f"{server.name} is idle", lambda: server.load() == 0, 90, 0.5)
        estimates = [answer for answer in answers if answer.complete and answer.source != "worker"]
        assert not estimates, f"{len(estimates)} answers have an estimate"
        verdict = tandem.audit(answers, client.get("/metrics")[1])
        print(f"{len(answers)} requests, {sum(not answer.complete for answer in answers)} aborted")
        for worker, server in servers.items():
            queried, found = (now - then for now, then in zip(server.counted(), before[worker]))
            prompt, cached = (int(client.metric(f"tandem_worker_{what}_tokens_total", worker=worker)) for what in ("prompt", "cached"))
            missing = reconcile.uncounted(tandem.ledgers[-1], worker)
            table.row(worker, prompt, queried, cached, found, f"{len(missing)} ({sum(missing)} tokens)", verdict)
            more = queried - prompt
            assert reconcile.is_sum_of_some(more, missing), f"{worker} counted {prompt} prompt tokens, its server {queried}; without a count are {missing}"
            assert 0 <= found - cached <= more, f"{worker} counted {cached} cached tokens, its server {found}"


def faults(stage):
    """No answer fails and no text changes when one of two servers is killed, comes back, or stands still (SIGSTOP)."""
    servers = list(stage.engines)
    victim, other = servers
    with Tandem(stage) as tandem:
        client = tandem.up("faults", servers, (), "--step-timeout", HUNG_SECONDS)
        table = Table("fault", "requests", "failed", "other texts", "resumed", "seconds until the last answer")
        prompts = [story(f"Stream {number}") for number in range(8)]
        expected = [other.alone(other.tokenize([{"role": "user", "content": prompt}]), 60)["text"] for prompt in prompts]

        def streams_during(name, fault):
            gate, resumed = Gate(), client.metric("tandem_frontend_migrations_total")
            asked = [lambda at=at, prompt=prompt: client.ask("chat", prompt, stream=True, max_tokens=60, on_chunk=gate.of(at)) for at, prompt in enumerate(prompts)]
            streams = InBackground(asked)
            wait_until("all streams have begun", lambda: gate.reached(len(prompts), 3))
            assert victim.load(), f"{victim.name} runs no stream"
            assert not gate.reached(1, 60), "a stream ended before the fault"
            began = time.perf_counter()
            fault()
            answers = streams.results()
            failed = [answer for answer in answers if not answer.complete]
            differ = [(answer.text, text) for answer, text in zip(answers, expected) if answer.text != text]
            resumed = int(client.metric("tandem_frontend_migrations_total") - resumed)
            table.row(name, len(answers), len(failed), len(differ), resumed, f"{time.perf_counter() - began:.1f}")
            assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
            assert not differ, f"{len(differ)} texts differ, such as {differ[0][0]!r} from {differ[0][1]!r}"
            assert resumed, "no stream was resumed"

        streams_during("kill -9 of a server", victim.kill)
        victim.start()
        victim.wait()
        joined = lambda: client.metric("tandem_router_workers", state="joined") == 2 and not client.metric("tandem_router_index_blocks", worker="decode-0")
        wait_until("the worker joins with an empty index", joined, 60)
        streams_during("SIGSTOP of a server", lambda: victim.send(signal.SIGSTOP))
        victim.send(signal.SIGCONT)
        wait_until("the server has ended the requests that were resumed elsewhere", lambda: victim.load() == 0, 60)
        wait_until("the worker joins again", lambda: client.metric("tandem_router_workers", state="joined") == 2, 60)
        streams_during("kill -9 of the server that stood still", victim.kill)
    victim.start()
    victim.wait()


# Those that restart servers come last.
MIXED = (alone, counts, salts, texts, index, documents, abort, ledger, faults, routers)
PAIRED = (*PAIRS, pair_routers)
SCENARIOS = {scenario.__name__: scenario for scenario in MIXED + PAIRED}


def play(name, servers, tandem, run):
    """Runs a scenario with empty caches; returns whether it passed."""
    folder = run / name
    folder.mkdir()
    print(f"\n== {name}: {SCENARIOS[name].__doc__}", flush=True)
    began, failure = time.monotonic(), None
    try:
        for server in servers:
            flush(server)
        SCENARIOS[name](Stage(servers, tandem, folder))
    except Exception as error:
        traceback.print_exc()
        failure = error
    print(f"{'FAIL' if failure else 'PASS'} {name}, {time.monotonic() - began:.0f} s; logs in {folder}", flush=True)
    return not failure


def main(folder, run, tandem, *names):
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        sys.exit(f"ci/sglang.sh: there is no scenario {unknown[0]}; the scenarios are {', '.join(SCENARIOS)}")
    names = [name for name in SCENARIOS if not names or name in names]
    run = Path(run)
    try:
        failed = []
        for layout, scenarios in (("mixed", MIXED), ("pairs", PAIRED)):
            of_layout = [name for name in names if SCENARIOS[name] in scenarios]
            if of_layout:
                with Engines(LAYOUTS[layout], folder, run / layout, Server) as servers:
                    failed += [name for name in of_layout if not play(name, servers, Path(tandem).absolute(), run)]
    except EngineFailed as error:
        sys.exit(f"ci/sglang.sh: {error}")
    print(f"\n{len(names) - len(failed)} of {len(names)} scenarios passed{'; failed: ' + ', '.join(failed) if failed else ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
