"""Tandem and vLLM's own router in front of the same two engines that read images, asked alternately: the figures of docs/images.md.

Four users ask five questions each about a picture of their own, after some words that all of one system have in common. Each system has its
own pictures. Nothing is asserted but that every request is answered.
"""

from contextlib import ExitStack

from client import Table, prose
from cluster import Tandem
from engines import BLOCK_SIZE, LAYOUTS
from scenarios.compare_routers import COLUMNS, PROGRAM, OtherRouter, kv_aware, measure
from scenarios.images import image, png, text

LAYOUT = LAYOUTS["images"]
# At 28 pixels a token in each direction: 81 tokens.
SIDE = 252


def conversation(system, document, question):
    """Returns a conversation about a picture, which the questions before and short answers precede."""
    picture = image(png(SIDE, SIDE, f"{system} {document}"))
    messages = [{"role": "system", "content": f"{system} {prose('rules', 60)}"}]
    messages += [{"role": "user", "content": [picture, text(prose(f"picture {document}", 40))]}]
    for turn in range(question):
        messages += [{"role": "assistant", "content": prose(f"answer {document} {turn}", 20)}]
        messages += [{"role": "user", "content": prose(f"question {document} {turn}", 10)}]
    return messages


def scenario(stage):
    engines = list(stage.engines)
    urls = ("--worker-urls", *(engine.url for engine in engines))
    policies = {
        "cache_aware": ["--policy", "cache_aware", *urls],
        "kv_aware": [*kv_aware(engines), *urls],
        "round_robin": ["--policy", "round_robin", *urls],
    }
    with Tandem(stage) as tandem, ExitStack() as stack:
        client = tandem.up("compare-images", engines, (), "--block-size", BLOCK_SIZE)
        systems = {"tandem": (client, tandem.processes["compare-images"])}
        for policy, arguments in policies.items():
            router = stack.enter_context(OtherRouter(stage, f"vllm-router-{policy}", PROGRAM, *arguments))
            systems[f"vllm-router {policy}"] = (router.client, router.process)
        measure(Table(*COLUMNS), "images", systems, conversation)
