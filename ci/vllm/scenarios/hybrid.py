"""Predictions for a hybrid model are what vLLM finds, and Tandem submits no more tokens than fit.

One engine with a random Gemma 3 (five layers with a sliding window, one with full attention) that keeps windows at the ends of prompts only,
vLLM's default. The first prompts are those of which Tandem once promised 96 tokens and vLLM found none.
"""

import random
import time

from client import Table, together, wait_until
from cluster import Tandem
from engines import LAYOUTS

LAYOUT = LAYOUTS["hybrid"]
FAMILIES, PROMPTS = 5, 40
EQUAL_MIN = 0.99
EVENTS_SECONDS = 0.5
LONG_PROMPTS, LONG_TOKENS, LONG_ANSWER = 3, 900, 60


def prompts():
    first = [token * 37 % 40_000 + 100 for token in range(260)]
    yield from (first, first, first[:100] + [5] * 60, first[:100] + [6] * 60)
    rng = random.Random(35)
    families = [[rng.randrange(100, 40_000) for _ in range(400)] for _ in range(FAMILIES)]
    for _ in range(PROMPTS):
        family = rng.choice(families)
        yield family[: rng.choice((70, 100, 200, 300, 400))] + [rng.randrange(100, 40_000) for _ in range(rng.randrange(20, 120))]


def errors(client):
    """Returns the numbers of tokens that were predicted too much and too little so far."""
    return [int(client.metric(f"tandem_router_overlap_{kind}_tokens_total")) for kind in ("over", "under")]


def scenario(stage):
    engine = next(iter(stage.engines))
    with Tandem(stage) as tandem:
        client = tandem.up("hybrid", [engine])
        table = Table("prompt tokens", "predicted", "found")
        equal = count = found_tokens = 0
        for prompt in prompts():
            # The engine's events of the prompt before must have arrived.
            time.sleep(EVENTS_SECONDS)
            missed = errors(client)
            answer = client.ask("completions", prompt, max_tokens=2).check()
            found = answer.cached_tokens
            # The router counts the differences when the answer has ended.
            wait_until("the prompt was counted", lambda: client.metric("tandem_router_bookings") == 0, 20, 0.05)
            over, under = (now - before for now, before in zip(errors(client), missed))
            predicted = found + over - under
            table.row(answer.prompt_tokens, predicted, found)
            equal, count, found_tokens = equal + (predicted == found), count + 1, found_tokens + found
        print(f"predicted = found for {equal} of {count} prompts; {found_tokens} tokens were found")
        assert equal >= EQUAL_MIN * count, f"only {equal} of {count} predictions were right"
        assert found_tokens > 0, "vLLM found nothing, so nothing was predicted"
        capacity = engine.get("/metrics").partition('kv_cache_size_tokens="')[2].partition('"')[0]
        long = [[(seed * 7_919 + token * 31) % 40_000 + 100 for token in range(LONG_TOKENS)] for seed in range(LONG_PROMPTS)]
        together([lambda prompt=prompt: client.ask("completions", prompt, max_tokens=LONG_ANSWER).check() for prompt in long])
        preempted = int(engine.metric("vllm:num_preemptions_total"))
        print(f"{LONG_PROMPTS} prompts of {LONG_TOKENS} tokens at once, in a cache of {capacity} tokens: vLLM preempted {preempted} requests")
        assert preempted == 0
