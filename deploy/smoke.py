"""Sends requests to a cluster: `cached` checks the cached-token count; `load` streams until it is interrupted, and counts lost answers."""

import json
import signal
import sys
import threading
import urllib.request

CLIENTS = 3


def chat(base, text, max_tokens):
    """Yields the frames of a streamed answer."""
    model = json.load(urllib.request.urlopen(f"{base}/v1/models", timeout=60))["data"][0]["id"]
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": text}],
    }
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    frames = [line[6:].strip() for line in urllib.request.urlopen(request, timeout=120) if line.startswith(b"data: ")]
    if not frames or frames[-1] != b"[DONE]":
        raise ValueError(f"the answer is not complete; its last frame is {frames[-1:]}")
    return [json.loads(frame) for frame in frames[:-1]]


def cached(base):
    text = "Tell me what a tandem bicycle is. " * 20
    for turn in ("first", "second"):
        usage = chat(base, text, 8)[-1]["usage"]
        print(f"{turn} time: {usage['prompt_tokens']} tokens, {usage['prompt_tokens_details']['cached_tokens']} of them cached")
    if usage["prompt_tokens_details"]["cached_tokens"] < 100:
        sys.exit("the second request reports fewer than 100 cached tokens, although its prompt is the same")


def load(base):
    over = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: over.set())
    whole, lost = [], []

    def client(number):
        turn = 0
        while not over.is_set():
            turn += 1
            try:
                chat(base, f"Client {number} asks for the {turn}th time what a tandem is. " * 10, 24)
                whole.append(number)
            except Exception as error:
                lost.append(f"client {number}, request {turn}: {error} {getattr(error, 'read', bytes)()[:300]!r}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    over.wait()
    for thread in clients:
        thread.join()
    print(f"{len(whole)} answers were complete, {len(lost)} were lost")
    print(*lost[:10], sep="\n")
    sys.exit(1 if lost or not whole else 0)


if __name__ == "__main__":
    {"cached": cached, "load": load}[sys.argv[1]](sys.argv[2])
