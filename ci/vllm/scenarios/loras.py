"""LoRAs that engines load and unload at run time are served meanwhile, with caches and counts of their own, and nothing restarts.

Two engines with random LoRAs. Both start with alpha; beta is loaded into one of them, later into the other. The same prompt for the base model and
for each LoRA shares no block; counts are vLLM's own; greedy texts are those of vLLM alone. /v1/models of Tandem follows each change within 5 s.
A request whose LoRA is unloaded meanwhile ends; a request for a LoRA that no engine has gets 404; the engine that has a LoRA is killed.
"""

import json
import time

from client import Client, Gate, InBackground, Table, prose, seconds_until, together, wait_until
from cluster import Tandem
from engines import BLOCK_SIZE, LAYOUTS, MODEL
from scenarios.counts import prefix_cache

LAYOUT = LAYOUTS["loras"]
# One engine is another process afterwards.
CHANGES_ENGINES = True
LISTED_SECONDS = 5
# Until a worker has noticed that its engine is gone.
GONE_SECONDS = 15
ANSWER_TOKENS, STREAM_TOKENS = 12, 40
WORDS = 120
# With smaller blocks than the engines', Tandem promises a part of a block that an engine finds as a whole or not at all.
EQUAL_BLOCKS = ("--block-size", BLOCK_SIZE)
EVENTS_SECONDS = 0.5


def load(engine, name, path=None):
    """Loads a LoRA, as an operator does; returns vLLM's status."""
    return engine.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path or str(engine.folder / "loras" / name)})[0]


def unload(engine, name):
    return engine.post("/v1/unload_lora_adapter", {"lora_name": name})[0]


def alone(engine, model, prompt, endpoint="completions", tokens=ANSWER_TOKENS):
    """Returns the answer of one engine by itself."""
    return Client(engine.url).ask(endpoint, prompt, model=model, cache_salt="alone", max_tokens=tokens).check().text


