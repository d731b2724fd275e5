"""Cached tokens are vLLM's own number, and texts are those of vLLM alone: chat and completions, streamed and whole, P/D and mixed.

Each prompt has a beginning that all share and is sent twice. Its usage must be what the prefilling engine's metrics counted meanwhile: 0 or
the shared beginning when it is new, and all full blocks but the last token when it comes again. One engine by itself must give the same text.
What holds when an engine reports no cached tokens is a part of scenarios/faults.py, which restarts an engine.
"""

from client import Client, Table, prose, wait_until
from cluster import Tandem
from engines import BLOCK_SIZE, LAYOUTS

LAYOUT = LAYOUTS["p+d"]
# About 300 and 700 tokens.
SHARED, OWN = prose("The report", 210), 490
ANSWER_TOKENS = 12


def prefix_cache(engines):
    """Returns the tokens for which the engines looked in their prefix caches so far, and those that they found."""
    return [sum(engine.metric(f"vllm:prefix_cache_{name}_total") for engine in engines) for name in ("queries", "hits")]


def scenario(stage):
    prefill, decode = stage.engines["prefill"], stage.engines["decode"]
    table = Table("engines", "endpoint", "streamed", "prompt", "cached", "vLLM's metrics", "again", "vLLM's metrics", "source", "text as vLLM's")
    for name, mixed, prefills, flags in (
        ("P/D", [decode], [prefill], ("--prefill", "remote")),
        ("mixed", [prefill, decode], [], ()),
    ):
        with Tandem(stage) as tandem:
            client = tandem.up(f"counts-{name.replace('/', '')}", mixed, prefills, *flags)
            found_before = set()
            for endpoint in ("chat", "completions"):
                for stream in (False, True):
                    prompt = f"{SHARED} {prose(f'{name} {endpoint} {stream}', OWN)}"
                    cells, expected = [], Client(decode.url).ask(endpoint, prompt, cache_salt="alone", max_tokens=ANSWER_TOKENS).check()
                    for again in (False, True):
                        queries, hits = prefix_cache(prefills or mixed)
                        answer = client.ask(endpoint, prompt, stream=stream, max_tokens=ANSWER_TOKENS).check()
                        wanted = queries + answer.prompt_tokens
                        wait_until("the engine counts the prompt", lambda: prefix_cache(prefills or mixed)[0] >= wanted, 10)
                        queried, found = (now - before for now, before in zip(prefix_cache(prefills or mixed), (queries, hits)))
                        assert (answer.prompt_tokens, answer.cached_tokens) == (queried, found), f"{answer.usage}, but vLLM counted {queried}, {found}"
                        assert answer.source == "worker", f"the count is an estimate: {answer.details}"
                        assert (answer.prompt_tokens, answer.text) == (expected.prompt_tokens, expected.text), f"{answer.text!r}, not {expected.text!r}"
                        if name == "P/D":
                            assert answer.details["prefill_worker"], f"prefilled on the decode engine: {answer.details}"
                        if again:
                            blocks = (answer.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
                            assert found == blocks, f"{found} cached tokens of a prompt that was sent before, not {blocks}"
                        elif not found_before:
                            assert found == 0, f"{found} cached tokens of the first prompt"
                        found_before.add(found)
                        cells += [answer.cached_tokens, int(found)]
                    table.row(name, endpoint, "yes" if stream else "no", answer.prompt_tokens, *cells, answer.source, "yes")
