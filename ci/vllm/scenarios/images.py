"""Images are placed exactly: vLLM counts and finds what Tandem predicts, and no two accounts share a picture.

Two engines with a random Qwen2-VL, which are also the renderers. Twenty pictures, each in a conversation of three turns, of different sizes
and with texts of different lengths around them. The engines' counts of prompt tokens and cached tokens must be those of the answers; at
least 99 % of the predictions must be exact; the later turns go to the engine that has the picture; the same picture with another salt, and
other pictures of the same size, find no block of it; and texts equal those of vLLM's own chat endpoint.
"""

import base64
import random
import struct
import time
import zlib

from client import Client, Table, prose, wait_until
from cluster import Tandem
from engines import LAYOUTS

LAYOUT = LAYOUTS["images"]
PICTURES, TURNS = 20, 3
ANSWER_TOKENS = 4
EXACT_MIN = 0.99
EVENTS_SECONDS = 0.5
BLOCK = 32


def png(width, height, seed):
    """Returns the URL of a picture with random stripes."""
    rng = random.Random(seed)
    rows = b"".join(b"\0" + bytes(rng.randrange(256) for _ in range(3)) * width for _ in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def picture(number):
    rng = random.Random(number)
    return image(png(28 * rng.randrange(3, 12), 28 * rng.randrange(3, 12), number))


def question(number):
    before, after = (prose(f"{part} {number}", random.Random(f"{part} {number}").randrange(3, 60)) for part in ("before", "after"))
    return {"role": "user", "content": [text(before), picture(number), text(after)]}


def counts(engine):
    """Returns the numbers of prompt tokens that the engine has computed or found, and of those that it has found."""
    return tuple(int(engine.metric(f"vllm:{name}_total")) for name in ("prompt_tokens", "prefix_cache_hits"))


def missed(client):
    return [int(client.metric(f"tandem_router_overlap_{kind}_tokens_total")) for kind in ("over", "under")]


class Asking:
    """Asks one prompt after the other, and compares the counts of client, router and engines."""

    def __init__(self, client, engines):
        self.client, self.engines = client, engines
        self.answers, self.exact = [], 0

    def ask(self, messages, **options):
        # The engine's events of the prompt before must have arrived.
        time.sleep(EVENTS_SECONDS)
        before, differences = [counts(engine) for engine in self.engines], missed(self.client)
        answer = self.client.ask("chat", messages, max_tokens=ANSWER_TOKENS, **options).check()
        wait_until("the prompt was counted", lambda: self.client.metric("tandem_router_bookings") == 0, 20, 0.05)
        after = [counts(engine) for engine in self.engines]
        computed = [at for at, (one, two) in enumerate(zip(before, after)) if one != two]
        assert len(computed) == 1, f"{len(computed)} engines have computed the prompt"
        (at,) = computed
        found = tuple(now - then for now, then in zip(after[at], before[at]))
        assert found == (answer.prompt_tokens, answer.cached_tokens), f"vLLM counts {found}, the client got {answer.usage}"
        self.exact += missed(self.client) == differences
        self.answers.append(answer)
        return answer, at


def conversations(asking):
    table = Table("picture", "turn", "prompt tokens", "cached", "engine")
    for number in range(PICTURES):
        messages, place, reusable = [question(number)], None, 0
        for turn in range(TURNS):
            answer, at = asking.ask(messages)
            table.row(number, turn, answer.prompt_tokens, answer.cached_tokens, at)
            if turn > 0:
                assert at == place, f"turn {turn} of picture {number} went to engine {at}, which lacks the picture"
                assert answer.cached_tokens >= reusable, f"only {answer.cached_tokens} of {reusable} tokens were found again"
            # The client's text of an answer may have other tokens than those that were generated.
            place, reusable = at, (answer.prompt_tokens - 1) // BLOCK * BLOCK
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": f"And {prose(f'{number} {turn}', 9)}?"}]


def separate(asking):
    """Asks about one picture with two salts, and about two pictures of one size."""
    one, other = (image(png(168, 168, f"separate {name}")) for name in ("one", "other"))
    ask = lambda part, salt: asking.ask([{"role": "user", "content": [part, text(prose("same", 30))]}], cache_salt=salt)[0]
    first = ask(one, "account a")
    assert first.cached_tokens == 0
    assert ask(one, "account a").cached_tokens == (first.prompt_tokens - 1) // BLOCK * BLOCK
    for part, salt in ((one, "account b"), (other, "account a")):
        found = ask(part, salt).cached_tokens
        assert found == 0, f"{found} tokens of another account's or another picture's KV were found"


def same_texts(client, engine):
    """Compares answers with those of vLLM's own endpoint."""
    own = Client(engine.url)
    for number in range(5):
        messages = [question(number)]
        texts = [asked.ask("chat", messages, max_tokens=24).check() for asked in (client, own)]
        assert texts[0].prompt_tokens == texts[1].prompt_tokens, "vLLM's own endpoint has another prompt"
        assert texts[0].text == texts[1].text, f"Tandem: {texts[0].text!r}, vLLM: {texts[1].text!r}"


def scenario(stage):
    engines = list(stage.engines)
    with Tandem(stage) as tandem:
        # With smaller blocks than the engines', Tandem promises a part of a block that an engine finds as a whole or not at all.
        client = tandem.up("images", engines, (), "--block-size", BLOCK)
        asking = Asking(client, engines)
        conversations(asking)
        separate(asking)
        exact, count = asking.exact, len(asking.answers)
        print(f"predicted = found for {exact} of {count} prompts; {sum(answer.cached_tokens for answer in asking.answers)} tokens were found")
        assert exact >= EXACT_MIN * count, f"only {exact} of {count} predictions were right"
        print(tandem.audit(asking.answers, client.get("/metrics")[1]))
        same_texts(client, engines[0])
