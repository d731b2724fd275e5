"""Compares what Tandem and vLLM's own router add to vLLM servers: CPU and time to first token. Run by `bench/front.sh`.

Each of the two is in front of two fake servers of its own, which answer at a fixed pace. The same load is sent to both in turns, and to a server
itself, by `tandem bench replay`. CPU is that of the process `tandem up` or `vllm-router`, all threads included.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from cluster import HERE, finish, machine, output, progress
from edge import Report, Server, Texts, free_port, model_folder, shown

RESULT = HERE.parent / "docs/bench/front.md"
ROUNDS_MIN = 5
KV_TOKENS, STEP_MS, CONTEXT = 262_144, 10, 131_072
# The tokens of a sentence, on average.
SENTENCE = 18.95


@dataclass(frozen=True)
class Load:
    """Requests with distinct prompts, or conversations of several requests. `streams` of them are answered at once."""

    tokens: int
    streams: int
    answer: int
    count: int
    cpu_max: float
    turns: int = 1

    def answers(self):
        """Returns the lengths of answers. They differ by up to a half, so that answers do not begin at the same times."""
        return [max(1, self.answer + (at % 9 - 4) * self.answer // 8) for at in range(self.count)]

    def rows(self, texts):
        """Returns the rows of a trace: requests, or conversations, whose recorded answers only determine the answers' lengths."""
        user = lambda tokens: {"role": "user", "content": texts.text(round(tokens / SENTENCE))}
        if self.turns == 1:
            return [{"messages": [user(self.tokens)], "max_tokens": length} for length in self.answers()]
        turn = lambda tokens, length: [user(tokens), {"role": "assistant", "content": "word" * length}]
        turns = lambda length: [message for at in range(self.turns) for message in turn(100 if at else self.tokens, length)]
        return [{"messages": turns(length)} for length in self.answers()]


LOADS = [
    Load(500, 1, 128, 18, 1.5),
    Load(500, 16, 128, 162, 1.5),
    Load(500, 64, 128, 513, 1.5),
    Load(4_000, 1, 1, 300, 3.5),
    Load(4_000, 16, 1, 400, 3.5),
    Load(30_000, 1, 1, 100, 4.0),
    Load(30_000, 16, 1, 160, 4.0),
    Load(28_000, 4, 64, 18, 1.0, turns=4),
]


