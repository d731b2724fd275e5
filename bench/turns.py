"""Measures conversations of several turns with a frontend: time to first token by turn, time between tokens, throughput.

    python3 bench/turns.py http://127.0.0.1:8000

Prompts are token ids, so every model with a large enough vocabulary (--vocabulary) can be measured. Every turn sends the whole conversation. Random tokens replace those
of each answer in later turns; prefill workers must compute either. Times are measured by the client.
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


def complete(address, model, prompt, tokens):
    """Sends a request. Returns the time of each token after the request, in milliseconds, and the number of cached tokens."""
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
        token_times, usage = [], None
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            frame = json.loads(line[len(b"data: ") :])
            usage = frame.get("usage") or usage
            if frame.get("error"):
                sys.exit(f"{address} answered {frame}")
            if frame["choices"]:
                token_times.append((time.perf_counter() - began) * 1e3)
    finally:
        connection.close()
    if not usage or usage["completion_tokens"] != tokens:
        sys.exit(f"{address} returned {usage} instead of {tokens} tokens")
    return token_times, usage["prompt_tokens_details"]["cached_tokens"]


def run_conversation(seed, address, model, shape):
    """Returns for each turn: milliseconds to the first token, milliseconds per token afterwards, prompt tokens, cached tokens."""
    words, context, turns = random.Random(seed), [], []
    new_tokens = lambda count: [words.randrange(shape.vocabulary // 100, shape.vocabulary) for _ in range(count)]
    for turn in range(shape.turns):
        context += new_tokens(shape.added if turn else shape.first)
        token_times, cached = complete(address, model, context, shape.answer)
        between = (token_times[-1] - token_times[0]) / max(shape.answer - 1, 1)
        turns.append((token_times[0], between, len(context), cached))
        context += new_tokens(shape.answer)
    return turns


def measure(address, shape):
    """Runs all conversations, some of them concurrently, and prints a table. Returns the medians in milliseconds."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    # The first request after a start includes one-time initialisation, so it is not measured.
    complete(address, model, [shape.vocabulary // 2] * shape.first, 4)
    began = time.perf_counter()
    with ThreadPoolExecutor(shape.concurrency) as pool:
        conversations = list(pool.map(lambda seed: run_conversation(seed, address, model, shape), range(shape.conversations)))
    seconds = time.perf_counter() - began
    print(
        f"{shape.conversations} conversations, {shape.concurrency} at a time: {shape.first} tokens, then {shape.added} more in each turn; "
        f"answers of {shape.answer} tokens\n"
    )
    print("| Turn | Prompt tokens | cached | TTFT, ms (median) | TTFT, ms (worst) |\n|--:|--:|--:|--:|--:|")
    medians = []
    for turn in range(shape.turns):
        ttft, _, prompt, cached = zip(*(conversation[turn] for conversation in conversations))
        share = sum(cached) / sum(prompt)
        medians.append(round(statistics.median(ttft), 1))
        print(f"| {turn + 1} | {prompt[0]:,} | {share:.0%} | {statistics.median(ttft):.0f} | {max(ttft):.0f} |")
    between = sorted(turn[1] for conversation in conversations for turn in conversation)
    tokens = sum(turn[2] + shape.answer for conversation in conversations for turn in conversation)
    print(f"\nTPOT: median {statistics.median(between):.2f} ms, p99 {between[min(len(between) * 99 // 100, len(between) - 1)]:.2f} ms.")
    print(f"{tokens / seconds:,.0f} tokens a second, prompts and answers together.", flush=True)
    return {"ttft_ms": medians, "tpot_ms": round(statistics.median(between), 2), "tokens_per_second": round(tokens / seconds)}


def shape_of(arguments=()):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first", type=int, default=4_096, help="prompt tokens of the first turn")
    parser.add_argument("--added", type=int, default=1_024, help="new tokens of each later turn")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=30_000, help="token ids are below this, and above a hundredth of it")
    return parser, parser.parse_args(arguments)


if __name__ == "__main__":
    parser, _ = shape_of()
    parser.add_argument("url")
    given = parser.parse_args()
    measure(urllib.parse.urlsplit(given.url).netloc, given)
