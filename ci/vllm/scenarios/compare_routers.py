"""Tandem and vLLM's own router (PyPI's vllm-router) in front of the same engines, asked alternately: the figures of docs/bench/vllm.md.

The same questions about the same documents, once for two mixed engines (vllm-router's cache_aware policy, its default) and once for a prefill
and a decode engine. Tandem's salts keep the caches apart. Nothing is asserted but that every request is answered with the same text.
"""

import statistics
import sys
from pathlib import Path

from client import Client, Table, prose, together, wait_until
from cluster import Process, Tandem, answers
from engines import LAYOUTS, free_port

LAYOUT = LAYOUTS["p+d"]
DOCUMENTS, QUESTIONS = 4, 6
# About 640 tokens.
DOCUMENT_WORDS = 450
ANSWER_TOKENS = 6


class VllmRouter:
    """vLLM's router; leaving the `with` block ends it."""

    def __init__(self, stage, name, *arguments):
        port = free_port()
        command = [Path(sys.executable).with_name("vllm-router"), "--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), *arguments]
        self.process, self.client = Process(name, command, stage.folder), Client(f"127.0.0.1:{port}")

    def __enter__(self):
        ready = lambda: answers(lambda: self.client.get("/v1/models")[0] == 200)
        wait_until(f"{self.process.name} is ready", ready, 120, 0.2)
        return self

    def __exit__(self, *_):
        self.process.end()


def conversation(mode, document, question):
    return [
        {"role": "system", "content": prose(f"{mode} document {document}", DOCUMENT_WORDS)},
        {"role": "user", "content": f"Question {question}: what about {prose(f'{document} {question}', 6)}?"},
    ]


def ask_alternately(clients, mode):
    """Each of the users asks all questions about a document, of all systems; the order alternates. Returns the answers by system."""

    def user(document):
        received = []
        for question in range(QUESTIONS):
            order = sorted(clients, reverse=(document + question) % 2 == 1)
            asked = {name: clients[name].ask("chat", conversation(mode, document, question), stream=True, max_tokens=ANSWER_TOKENS).check() for name in order}
            texts = {answer.text for answer in asked.values()}
            assert len(texts) == 1, f"the texts differ: {asked}"
            received.append(asked)
        return received

    users = together([lambda document=document: user(document) for document in range(DOCUMENTS)])
    return {name: [asked[name] for received in users for asked in received] for name in clients}


def scenario(stage):
    prefill, decode = stage.engines["prefill"], stage.engines["decode"]
    table = Table("engines", "router", "requests", "prompt tokens", "cached (usage)", "share", "TTFT p50", "p99", "router's CPU a request")
    modes = {
        "mixed": (([prefill, decode], []), (), ["--policy", "cache_aware", "--worker-urls", prefill.url, decode.url]),
        "P/D": (
            ([decode], [prefill]),
            ("--prefill", "remote"),
            ["--policy", "cache_aware", "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url],
        ),
    }
    for mode, (engines, flags, arguments) in modes.items():
        name = mode.replace("/", "")
        with Tandem(stage) as tandem, VllmRouter(stage, f"vllm-router-{name}", *arguments) as router:
            client = tandem.up(f"compare-{name}", *engines, *flags)
            systems = {"tandem": (client, tandem.processes[f"compare-{name}"]), "vllm-router": (router.client, router.process)}
            before = {system: process.cpu_seconds() for system, (_, process) in systems.items()}
            received = ask_alternately({system: client for system, (client, _) in systems.items()}, mode)
            for system, (_, process) in systems.items():
                got, cpu = received[system], process.cpu_seconds() - before[system]
                prompt, cached = sum(answer.prompt_tokens for answer in got), sum(cached_tokens(answer) for answer in got)
                ttfts = statistics.quantiles((answer.ttft_s for answer in got), n=100, method="inclusive")
                figures = [f"{ttfts[49]:.2f} s", f"{ttfts[98]:.2f} s", f"{cpu / len(got) * 1e3:.1f} ms"]
                table.row(mode, system, len(got), prompt, cached, f"{cached / prompt:.3f}", *figures)


def cached_tokens(answer):
    """vLLM leaves the details out when nothing was cached."""
    return ((answer.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
