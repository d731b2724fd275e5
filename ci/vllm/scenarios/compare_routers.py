"""Tandem and vLLM's own router (PyPI's vllm-router) in front of the same engines, asked alternately: the figures of docs/bench/vllm.md.

Questions about documents, in front of two mixed engines (vllm-router's policies cache_aware, its default, and kv_aware, which reads KV events)
and of a prefill and a decode engine. Each system has its own documents, which differ in their first word only, so that no system finds what
another one has cached. Nothing is asserted but that every request is answered.
"""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from client import Client, Table, prose, together, wait_until
from cluster import Process, Tandem, answers
from engines import BLOCK_SIZE, LAYOUTS, MODEL, free_port

LAYOUT = LAYOUTS["p+d"]
DOCUMENTS, QUESTIONS = 4, 5
# About 640 tokens.
DOCUMENT_WORDS = 450
ANSWER_TOKENS = 6
IDLE_SECONDS = 10
PROGRAM = [Path(sys.executable).with_name("vllm-router")]

COLUMNS = ("engines", "router", "requests", "prompt tokens", "cached", "share", "TTFT p50", "p99", "router's CPU a request", "idle, a second")


class OtherRouter:
    """An engine's own router; leaving the `with` block ends it."""

    def __init__(self, stage, name, program, *arguments):
        port = free_port()
        command = [*program, "--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), *arguments]
        self.process, self.client = Process(name, command, stage.folder), Client(f"127.0.0.1:{port}")

    def __enter__(self):
        wait_until(f"{self.process.name} is ready", lambda: answers(lambda: self.client.get("/v1/models")[0] == 200), 120, 0.2)
        return self

    def __exit__(self, *_):
        self.process.end()


def kv_aware(engines):
    """Returns vllm-router's arguments for placement by the engines' KV events."""
    arguments = ["--policy", "kv_aware", "--kv-event-model", MODEL, "--kv-event-block-size", BLOCK_SIZE]
    for engine in engines:
        events, replay = engine.event_sources()
        arguments += ["--kv-event-source", f"{engine.url}={events}", "--kv-event-replay-source", f"{engine.url}={replay}"]
    return arguments


def conversation(system, document, question):
    return [
        {"role": "system", "content": f"{system} {prose(f'document {document}', DOCUMENT_WORDS)}"},
        {"role": "user", "content": f"Question {question}: what about {prose(f'{document} {question}', 6)}?"},
    ]


def ask_alternately(clients, mode, conversation):
    """Each user asks all questions about a document, each question of all systems, in changing order. Returns the answers by system."""

    def user(document):
        received = []
        for question in range(QUESTIONS):
            names = list(clients)
            first = (document + question) % len(names)
            asked = {}
            for name in names[first:] + names[:first]:
                prompt = conversation(f"{mode} {name}", document, question)
                asked[name] = clients[name].ask("chat", prompt, stream=True, max_tokens=ANSWER_TOKENS).check()
            received.append(asked)
        return received

    users = together([lambda document=document: user(document) for document in range(DOCUMENTS)])
    return {name: [asked[name] for received in users for asked in received] for name in clients}


def cached_tokens(answer):
    """vLLM leaves the details out of a usage that it does not know."""
    return ((answer.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def measure(table, mode, systems, conversation=conversation):
    """Asks all systems alternately, and adds a row for each. `systems`: client and process of each, by name. `conversation` returns the messages
    of a question about a document; no system must find what another one has cached."""
    before = {system: process.cpu_seconds() for system, (_, process) in systems.items()}
    received = ask_alternately({system: client for system, (client, _) in systems.items()}, mode, conversation)
    used = {system: process.cpu_seconds() for system, (_, process) in systems.items()}
    time.sleep(IDLE_SECONDS)
    for system, (_, process) in systems.items():
        got, cpu, idle = received[system], used[system] - before[system], (process.cpu_seconds() - used[system]) / IDLE_SECONDS
        prompt, cached = sum(answer.prompt_tokens for answer in got), sum(map(cached_tokens, got))
        ttfts = statistics.quantiles((answer.ttft_s for answer in got), n=100, method="inclusive")
        figures = [f"{ttfts[49]:.2f} s", f"{ttfts[98]:.2f} s", f"{cpu / len(got) * 1e3:.1f} ms", f"{idle * 1e3:.1f} ms"]
        table.row(mode, system, len(got), prompt, cached, f"{cached / prompt:.3f}", *figures)


def scenario(stage):
    prefill, decode = stage.engines["prefill"], stage.engines["decode"]
    both = ("--worker-urls", prefill.url, decode.url)
    modes = {
        "mixed": (([prefill, decode], []), (), {"cache_aware": ["--policy", "cache_aware", *both], "kv_aware": [*kv_aware([prefill, decode]), *both]}),
        "P/D": (
            ([decode], [prefill]),
            ("--prefill", "remote"),
            {"cache_aware": ["--policy", "cache_aware", "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url]},
        ),
    }
    table = Table(*COLUMNS)
    for mode, (engines, flags, policies) in modes.items():
        name = mode.replace("/", "")
        with Tandem(stage) as tandem, ExitStack() as stack:
            client = tandem.up(f"compare-{name}", *engines, *flags)
            systems = {"tandem": (client, tandem.processes[f"compare-{name}"])}
            for policy, arguments in policies.items():
                router = stack.enter_context(OtherRouter(stage, f"vllm-router-{name}-{policy}", PROGRAM, *arguments))
                systems[f"vllm-router {policy}"] = (router.client, router.process)
            measure(table, mode, systems)
