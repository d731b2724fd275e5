"""Conversations of several turns against a frontend: first tokens by turn, time between tokens, throughput.

    python3 bench/turns.py http://127.0.0.1:8000

Prompts are token ids, so any model that has so many (--vocabulary) will do; every turn sends all that was said before. The words of an answer are stood in by others of
the same number: prefill workers have not computed them, whatever they are. Times are the client's.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor


def ask(address, model, prompt, tokens):
    """When each token came after the request, in milliseconds, and how much of the prompt was cached."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens, **options})
    connection = http.client.HTTPConnection(address, timeout=600)
    try:
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(f"{address} answered {response.status}: {response.read().decode()}")
        came, usage = [], None
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            frame = json.loads(line[len(b"data: ") :])
            usage = frame.get("usage") or usage
            if frame.get("error"):
                sys.exit(f"{address} answered {frame}")
            if frame["choices"]:
                came.append((time.perf_counter() - began) * 1e3)
    finally:
        connection.close()
    if not usage or usage["completion_tokens"] != tokens:
        sys.exit(f"{address} gave {usage} instead of {tokens} tokens")
    return came, usage["prompt_tokens_details"]["cached_tokens"]


def converse(seed, address, model, shape):
    """Of each turn: milliseconds to the first token, milliseconds a token afterwards, prompt tokens, cached tokens."""
    words, said, turns = random.Random(seed), [], []
    new = lambda count: [words.randrange(shape.vocabulary // 100, shape.vocabulary) for _ in range(count)]
    for turn in range(shape.turns):
        said += new(shape.more if turn else shape.first)
        came, cached = ask(address, model, said, shape.answer)
        between = (came[-1] - came[0]) / max(shape.answer - 1, 1)
        turns.append((came[0], between, len(said), cached))
        said += new(shape.answer)
    return turns


def measure(address, shape):
    """All conversations, so many at once; prints a table."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    # The first request after a start initialises things; it belongs to no conversation.
    ask(address, model, [shape.vocabulary // 2] * shape.first, 4)
    began = time.perf_counter()
    with ThreadPoolExecutor(shape.at_once) as pool:
        conversations = list(pool.map(lambda seed: converse(seed, address, model, shape), range(shape.conversations)))
    seconds = time.perf_counter() - began
    print(f"{shape.conversations} conversations, {shape.at_once} at once: {shape.first} tokens, then {shape.more} a turn; answers of {shape.answer}\n")
    print("| Turn | Prompt tokens | cached | TTFT, ms (median) | TTFT, ms (worst) |\n|--:|--:|--:|--:|--:|")
    for turn in range(shape.turns):
        ttft, _, prompt, cached = zip(*(conversation[turn] for conversation in conversations))
        share = sum(cached) / sum(prompt)
        print(f"| {turn + 1} | {prompt[0]:,} | {share:.0%} | {statistics.median(ttft):.0f} | {max(ttft):.0f} |")
    between = sorted(turn[1] for conversation in conversations for turn in conversation)
    tokens = sum(turn[2] + shape.answer for conversation in conversations for turn in conversation)
    print(f"\nTPOT: median {statistics.median(between):.2f} ms, p99 {between[min(len(between) * 99 // 100, len(between) - 1)]:.2f} ms.")
    print(f"{tokens / seconds:,.0f} tokens a second, prompts and answers together.", flush=True)


def shape_of(arguments=()):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first", type=int, default=4_096, help="tokens of the first turn")
    parser.add_argument("--more", type=int, default=1_024, help="new tokens of each turn after it")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=30_000, help="token ids are below this, and above a hundredth of it")
    return parser, parser.parse_args(arguments)


if __name__ == "__main__":
    parser, _ = shape_of()
    parser.add_argument("url")
    given = parser.parse_args()
    measure(urllib.parse.urlsplit(given.url).netloc, given)
