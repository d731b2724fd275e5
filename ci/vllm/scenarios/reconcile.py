"""Usage, ledger, Tandem's metrics and vLLM's metrics agree exactly over 200 requests, of which 20 % are aborted.

Half of the requests go to two mixed engines, half to a prefill and a decode engine. One in ten clients leaves before its answer begins, one
in ten in the middle of it. `tandem audit check` compares usage, ledger and Tandem's metrics; vLLM's own prefix cache metrics are the third
witness of each engine that prefills. vLLM reports no count for a request that it aborts before the first token, so the ledger has none:
what its metrics have beyond Tandem's must be some of these prompts, whole.
"""

import json
import random
from itertools import combinations

from client import Left, Table, prose, together, wait_until
from cluster import Tandem
from engines import LAYOUTS
from scenarios.counts import prefix_cache

LAYOUT = LAYOUTS["p+d"]
REQUESTS, AT_ONCE = 100, 10
ANSWER_TOKENS = 8
# Beginnings that prompts share, about 130 tokens.
SHARED = [prose(f"Context {number}", 90) for number in range(5)]


def leave_after(chunks):
    def on_chunk(answer):
        if answer.chunks >= chunks:
            raise Left

    return on_chunk


def requests(client, name):
    """Returns the calls of all clients in a fixed order."""
    chance = random.Random(name)
    calls = []
    for number in range(REQUESTS):
        prompt = f"{chance.choice(SHARED)} {prose(f'{name} {number}', chance.randrange(5, 40))}"
        options = {"max_tokens": ANSWER_TOKENS, "stream": chance.random() < 0.5}
        if number % 10 == 3:
            options["leave"] = chance.uniform(0.05, 1.5)
        elif number % 10 == 7:
            options |= {"stream": True, "on_chunk": leave_after(chance.randrange(1, ANSWER_TOKENS - 2))}
        endpoint = chance.choice(("chat", "completions"))
        calls.append(lambda endpoint=endpoint, prompt=prompt, options=options: client.ask(endpoint, prompt, **options))
    return calls


def uncounted(ledger, worker):
    """Returns the tokens of the worker's prompts without a count."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    return [line["prompt"] for line in lines if line["line"] == "scheduled" and line["worker"] == worker and line.get("cached") is None]


def is_sum_of_some(total, prompts):
    return any(sum(some) == total for size in range(len(prompts) + 1) for some in combinations(prompts, size))


def idle(client):
    busy = ("tandem_frontend_inflight_requests", "tandem_router_bookings")
    return all(client.metric(name) == 0 for name in busy) and client.metric("tandem_worker_kv_blocks", state="in_use") == 0


def scenario(stage):
    prefill, decode = stage.engines["prefill"], stage.engines["decode"]
    columns = ("engines", "requests", "aborted", "worker", "prompt tokens: Tandem", "vLLM", "cached: Tandem", "vLLM", "prompts without a count", "audit")
    table = Table(*columns)
    for name, mixed, prefills, flags in (
        ("mixed", {"decode-0": prefill, "decode-1": decode}, {}, ()),
        ("P/D", {"decode-0": decode}, {"prefill-0": prefill}, ("--prefill", "remote")),
    ):
        with Tandem(stage) as tandem:
            client = tandem.up(f"reconcile-{name.replace('/', '')}", list(mixed.values()), list(prefills.values()), *flags)
            counting = prefills or mixed
            before = {worker: prefix_cache([engine]) for worker, engine in counting.items()}
            calls, answers = requests(client, name), []
            for start in range(0, REQUESTS, AT_ONCE):
                answers += together(calls[start : start + AT_ONCE])
            failed = [answer for answer in answers if not answer.complete and answer.error != "left"]
            assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
            wait_until("the cluster is idle", lambda: idle(client), 90, 0.5)
            for engine in (prefill, decode):
                wait_until(f"{engine.name} is idle", lambda: engine.metric("vllm:num_requests_running") == 0, 90, 0.5)
            estimates = [answer for answer in answers if answer.complete and answer.source != "worker"]
            assert not estimates, f"{len(estimates)} answers have an estimate"
            verdict = tandem.audit(answers, client.get("/metrics")[1])
            complete = sum(answer.complete for answer in answers)
            for worker, engine in counting.items():
                queried, found = (int(now - then) for now, then in zip(prefix_cache([engine]), before[worker]))
                prompt, cached = (int(client.metric(f"tandem_worker_{what}_tokens_total", worker=worker)) for what in ("prompt", "cached"))
                missing = uncounted(tandem.ledgers[-1], worker)
                cells = [prompt, queried, cached, found, f"{len(missing)} ({sum(missing)} tokens)", verdict]
                table.row(name, REQUESTS, REQUESTS - complete, worker, *cells)
                more = queried - prompt
                assert is_sum_of_some(more, missing), f"{worker} counted {prompt} prompt tokens, its engine {queried}; without a count are {missing}"
                assert 0 <= found - cached <= more, f"{worker} counted {cached} cached tokens, its engine {found}"
                assert more or found == cached, f"{worker} counted {cached} cached tokens, its engine {found}"
