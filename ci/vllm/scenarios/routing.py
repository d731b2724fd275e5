"""Questions about more documents than one engine can cache find their document cached; the router's index equals the engines' caches.

Two mixed engines, eight documents with five questions each. With KV-aware placement at least 95 % of what could be cached is
cached, and at least 1.3 times the share of placement by load. Afterwards the index is compared with the engines' replayed KV events, block
by block.
"""

import secrets
import statistics

import kv_events
from client import Table, prose, together, wait_until
from cluster import Tandem
from engines import LAYOUTS

LAYOUT = LAYOUTS["p+d"]
DOCUMENTS, QUESTIONS = 8, 5
# Of about 1,080 tokens: the documents are 34 blocks each, so that an engine of 160 blocks can cache half of them.
DOCUMENT_WORDS = 1_045
ANSWER_TOKENS = 6
TANDEM_BLOCK = 16
# An ordinary token. It makes the last block of a prompt one that may be reused.
ONE_MORE = 1_000
OF_POSSIBLE_MIN, OF_LEAST_LOADED_MIN = 0.95, 1.3
PROMPTS_AT_ONCE = 8


def conversation(name, document, question):
    return [
        {"role": "system", "content": prose(f"{name} {document}", DOCUMENT_WORDS)},
        {"role": "user", "content": f"Question {question}: what about {prose(f'{document} {question}', 6)}?"},
    ]


def possible(engine, name):
    """Returns the tokens of all prompts, and those of them that an unbounded cache would find: full blocks of an earlier prompt."""
    total = cached = 0
    for document in range(DOCUMENTS):
        earlier = []
        for question in range(QUESTIONS):
            tokens = engine.tokenize(conversation(name, document, question))
            total += len(tokens)
            cached += max((common(tokens, other, engine.block_size) for other in earlier), default=0)
            earlier.append(tokens)
    return total, cached


def common(tokens, other, block_size):
    equal = next((at for at, (one, two) in enumerate(zip(tokens, other)) if one != two), min(len(tokens), len(other)))
    return min(equal, len(tokens) - 1) // block_size * block_size


def ask_all(client, name):
    """Asks a question about each document at the same time, then the next questions: each engine sees all other documents in between."""
    received = []
    for question in range(QUESTIONS):
        prompts = [conversation(name, document, question) for document in range(DOCUMENTS)]
        calls = [lambda prompt=prompt: client.ask("chat", prompt, stream=True, max_tokens=ANSWER_TOKENS).check() for prompt in prompts]
        received += together(calls)
    return received


def prefixes(engine, block):
    """Returns the beginnings of prompts that the engine has cached for the running cluster, in blocks of this size, and the number of all blocks with
    a salt of Tandem's. The cluster's own salt is the last one in the engine's events. Earlier clusters had other keys, and so other salts."""
    batches = kv_events.replay(engine.event_sources()[1])
    salts = [keys for _, events in batches for event in events for keys in kv_events.keys(event) if keys and len(keys[0]) == 80]
    beginnings = {
        (salt, tokens[:end])
        for tokens, salt in kv_events.chains(kv_events.cache(batches))
        if salt in set(salts)
        for end in range(block, len(tokens) + 1, block)
    }
    return {tokens for salt, tokens in beginnings if salt == salts[-1]}, len(beginnings)


def leaves(beginnings, block):
    inner = {tokens[:-block] for tokens in beginnings}
    return sorted(tokens for tokens in beginnings if tokens not in inner)


def compare(client, engines, router, block):
    """Compares the router's index with the engines' caches. Returns the blocks in each cache and in the index, the number of prompts that were
    looked up, and what differs. `router`: where the router's metrics are, if they are not the frontend's. `block`: the cluster's block size."""
    caches = {worker: prefixes(engine, block) for worker, engine in engines.items()}
    prompts = leaves(set().union(*(found for found, _ in caches.values())), block)
    wrong = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        some = prompts[start : start + PROMPTS_AT_ONCE]
        for tokens, workers in zip(some, client.explain([[*tokens, ONE_MORE] for tokens in some])):
            for worker, (found, _) in caches.items():
                held = max((end for end in range(block, len(tokens) + 1, block) if tokens[:end] in found), default=0)
                known = workers[worker]["overlap_blocks"] * block
                if known != held:
                    wrong.append(f"{worker}: {known} of {len(tokens)} tokens are indexed, {held} are cached")
    indexed = {worker: int((router or client).metric("tandem_router_index_blocks", worker=worker)) for worker in caches}
    sizes = {worker: (held, indexed[worker]) for worker, (_, held) in caches.items()}
    wrong += [f"{worker}: {indexed} blocks are indexed, {held} are cached" for worker, (held, indexed) in sizes.items() if held != indexed]
    return sizes, len(prompts), wrong


def index_equals_caches(client, engines, router=None, block=TANDEM_BLOCK):
    """Waits until the index equals the engines' caches; returns the blocks of each worker, and the number of prompts that were looked up."""
    differences = []

    def equal():
        nonlocal differences
        sizes, prompts, differences = compare(client, engines, router, block)
        return not differences and ({worker: held for worker, (held, _) in sizes.items()}, prompts)

    try:
        return wait_until("the index equals the engines' caches", equal, 20, 1)
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *differences])) from None


def scenario(stage):
    engines = {"decode-0": stage.engines["prefill"], "decode-1": stage.engines["decode"]}
    table = Table("placement", "prompt tokens", "cached", "share", "of what is possible", "TTFT p50", "p90", "predicted too much", "too little")
    # With one key, both clusters have the same salts: the second one also finds in the index what the first one has cached.
    key = stage.folder / "cluster.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    shares = {}
    for policy in ("least_loaded", "kv_aware"):
        with Tandem(stage) as tandem:
            client = tandem.up(policy, list(engines.values()), (), "--policy", policy, "--cluster-key-file", key)
            answers = ask_all(client, policy)
            prompt, cached = sum(answer.prompt_tokens for answer in answers), sum(answer.cached_tokens for answer in answers)
            total, at_most = possible(stage.engines["decode"], policy)
            assert prompt == total, f"{prompt} prompt tokens, but vLLM's template and tokenizer give {total}"
            ttfts = statistics.quantiles((answer.ttft_s for answer in answers), n=100)
            missed = [int(client.metric(f"tandem_router_overlap_{kind}_tokens_total")) for kind in ("over", "under")]
            shares[policy] = cached / prompt
            table.row(policy, prompt, cached, f"{cached / prompt:.3f}", f"{cached / at_most:.3f}", f"{ttfts[49]:.2f} s", f"{ttfts[89]:.2f} s", *missed)
            if policy == "least_loaded":
                continue
            assert cached / at_most >= OF_POSSIBLE_MIN, f"{cached} of {at_most} possible tokens were cached"
            sizes, prompts = index_equals_caches(client, engines)
            for worker, blocks in sizes.items():
                print(f"{worker}: {blocks} blocks in the engine's cache by its replayed events, and in the index; {prompts} leaves were compared")
    ratio = shares["kv_aware"] / shares["least_loaded"]
    print(f"KV-aware placement caches {ratio:.2f} times the share of placement by load")
    assert ratio >= OF_LEAST_LOADED_MIN, f"only {ratio:.2f} times the share of placement by load"
