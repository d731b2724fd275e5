"""Runs the scenarios: Tandem in front of stock SGLang servers, whole ones and pairs. Prints PASS or FAIL for each scenario.

    python checks.py FOLDER RUN TANDEM [NAME...]

What a scenario checks is in the docstring of its function. The helpers are those of the scenarios for vLLM (ci/vllm).
"""

import signal
import sys
import time
import traceback
from pathlib import Path

import kv_events
from both import BOTH, CLIENT_LEFT_SECONDS, HUNG_SECONDS, LONG, PROMPT, Fleet, Streams, flush, pages, replayed
from client import Gate, InBackground, seconds_until, wait_until
from cluster import Tandem
from engines import EngineFailed, Engines
from pairs import PAIRS
from routers import pair_routers, routers
from run import Stage
from scenarios.faults import story
from servers import LAYOUTS, PAGE_SIZE, Server


def alone(stage):
    """SGLang by itself, without Tandem: counts, salts, aborts and KV events are as the adapter expects them."""
    server, tokens = next(iter(stage.engines)), 12
    reusable = Fleet(stage).reusable(len(PROMPT))
    for salt, cached in (("a", 0), ("a", reusable), ("b", 0), ("b", reusable)):
        answer = server.alone(PROMPT, tokens, cache_salt=f"{salt} of {stage.folder.name}")
        info = answer["meta_info"]
        assert (info["prompt_tokens"], info["cached_tokens"]) == (len(PROMPT), cached), info
    computed = tuple(PROMPT + answer["output_ids"][:-1])
    chains = kv_events.chains(kv_events.cache(replayed(server)))
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


def faults(stage):
    """No answer fails and no text changes when one of two servers is killed, comes back, or stands still (SIGSTOP)."""
    fleet = Fleet(stage)
    victim = fleet.servers[0]
    with Tandem(stage) as tandem:
        client = fleet.up(tandem, "--step-timeout", HUNG_SECONDS)
        streams = Streams(fleet, client, 8, 60)
        streams.during("kill -9 of a server", victim.kill)
        streams.back(victim, "decode-0")
        streams.during("SIGSTOP of a server", lambda: victim.send(signal.SIGSTOP))
        victim.send(signal.SIGCONT)
        # The server ends the requests that were resumed elsewhere.
        fleet.idle()
        streams.joined(2)
        streams.during("kill -9 of the server that stood still", victim.kill)
    victim.start()
    victim.wait()


# Those that restart servers come last.
MIXED = {scenario.__name__: scenario for scenario in (alone, *BOTH, abort, faults, routers)}
PAIRED = {f"pair_{scenario.__name__}": scenario for scenario in BOTH} | {scenario.__name__: scenario for scenario in (*PAIRS, pair_routers)}
SCENARIOS = MIXED | PAIRED


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
            of_layout = [name for name in names if name in scenarios]
            if of_layout:
                with Engines(LAYOUTS[layout], folder, run / layout, Server) as servers:
                    failed += [name for name in of_layout if not play(name, servers, Path(tandem).absolute(), run)]
    except EngineFailed as error:
        sys.exit(f"ci/sglang.sh: {error}")
    print(f"\n{len(names) - len(failed)} of {len(names)} scenarios passed{'; failed: ' + ', '.join(failed) if failed else ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
