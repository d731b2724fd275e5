"""An OpenAI client that keeps what it received. It asks Tandem's frontend, a vLLM server and vLLM's own router in the same way."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from engines import MODEL, metric

# Only a failing scenario waits this long: all engines and Tandem share two cores, possibly with other work.
TIMEOUT_SECONDS = 240
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
WORDS = (
    "river stone lamp garden letter window harbour orange music winter bridge paper silver morning forest engine ticket market "
    "castle island doctor summer yellow kitchen mountain village"
).split()


class Left(Exception):
    """The client leaves its answer."""


@dataclass
class Answer:
    """What a client received of one answer."""

    status: int = 0
    request_id: str | None = None
    # The address of the engine that has answered, if a gateway adds it to answers (scenarios/gateway.py).
    server: str | None = None
    text: str = ""
    usage: dict | None = None
    # Tandem's extension object, which `x-tandem-details` requests.
    details: dict = field(default_factory=dict)
    error: str | None = None
    # The answer ended as the API says: one JSON object, or `[DONE]`.
    complete: bool = False
    ttft_s: float | None = None
    chunks: int = 0

    @property
    def prompt_tokens(self):
        return self.usage["prompt_tokens"]

    @property
    def cached_tokens(self):
        """The number of the usage; a missing one is an error."""
        return self.usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def source(self):
        return self.details.get("cached_tokens_source")

    def check(self):
        assert self.complete and self.status == 200, f"the answer failed: HTTP {self.status}, {self.error or self.text!r}"
        return self


class Client:
    def __init__(self, address, key=None, details=True):
        """`address`: HOST:PORT, or a URL with nothing after the port. `key`: an API key. `details`: requests Tandem's extension object."""
        self.address = address.removeprefix("http://")
        self.headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.details = {"x-tandem-details": "true"} if details else {}

    def ask(self, endpoint, prompt, *, stream=False, leave=None, on_chunk=None, **options):
        """Sends a greedy request for exactly `max_tokens` tokens; returns what was received, errors included.

        `prompt`: a text, a list of token ids, or for chat a list of messages. `leave`: seconds after which the client disconnects.
        `on_chunk` is called with the answer after each chunk with text; it may raise `Left` to disconnect.
        """
        body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": stream, **options}
        if endpoint == "chat":
            body["messages"] = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = Answer()
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=leave or TIMEOUT_SECONDS)) as connection:
            try:
                began = time.perf_counter()
                connection.request("POST", PATHS[endpoint], json.dumps(body), self.headers | self.details)
                response = connection.getresponse()
                answer.status, headers = response.status, response.headers
                answer.request_id, answer.server = headers.get("x-request-id"), headers.get("x-server")
                if stream and response.status == 200:
                    self.read_stream(response, answer, began, on_chunk)
                else:
                    self.read_object(response, answer)
            except (Left, TimeoutError) as error:
                answer.error = "left" if leave or isinstance(error, Left) else f"no answer within {TIMEOUT_SECONDS} s"
                # Data in flight must not keep the connection open.
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                answer.error = f"{type(error).__name__}: {error}"
        return answer

    @staticmethod
    def read_object(response, answer):
        text = response.read().decode()
        received = json.loads(text) if text.startswith("{") else {}
        if response.status != 200 or "choices" not in received:
            answer.error = text
            return
        choice = received["choices"][0]
        answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
        answer.usage, answer.details, answer.complete = received.get("usage"), received.get("tandem") or {}, True

    @staticmethod
    def read_stream(response, answer, began, on_chunk):
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                answer.complete = answer.error is None
                return
            frame = json.loads(line[len(b"data: ") :])
            if "error" in frame:
                answer.error = json.dumps(frame["error"])
            answer.usage = frame.get("usage") or answer.usage
            answer.details = frame.get("tandem") or answer.details
            for choice in frame.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                if text:
                    answer.ttft_s = answer.ttft_s or time.perf_counter() - began
                    answer.text += text
                    answer.chunks += 1
                    if on_chunk:
                        on_chunk(answer)

    def post(self, path, body):
        """Returns the status, and the JSON of the answer or of each event of a streamed answer."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=TIMEOUT_SECONDS)) as connection:
            connection.request("POST", path, json.dumps(body), self.headers | self.details)
            response = connection.getresponse()
            text = response.read().decode()
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            assert events and events[-1] == "[DONE]", f"the stream ended without [DONE]: {text[-300:]}"
            return response.status, [json.loads(event) for event in events[:-1]]
        return response.status, json.loads(text)

    def get(self, path):
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=30)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def metric(self, name, **labels):
        return metric(self.get("/metrics")[1], name, **labels)

    def explain(self, prompts, model=MODEL):
        """Returns where Tandem would place each prompt of token ids now: workers with their overlap, by name."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            body = json.dumps({"model": model, "prompt": prompts, "max_tokens": 1})
            connection.request("POST", "/v1/completions", body, self.headers | {"x-tandem-explain": "true"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        assert response.status == 200, f"no explanation: {answer}"
        return [{worker["worker"]: worker for worker in prompt["workers"]} for prompt in answer["prompts"]]


def together(calls):
    """Makes the calls at the same time, each in a thread; returns their results."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class InBackground:
    """Calls that run while the scenario does something else."""

    def __init__(self, calls):
        self.pool = ThreadPoolExecutor(max(1, len(calls)))
        self.futures = [self.pool.submit(call) for call in calls]

    def results(self):
        with self.pool:
            return [future.result() for future in self.futures]


class Gate:
    """Counts the chunks of several streams, and lets clients leave together."""

    def __init__(self):
        self.chunks, self.closed, self.lock = {}, False, threading.Lock()

    def of(self, name):
        def on_chunk(answer):
            with self.lock:
                self.chunks[name] = answer.chunks
            if self.closed:
                raise Left

        return on_chunk

    def reached(self, streams, chunks):
        with self.lock:
            return sum(count >= chunks for count in self.chunks.values()) >= streams


def wait_until(what, holds, seconds=TIMEOUT_SECONDS, interval=0.05):
    """Polls until `holds` returns something true, and returns it."""
    began = time.perf_counter()
    while not (held := holds()):
        passed = time.perf_counter() - began
        assert passed < seconds, f"not within {seconds} s: {what}"
        time.sleep(interval)
    return held


def seconds_until(*arguments):
    """Returns how long `wait_until` took."""
    began = time.perf_counter()
    wait_until(*arguments)
    return time.perf_counter() - began


def prose(name, words):
    """Returns a text that differs from that of every other name in its first words."""
    chosen = random.Random(name).choices(WORDS, k=words)
    return f"{name}: " + " ".join(chosen)


class Table:
    """A Markdown table that is printed line by line."""

    def __init__(self, *columns):
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    @staticmethod
    def row(*cells):
        print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)
