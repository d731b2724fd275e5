"""Scenarios with prefill and decode on different SGLang servers only: two pairs, so that a request can go to another one."""

import signal

from both import CLIENT_LEFT_SECONDS, HUNG_SECONDS, LONG, PROMPT, Fleet, Streams
from client import Gate, InBackground, seconds_until, wait_until
from cluster import Tandem
from scenarios import reconcile
from scenarios.faults import story


def pair_abort(stage):
    """P/D: when clients leave, no server runs a request 3 seconds later: streams, and a long prompt that is being computed."""
    fleet = Fleet(stage)
    idle = lambda: not any(server.load() for server in fleet.servers)
    with Tandem(stage) as tandem:
        client, gate = fleet.up(tandem), Gate()
        asked = [lambda number=number: client.ask("chat", story(f"Left {number}"), stream=True, max_tokens=400, on_chunk=gate.of(number)) for number in range(5)]
        streams = InBackground(asked)
        wait_until("all streams have begun", lambda: gate.reached(5, 3), 120)
        gate.closed = True
        streams.results()
        ended = seconds_until("the servers run nothing", idle, 60, 0.1)
        print(f"the servers run nothing {ended:.2f} s after the last client has left")
        assert ended <= CLIENT_LEFT_SECONDS
        client.ask("completions", LONG, stream=True, max_tokens=4, leave=1.5)
        # A step that has begun is finished.
        ended = seconds_until("the servers run nothing", idle, 60, 0.1)
        print(f"the servers run nothing {ended:.2f} s after the client of a long prompt has left")
        client.ask("completions", PROMPT, max_tokens=2).check()


def pair_faults(stage):
    """P/D: no answer fails when servers and workers are killed, stand still, or abort one half; a room never waits for its other half."""
    fleet = Fleet(stage)
    prefill, decode = fleet.prefill[0], fleet.decode[0]
    with Tandem(stage) as tandem:
        client = fleet.up(tandem, "--step-timeout", HUNG_SECONDS)
        streams = Streams(fleet, client, 6, 40)
        streams.during("prefill server aborts all its requests", lambda: prefill.control("/abort_request", abort_all=True), in_prefill=True)
        streams.during("decode server aborts all its requests", lambda: decode.control("/abort_request", abort_all=True))
        streams.during("kill -9 of a prefill server", prefill.kill, in_prefill=True)
        streams.back(prefill, "prefill-0")
        streams.during("kill -9 of a decode server", decode.kill)
        streams.back(decode, "decode-0")
        streams.during("SIGSTOP of a prefill server", lambda: prefill.send(signal.SIGSTOP), in_prefill=True)
        prefill.send(signal.SIGCONT)
        streams.during("SIGSTOP of a decode server", lambda: decode.send(signal.SIGSTOP))
        decode.send(signal.SIGCONT)
        fleet.idle()
        client.ask("completions", PROMPT, max_tokens=4).check()
        wait_until("the cluster is idle", lambda: reconcile.idle(client), 90, 0.5)


def pair_workers(stage):
    """P/D: no answer fails when worker processes are killed; their servers are free 3 seconds later."""
    fleet = Fleet(stage)
    with Tandem(stage) as tandem:
        router = tandem.router()
        roles = {f"{role}-{at}": (role, server) for role in ("prefill", "decode") for at, server in enumerate(getattr(fleet, role))}
        for name, (role, server) in roles.items():
            tandem.worker(name, role, server)
        client = tandem.frontend(router)
        tandem.join(*roles)
        tandem.ready(client, "frontend")
        streams = Streams(fleet, client, 6, 40)
        for name, in_prefill in (("prefill-0", True), ("decode-0", False)):
            role, server = roles[name]
            streams.during(f"kill -9 of the worker {name}", tandem.processes[name].kill, in_prefill)
            ended = seconds_until("its server runs nothing", lambda: server.load() == 0, 60, 0.1)
            print(f"the server of {name} runs nothing {ended:.2f} s after the last answer")
            tandem.worker(name, role, server)
            tandem.join(*roles)
        fleet.idle()


PAIRS = (pair_abort, pair_workers, pair_faults)
