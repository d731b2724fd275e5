"""Measures the time to first token and the memory of `tandem up`, and reports which goals are met. Run by `bench/cluster.sh`."""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
RESULT = HERE.parent / "docs/bench/cluster.md"
ROUNDS_MIN = 7
WARM_UPS = 1
PROMPT = 2_000
BLOCK = 16
CHUNK = 512
# A chunk budget above the prompt's length, so that no tokens are computed during the transfer.
ONE_CHUNK = 2_048
# Ids of ordinary words in the default model's vocabulary. Lower ids are single bytes and special tokens.
WORDS = range(1_000, 40_000)
WARM_MAX = 1 / 5
REMOTE_MAX = 1.10
READY_MAX_MIB = 450e6 / 2**20
FILLED_MAX_MIB = 1.5 * 1024
# While the caches are filled: the number of prompts that run at once, and the maximum number of prompts. Some prompts find full caches.
FILLERS = 4
FILLS_MAX = 60
# A load average above this value means that other work affects the figures.
QUIET_MAX = 0.5


@dataclass(frozen=True)
class Answer:
    ttft_ms: float
    cached_tokens: int
    details: dict


class Cluster:
    """`tandem up` with two prefill workers and a decode worker."""

    def __init__(self, arguments, prefill, chunk=CHUNK):
        command = [arguments.tandem, "up", "--model", arguments.model, "--listen", "127.0.0.1:0", "--log", "error"]
        command += ["--prefill", prefill, "--prefill-chunk-budget", str(chunk)]
        settings = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        self.remote = prefill == "remote"
        # The process has its own process group, so that Ctrl-C reaches only this script, which then ends the process.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings, process_group=0)
        introduction = ""
        while not (found := re.search(r"frontend +http://(\S+)", introduction)):
            line = self.process.stdout.readline()
            if not line:
                sys.exit(f"{' '.join(command)} ended early with status {self.process.wait()}; its error is above")
            introduction += line
        self.address = found[1]
        self.model = introduction.split(" is ready")[0]

    def complete(self, prompt, tokens=1):
        """Sends one streamed completion and measures the time to its first token."""
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"model": self.model, "prompt": prompt, "max_tokens": tokens, **options})
        headers = {"content-type": "application/json", "x-tandem-details": "true"}
        with contextlib.closing(http.client.HTTPConnection(self.address)) as connection:
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            first = response.readline()
            ttft_ms = (time.perf_counter() - began) * 1e3
            frames = [first, *response.read().splitlines()]
        if response.status != 200:
            sys.exit(f"{self.address} answered {response.status}: {frames}")
        frames = [json.loads(frame[len(b"data: ") :]) for frame in frames if frame.startswith(b"data: {")]
        usage = next(frame["usage"] for frame in frames if frame.get("usage"))
        details = next((frame["tandem"] for frame in frames if frame.get("tandem")), {})
        return Answer(ttft_ms, usage["prompt_tokens_details"]["cached_tokens"], details)

    def cold(self, prompt):
        """Returns the time to the first token of a prompt that is not cached, and checks where it was prefilled."""
        answer = self.complete(prompt)
        if answer.cached_tokens or bool(answer.details["prefill_worker"]) != self.remote:
            sys.exit(f"a prompt that should be computed was cached, or was prefilled on the wrong worker: {answer}")
        return answer.ttft_ms

    def warm(self, prompt):
        """Returns the time to the first token of a prompt that is cached."""
        answer = self.complete(prompt)
        if answer.cached_tokens < (len(prompt) - 1) // BLOCK * BLOCK:
            sys.exit(f"a prompt that should be cached was computed: {answer}")
        return answer.ttft_ms

    def blocks(self):
        """Returns the KV blocks of every worker, by state."""
        with contextlib.closing(http.client.HTTPConnection(self.address)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        workers = {}
        for worker, state, value in re.findall(r'^tandem_worker_kv_blocks\{worker="(.*?)",state="(.*?)"\} (\S+)$', text, re.M):
            workers.setdefault(worker, {})[state] = int(float(value))
        return workers

    def memory_mib(self, kind):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{kind}:\s+(\d+) kB$", status, re.M)[1]) / 1024

    def end(self):
        self.process.kill()
        self.process.wait()


def prompt(name, tokens=PROMPT):
    """Returns a prompt for this name. The first blocks of prompts with different names differ."""
    return random.Random(name).choices(WORDS, k=tokens)


def measure(clusters, rounds):
    """Returns the times to first token in milliseconds by the cluster's name, one per round. Every second round has the reverse order."""
    times = {}
    for number in range(-WARM_UPS, rounds):
        words = prompt(f"round {number}")
        for name, cluster in list(clusters.items())[:: -1 if number % 2 else 1]:
            found = {name: cluster.cold(words)}
            if name == "remote":
                # The router receives the events of the prompt's new blocks shortly after the answer.
                time.sleep(0.1)
                found["warm"] = cluster.warm(words)
            if number >= 0:
                for key, value in found.items():
                    times.setdefault(key, []).append(value)
        if number < 0:
            continue
        progress(f"round {number + 1} of {rounds}: " + ", ".join(f"{key} {value[-1]:.0f} ms" for key, value in times.items()))
    return times


def fill(cluster):
    """Sends prompts until every block of every worker is in use or cached. Prompts and answers fill their blocks completely."""
    words = (prompt(f"fill {number}", PROMPT + 1) for number in range(FILLS_MAX))
    with concurrent.futures.ThreadPoolExecutor(FILLERS) as pool:
        while any(blocks["free"] for blocks in cluster.blocks().values()):
            batch = [next(words, None) for _ in range(FILLERS)]
            if None in batch:
                sys.exit(f"the caches are not full after {FILLS_MAX} prompts: {cluster.blocks()}")
            list(pool.map(lambda words: cluster.complete(words, BLOCK), batch))
            # Workers report their blocks at least once a second.
            time.sleep(1)
    return cluster.blocks()


def ratios(these, those):
    return [this / that for this, that in zip(these, those, strict=True)]


def shown(values, pattern):
    """Formats the median and the range of values."""
    low, middle, high = (pattern.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"**{middle}** ({low}..{high})"


class Report:
    def __init__(self):
        self.all_met = True

    def judge(self, values, goal, pattern):
        """Returns three cells of a table row: the values, the goal, and whether the goal is met."""
        met = statistics.median(values) <= goal
        self.all_met &= met
        return f"{shown(values, pattern)} | ≤ {pattern.format(goal)} | {'met' if met else '**not met**'}"


def first_tokens_table(times, report):
    lines = [
        "| a prompt of 2,000 tokens | TTFT, ms | compared with | TTFT, ms | ratio | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, key, than, other, goal in (
        ("the same again", "warm", "cold, remote", "remote", WARM_MAX),
        ("cold, remote, overlapped", "remote", "cold, local", "local", REMOTE_MAX),
        ("cold, remote, not overlapped", "remote, one chunk", "cold, local, one chunk", "local, one chunk", None),
    ):
        ratio = ratios(times[key], times[other])
        cells = report.judge(ratio, goal, "{:.2f}") if goal else f"{shown(ratio, '{:.2f}')} | |"
        lines.append(f"| {name} | {shown(times[key], '{:.0f}')} | {than} | {shown(times[other], '{:.0f}')} | {cells} |")
    return "\n".join(lines)


def memory_table(ready, filled, report):
    lines = ["| memory of the process, MiB | now (VmRSS) | most (VmHWM) | goal, now | |", "|---|---|---|---|---|"]
    for name, (now, most), goal in (("ready", ready, READY_MAX_MIB), ("every cache full", filled, FILLED_MAX_MIB)):
        met = now <= goal
        report.all_met &= met
        lines.append(f"| {name} | **{now:.0f}** | {most:.0f} | ≤ {goal:.0f} | {'met' if met else '**not met**'} |")
    return "\n".join(lines)


def progress(line):
    print(line, file=sys.stderr, flush=True)


def machine():
    lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    name, family, model = (re.search(rf"^{key}\s*: (.*)$", lines, re.M)[1] for key in ("model name", "cpu family", "model"))
    return f"{name} (family {family}, model {model}), {len(os.sched_getaffinity(0))} processors. Linux {platform.release()}."


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE).stdout.strip()


def finish(arguments, result, page, all_met):
    """Writes the page to its file, or prints it. Ends the program, with 1 if a goal is not met."""
    if arguments.write:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(page)
        progress(f"written to {result.relative_to(HERE.parent)}")
    else:
        print(page)
    sys.exit(0 if all_met else 1)


def document(arguments, start):
    """Returns the text of docs/bench/cluster.md, and whether every goal is met. `start` starts a cluster."""
    load_note = "nothing else running" if os.getloadavg()[0] <= QUIET_MAX else "**with other work on the machine, as the ranges show**"
    load = "load average at the start {:.2f}, {:.2f}, {:.2f}".format(*os.getloadavg())
    progress(load)
    remote = start("remote")
    memory = lambda: (remote.memory_mib("VmRSS"), remote.memory_mib("VmHWM"))
    ready = memory()
    clusters = {
        "remote": remote,
        "local": start("local"),
        "remote, one chunk": start("remote", ONE_CHUNK),
        "local, one chunk": start("local", ONE_CHUNK),
    }
    times = measure(clusters, arguments.rounds)
    blocks = fill(remote)
    filled = memory()
    report = Report()
    commit = output("git", "describe", "--always", "--dirty", "--exclude=*")
    command = "bench/cluster.sh" + (f" --rounds {arguments.rounds}" if arguments.rounds != ROUNDS_MIN else "")
    held = "; ".join(f"{worker} {of['cached']} cached, {of['in_use']} in use, {of['free']} free" for worker, of in blocks.items())
    page = f"""# Time to first token and memory of a cluster

Measured by `{command}` (`--write` writes this page), {load_note}; {load}.

- Model: {pathlib.Path(arguments.model).name}; `tandem up` with two prefill workers, a decode worker and its defaults otherwise.
- Machine: {machine()}
- Versions: Tandem at {commit}, {output('rustc', '--version')}.

All clusters run all the time. In each of {arguments.rounds} rounds, all clusters receive the same new prompt, one after the other; every second round has the reverse
order. TTFT is measured by the client. Figures are medians and, in brackets, the least and the most; a ratio is the median of the rounds'
ratios. *Remote*: with `--prefill remote`, a prefill worker computes the prompt and sends its KV to the decode worker. *Local*: with
`--prefill local`, the decode worker computes the prompt. *Not overlapped*: with `--prefill-chunk-budget {ONE_CHUNK}`, the prompt is one chunk,
and its KV is sent when all of it is computed; the comparison is with a local prefill of one chunk.

{first_tokens_table(times, report)}

Memory is that of the first cluster when it was ready, and after distinct prompts had filled each worker's KV memory of 16,384 tokens
(360 MiB). Its blocks were then: {held}.

{memory_table(ready, filled, report)}
"""
    return page, report.all_met


def main():
    parser = argparse.ArgumentParser(prog="bench/cluster.sh", description=__doc__)
    parser.add_argument("--tandem", required=True, help="the binary (given by bench/cluster.sh)")
    parser.add_argument("--model", required=True, help="a .gguf file (given by bench/cluster.sh: TANDEM_MODEL or the default model)")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help="rounds of every measurement (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write the result to docs/bench/cluster.md, not to the output")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.write and arguments.rounds < ROUNDS_MIN:
        parser.error(f"--write needs --rounds {ROUNDS_MIN} or more; without --write, --rounds must be 1 or more")
    with contextlib.ExitStack() as running:

        def start(*settings):
            cluster = Cluster(arguments, *settings)
            running.callback(cluster.end)
            return cluster

        page, all_met = document(arguments, start)
    finish(arguments, RESULT, page, all_met)


if __name__ == "__main__":
    main()
