"""Tandem and SGLang's own router (PyPI's sglang-router) in front of the same servers.

Both are asked alternately; each has its own documents, so that no system finds what the other one has cached. Then a server is killed while both
have streams. Of SGLang's router nothing is asserted.
"""

import sys
from contextlib import ExitStack

from both import Fleet
from client import Gate, InBackground, Table, wait_until
from cluster import Tandem
from scenarios.compare_routers import COLUMNS, OtherRouter, measure
from scenarios.faults import story

STREAMS, STREAM_TOKENS = 6, 40


def fault(table, mode, systems, name, victim):
    """Kills the server while all systems have streams. Each request is counted as failed if its answer is not complete."""
    for system, (client, _) in systems.items():
        gate = Gate()
        prompts = [story(f"{mode} {system} {number}") for number in range(STREAMS)]
        asked = [
            lambda at=at, prompt=prompt: client.ask("chat", prompt, stream=True, max_tokens=STREAM_TOKENS, on_chunk=gate.of(at))
            for at, prompt in enumerate(prompts)
        ]
        streams = InBackground(asked)
        wait_until(f"all streams of {system} have begun", lambda: gate.reached(STREAMS, 3), 120)
        victim.kill()
        failed = [answer for answer in streams.results() if not answer.complete]
        victim.start()
        victim.wait()
        table.row(mode, system, name, STREAMS, len(failed))
        if system == "tandem":
            assert not failed, f"{len(failed)} requests failed, such as {failed[0]}"
            wait_until("the worker joins again", lambda: client.metric("tandem_router_workers", state="joined") >= 2, 90)


def run(stage, mode, name, up, arguments, victim):
    # The router imports SGLang, which needs the stand-ins for CUDA's libraries.
    stubs = next(iter(stage.engines)).folder / "stubs"
    program = ["env", f"LD_LIBRARY_PATH={stubs}", sys.executable, "-m", "sglang_router.launch_router"]
    figures, faults = Table(*COLUMNS), Table("engines", "router", "fault", "requests", "failed")
    with Tandem(stage) as tandem, ExitStack() as stack:
        systems = {"tandem": (up(tandem, name), tandem.processes[name])}
        for policy in ("cache_aware", "power_of_two"):
            router = stack.enter_context(OtherRouter(stage, f"{name}-{policy}", program, "--policy", policy, *arguments))
            systems[f"sglang-router {policy}"] = (router.client, router.process)
        measure(figures, mode, systems)
        of_default = {system: systems[system] for system in ("tandem", "sglang-router cache_aware")}
        fault(faults, mode, of_default, f"kill -9 of {victim.name}", victim)


def routers(stage):
    """Tandem compared with SGLang's own router, in front of two whole servers: cached share, time to first token, CPU, and failed requests."""
    servers = list(stage.engines)
    urls = ["--worker-urls", *(server.url for server in servers)]
    run(stage, "mixed", "routers", lambda tandem, name: tandem.up(name, servers), urls, servers[0])


def pair_routers(stage):
    """P/D: Tandem compared with SGLang's own router, in front of two prefill and two decode servers."""
    fleet = Fleet(stage)
    prefill, decode = fleet.prefill, fleet.decode
    arguments = ["--pd-disaggregation"]
    for server in prefill:
        arguments += ["--prefill", server.url, str(server.side_channel)]
    for server in decode:
        arguments += ["--decode", server.url]
    run(stage, "P/D", "pair_routers", lambda tandem, name: tandem.up(name, decode, prefill), arguments, decode[0])
