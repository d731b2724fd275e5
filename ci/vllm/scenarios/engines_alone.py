"""vLLM by itself, without Tandem: the engines of this setup do what Tandem's adapter relies on.

A prefill engine and a decode engine answer as one engine does; cached tokens are those of the prefill engine; the replayed KV events
describe the whole cache, with the tokens of the prompt and of the answer.
"""

import kv_events
from engines import BLOCK_SIZE, LAYOUTS

LAYOUT = LAYOUTS["p+d"]
PROMPT = [1] + [(i * 7907) % 40_000 + 20 for i in range(299)]
ANSWER_TOKENS = 40
FULL_BLOCKS = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def scenario(stage):
    prefill, decode = stage.engines["prefill"], stage.engines["decode"]
    alone = decode.generate(PROMPT, cache_salt="alone", max_tokens=ANSWER_TOKENS)["choices"][0]["token_ids"]
    for expected in (0, FULL_BLOCKS):
        first = prefill.generate(PROMPT, cache_salt="pair", max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
        answer = decode.generate(PROMPT, cache_salt="pair", max_tokens=ANSWER_TOKENS, kv_transfer_params=first["kv_transfer_params"])
        assert answer["choices"][0]["token_ids"] == alone, "prefill and decode on two engines differ from one engine"
        assert (cached(first), cached(answer)) == (expected, expected), f"cached tokens {cached(first)}, {cached(answer)}, not {expected}"
    assert decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") >= len(PROMPT), "decode pulled no KV"
    computed = PROMPT + alone
    for engine, tokens in ((prefill, PROMPT), (decode, computed)):
        chains = kv_events.chains(kv_events.cache(kv_events.replay(engine.event_sources()[1])))
        # The last token of an answer has no KV.
        ends = range(BLOCK_SIZE, len(tokens) - (tokens is computed) + 1, BLOCK_SIZE)
        missing = [end for end in ends if (tuple(tokens[:end]), ("pair",)) not in chains]
        assert not missing, f"{engine.name}'s events lack the blocks that end at {missing}"