class Loras:
    """A cluster, and the engines that compute its prompts."""

    def __init__(self, client, engines):
        self.client, self.engines = client, engines
        self.table = Table("what", "model", "worker", "prompt", "cached", "vLLM's metrics", "text as vLLM's", "seen")

    def listed(self, *expected, within=LISTED_SECONDS):
        """Returns after how many seconds exactly these LoRAs are listed."""
        models = lambda: {model["id"] for model in json.loads(self.client.get("/v1/models")[1])["data"]}
        passed = seconds_until(f"/v1/models lists {expected}", lambda: models() == {MODEL, *expected}, within, 0.05)
        return f"listed after {passed:.1f} s"

    def workers(self, model):
        """Returns the names of the workers on which a request for the model may be placed."""
        return set(self.client.explain([[1, 2, 3]], model)[0])

    def refused(self, model):
        """Sends a request for a LoRA that no engine has."""
        answer = self.client.ask("completions", "Hello", model=model, max_tokens=2)
        assert answer.status == 404 and "model_not_found" in answer.error, f"HTTP {answer.status}: {answer.error or answer.text!r}"

    def ask(self, what, model, prompt, cached, expected, *, endpoint="completions", seen="", **options):
        """Sends a prompt, and checks its text, and its count against `cached` and the metrics of the engines. Returns the worker that computed it."""
        queries, hits = prefix_cache(self.engines)
        answer = self.client.ask(endpoint, prompt, model=model, max_tokens=ANSWER_TOKENS, **options).check()
        wait_until("the engine counts the prompt", lambda: prefix_cache(self.engines)[0] >= queries + answer.prompt_tokens, 10)
        queried, found = (int(now - before) for now, before in zip(prefix_cache(self.engines), (queries, hits)))
        worker = answer.details.get("prefill_worker") or answer.details["decode_worker"]
        same = "yes" if answer.text == expected else f"no: {answer.text!r}"
        self.table.row(what, model, worker, answer.prompt_tokens, answer.cached_tokens, found, same, seen)
        assert (answer.prompt_tokens, answer.cached_tokens) == (queried, found), f"{answer.usage}, but vLLM counted {queried}, {found}"
        assert answer.source == "worker", f"the count is an estimate: {answer.details}"
        full = (answer.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert found == (full if cached else 0), f"{found} cached tokens, not {full if cached else 0}"
        assert answer.text == expected, f"{answer.text!r}, not {expected!r}"
        # The engine's events must reach the router before the next request.
        time.sleep(EVENTS_SECONDS)
        return worker


def models_share_nothing(loras, one):
    for endpoint in ("completions", "chat"):
        prompt = prose(f"Shared {endpoint}", WORDS)
        expected = {model: alone(one, model, prompt, endpoint) for model in (MODEL, "alpha", "beta")}
        assert len(set(expected.values())) == 3, f"the LoRAs change nothing: {expected}"
        for cached in (False, True):
            for model, text in expected.items():
                loras.ask(endpoint, model, prompt, cached, text, endpoint=endpoint, stream=cached)


def only_holders_are_candidates(loras, one):
    prompts = [prose(f"Beta {number}", WORDS) for number in range(4)]
    expected = [alone(one, "beta", prompt) for prompt in prompts]
    ask = lambda prompt: loras.client.ask("completions", prompt, model="beta", max_tokens=ANSWER_TOKENS).check()
    answers = together([lambda prompt=prompt: ask(prompt) for prompt in prompts])
    workers = {answer.details["decode_worker"] for answer in answers}
    assert workers == loras.workers("beta") == {"decode-0"}, f"requests for beta went to {workers}"
    assert [answer.text for answer in answers] == expected
    loras.table.row("4 requests at once", "beta", "decode-0", "", "", "", "yes", "only this engine has the LoRA")


def holders_of_blocks_are_preferred(loras, one):
    """Both engines have alpha, and one of them has the blocks."""
    prompt = prose("Preferred", WORDS)
    expected = alone(one, "alpha", prompt)
    first = loras.ask("new prompt", "alpha", prompt, False, expected)
    tokens = loras.client.post("/tokenize", {"model": "alpha", "prompt": prompt})[1]["tokens"]
    overlap = lambda model: {name: worker["overlap_blocks"] for name, worker in loras.client.explain([[*tokens, 1]], model)[0].items()}
    blocks = len(tokens) // BLOCK_SIZE
    assert overlap("alpha") == {name: blocks if name == first else 0 for name in ("decode-0", "decode-1")}, f"{overlap('alpha')}, not {blocks} on {first}"
    assert set(overlap(MODEL).values()) == {0}, f"the base model has the LoRA's blocks: {overlap(MODEL)}"
    assert loras.ask("again", "alpha", prompt, True, expected, seen=f"{blocks} blocks are indexed on this worker") == first


def unloaded_while_it_runs(loras, one):
    gate = Gate()
    ask = lambda: loras.client.ask("chat", "Tell me a story", model="beta", stream=True, max_tokens=STREAM_TOKENS, on_chunk=gate.of(0))
    stream = InBackground([ask])
    wait_until("the stream has begun", lambda: gate.reached(1, 3))
    assert unload(one, "beta") == 200
    # Now the worker does not know it yet.
    loras.refused("beta")
    seen = loras.listed("alpha")
    loras.refused("beta")
    [answer] = stream.results()
    assert answer.complete or answer.error, "the stream neither ended nor failed"
    ended = "complete" if answer.complete else f"failed: {answer.error}"
    loras.table.row("unloaded in a stream", "beta", "decode-0", "", "", "", "", f"the stream is {ended}; 404 for others; {seen}")


def lora_moves_to_the_other_engine(loras, one, two):
    assert load(two, "beta") == 200
    loras.listed("alpha", "beta")
    prompt = prose("Moved", WORDS)
    expected = alone(two, "beta", prompt)
    assert loras.ask("loaded into the other engine", "beta", prompt, False, expected) == "decode-1"
    assert load(one, "beta") == 200
    wait_until("both engines have beta", lambda: loras.workers("beta") == {"decode-0", "decode-1"}, LISTED_SECONDS)
    assert unload(two, "beta") == 200
    # Until the router knows it, it prefers the engine that has the blocks.
    worker = loras.ask("unloaded where the blocks are", "beta", prompt, False, expected, seen="tried again on the other engine")
    assert worker == "decode-0"


def refused_loads_change_nothing(loras, one):
    missing, again = load(one, "delta", "/nowhere"), load(one, "alpha")
    assert missing >= 400 and again == 400, f"vLLM answered {missing} and {again}"
    loras.refused("delta")
    loras.listed("alpha", "beta")
    loras.table.row("refused by vLLM", "delta", "", "", "", "", "", f"vLLM answers {missing}, Tandem 404")


def only_holder_is_killed(loras, one, two):
    prompt = prose("Killed", 30)
    expected, gate = alone(two, "alpha", prompt, "chat", STREAM_TOKENS), Gate()
    ask = lambda model: loras.client.ask("chat", prompt, model=model, stream=True, max_tokens=STREAM_TOKENS, on_chunk=gate.of(model))
    streams = InBackground([lambda model=model: ask(model) for model in ("alpha", "beta")])
    wait_until("both streams have begun", lambda: gate.reached(2, 3))
    began = time.perf_counter()
    one.kill()
    of_alpha, of_beta = streams.results()
    assert of_alpha.complete and of_alpha.text == expected, f"{of_alpha}, not {expected!r}"
    assert of_beta.error and not of_beta.complete, f"no other engine has the LoRA: {of_beta}"
    ended = f"alpha's stream is complete, beta's failed, within {time.perf_counter() - began:.1f} s"
    loras.table.row("kill -9 of the only engine with beta", "alpha, beta", "", "", "", "", "yes", ended)
    seen = loras.listed("alpha", within=GONE_SECONDS)
    loras.refused("beta")
    one.start()
    one.wait()
    wait_until("the engine's worker has joined", lambda: loras.workers("alpha") == {"decode-0", "decode-1"}, 60)
    loras.refused("beta")
    loras.table.row("engine restarted", "beta", "", "", "", "", "", f"404; {seen}: vLLM has forgotten what was loaded at run time")


def scenario(stage):
    one, two = stage.engines["prefill"], stage.engines["decode"]
    with Tandem(stage) as tandem:
        loras = Loras(tandem.up("loras", [one, two], (), *EQUAL_BLOCKS), (one, two))
        loras.refused("beta")
        assert load(one, "beta") == 200
        print(f"beta is {loras.listed('alpha', 'beta')}", flush=True)
        models_share_nothing(loras, one)
        only_holders_are_candidates(loras, one)
        holders_of_blocks_are_preferred(loras, one)
        unloaded_while_it_runs(loras, one)
        lora_moves_to_the_other_engine(loras, one, two)
        refused_loads_change_nothing(loras, one)
    with Tandem(stage) as tandem:
        loras = Loras(tandem.up("loras-pd", [two], [one], "--prefill", "remote", *EQUAL_BLOCKS), (one,))
        prompt = prose("Pair", WORDS)
        for cached in (False, True):
            for model in (MODEL, "alpha"):
                loras.ask("P/D", model, prompt, cached, alone(two, model, prompt))
    with Tandem(stage) as tandem:
        only_holder_is_killed(Loras(tandem.up("loras-killed", [one, two], (), *EQUAL_BLOCKS), (one, two)), one, two)