class Engine(Server):
    """A fake server alone."""

    name, edge, engines = "server", (), 0

    def __init__(self, running, folder, arguments, words):
        super().__init__(running, folder, {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")})
        ports = [free_port() for _ in range(self.engines)]
        for port in ports or [self.port]:
            self.start(f"engine-{port}", arguments.engine, str(port), str(STEP_MS), str(KV_TOKENS // 16), words)
        if ports:
            self.start("front", *self.command(arguments, [f"http://127.0.0.1:{port}" for port in ports]))


class Tandem(Engine):
    name, edge, engines = "Tandem", ("front",), 2

    def command(self, arguments, urls):
        # Without this setting, the client would ask Tandem for details of each answer.
        options = ["--listen", f"127.0.0.1:{self.port}", "--expose-details", "never", "--log", "warn"]
        return [arguments.tandem, "up", "--engine", "vllm", "--engine-url", ",".join(urls), "--model", "model", *options]


class Router(Engine):
    name, edge, engines = "vllm-router", ("front",), 2

    def command(self, _, urls):
        ports = ["--port", str(self.port), "--prometheus-port", str(free_port())]
        return [str(pathlib.Path(sys.executable).with_name("vllm-router")), "--policy", "cache_aware", *ports, "--log-level", "warning", "--worker-urls", *urls]


@dataclass(frozen=True)
class Measured:
    cpu_ms: float
    ttft_ms: float
    prompt: float
    cached: float
    failed: int


def run(arguments, folder, server, load):
    """Sends the load in `trace.json` to a server."""
    client = [arguments.tandem, "bench", "replay", "trace.json", str(server.port), "--concurrency", str(load.streams), "--json", "report.json"]
    began = server.cpu_ms()
    subprocess.run(client, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    requests = load.count * load.turns
    cpu, report = (server.cpu_ms() - began) / requests, json.loads((folder / "report.json").read_text())["reports"][0]
    tokens = report["tokens"]
    cached = sum(tokens[f"cached_{kind}"] for kind in ("counted", "estimated", "unmarked"))
    failed = requests - report["requests"]["answered"] + (tokens["output"] != sum(load.answers()) * load.turns)
    return Measured(cpu, report["ttft"]["p50_ms"], tokens["prompt"] / requests, cached / requests, failed)


def measure(arguments, folder, servers, texts):
    """Returns for each load what was measured in each round, by the server's name."""
    found = {load: {server.name: [] for server in servers} for load in arguments.loads}
    for number in range(arguments.rounds):
        for load in arguments.loads:
            rows = load.rows(texts)
            (folder / "trace.json").write_text(json.dumps(rows) if load.turns > 1 else "\n".join(map(json.dumps, rows)))
            # Every second round has the reverse order.
            for server in servers[:: -1 if number % 2 else 1]:
                measured = run(arguments, folder, server, load)
                found[load][server.name].append(measured)
                progress(f"round {number + 1} of {arguments.rounds}: {load}: {server.name}: {measured}")
    return found


def row(report, load, found):
    """Returns a line of the table."""
    ours, theirs, engine = found.values()
    median = lambda of: statistics.median(of)
    ratios = [one.cpu_ms / other.cpu_ms for one, other in zip(ours, theirs, strict=True)]
    added = [median(one.ttft_ms - base.ttft_ms for one, base in zip(of, engine, strict=True)) for of in (ours, theirs)]
    goals = [report.judge(median(ratios) <= load.cpu_max, f"≤ {load.cpu_max}")]
    if load.turns > 1:
        goals.append(report.judge(added[0] < added[1], "TTFT"))
    if failed := sum(one.failed for of in (ours, theirs) for one in of):
        goals.append(report.judge(False, f"no failures, {failed} seen"))
    pair = lambda values: " / ".join(f"{value:,.2f}" for value in values)
    kind = f"{load.turns} turns" if load.turns > 1 else "distinct"
    cached = f"{ours[0].cached / ours[0].prompt:.0%} / {theirs[0].cached / theirs[0].prompt:.0%}"
    cpu = pair(median(one.cpu_ms for one in of) for of in (ours, theirs))
    cells = [f"{ours[0].prompt:,.0f}, {kind}", load.streams, load.answer, cached, cpu, shown(ratios, "{:.2f}"), pair(added), "; ".join(goals)]
    return f"| {' | '.join(map(str, cells))} |"


def document(arguments, folder, servers, texts):
    """Returns the text of docs/bench/front.md, and whether every goal is met."""
    load_note = "load average at the start {:.2f}, {:.2f}, {:.2f}".format(*os.getloadavg())
    report, found = Report(), measure(arguments, folder, servers, texts)
    rows = "\n".join(row(report, load, of) for load, of in found.items())
    commit = output("git", "describe", "--always", "--dirty", "--exclude=*")
    page = f"""# CPU and time to first token in front of vLLM servers

Measured by `bench/front.sh --rounds {arguments.rounds}` (`--write` writes this page); {load_note}.

- Tandem: `tandem up --engine vllm`, one process with a frontend, a router and a worker for each server. Its workers follow KV events.
- `vllm-router` 0.1.17 of PyPI with `--policy cache_aware`, its default: one process, which forwards text.
- Servers: two for each of them, fake ones (`bench/front`) with vLLM 0.32's formats. An answer's first token is
  sent at once, and one token every {STEP_MS} ms for all answers of a server. Blocks of 16 tokens, {KV_TOKENS:,} tokens of KV; what
  they store and drop is published as vLLM does it.
- The tokenizer and chat template of {pathlib.Path(arguments.model).name}. Client: `tandem bench replay` with streamed chats.
- Machine: {machine()}
- Versions: Tandem at {commit}, {output('rustc', '--version')}.

All processes run all the time and share the processors. Each of {arguments.rounds} rounds sends the same requests to one, to the other,
and to a server itself; every second round has the reverse order. Pairs of figures are Tandem / vllm-router, medians of the rounds; a ratio
is the median (least..most) of the rounds' ratios. *Answer*: tokens on average; lengths differ by up to a half. *CPU*: user and system time
of all threads of `tandem up` or `vllm-router`, idle work included, divided by requests. *TTFT added*: the difference of the median TTFT to
that of the server itself.

Tandem tokenizes, and sends token ids. A server tokenizes the text that vllm-router sends; the fake ones do not, so this time is in none of
the figures. Prompts take them no time, so a cached prefix matters less to a placement than with real servers. Goals apply to the ratio
of CPU, and for conversations also to TTFT, which must be below vllm-router's.

| prompt tokens | streams | answer | cached | CPU a request, ms | ratio | TTFT added, ms | goals |
|---|--:|--:|--:|--:|--:|--:|---|
{rows}
"""
    return page, report.all_met


def main():
    parser = argparse.ArgumentParser(prog="bench/front.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("tandem", "the binary"), ("model", "a .gguf file with SmolLM2's tokenizer"), ("engine", "the fake server")):
        parser.add_argument(f"--{name}", required=True, type=lambda path: str(pathlib.Path(path).resolve()), help=f"{what} (given by bench/front.sh)")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help="rounds of every load (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="send a fifth of the requests, to try the script")
    parser.add_argument("--write", action="store_true", help="write the result to docs/bench/front.md, not to the output")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.write and (arguments.quick or arguments.rounds < ROUNDS_MIN):
        parser.error(f"--write needs --rounds {ROUNDS_MIN} or more, and no --quick; without --write, --rounds must be 1 or more")
    smaller = lambda load: Load(**{**vars(load), "count": max(load.count // 5, load.streams)})
    arguments.loads = [smaller(load) if arguments.quick else load for load in LOADS]
    with tempfile.TemporaryDirectory() as path, contextlib.ExitStack() as running:
        folder = pathlib.Path(path)
        model_folder(arguments.model, folder / "model")
        config = folder / "model/config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
        tokenizer = json.loads((folder / "model/tokenizer.json").read_text())
        words = [(at, " " + token[1:]) for token, at in tokenizer["model"]["vocab"].items() if re.fullmatch("Ġ[a-z]{3,7}", token)][:500]
        servers = [kind(running, folder, arguments, json.dumps(words)) for kind in (Tandem, Router, Engine)]
        for server in servers:
            server.wait()
        page, all_met = document(arguments, folder, servers, Texts(tokenizer))
    finish(arguments, RESULT, page, all_met)


if __name__ == "__main__":
    main()
