"""Compares the speed of our CPU back end with that of llama.cpp and reports which goals are met. `bench/cpu.sh` starts this script."""

import argparse
import contextlib
import os
import pathlib
import platform
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from cluster import finish, progress

HERE = pathlib.Path(__file__).resolve().parent
RESULT = HERE.parent / "docs/bench/cpu.md"
ROUNDS_MIN = 7
WARM_UPS = 2
THREADS = (1, 2)
KEPT_MIN = 0.4
# The pause before each round, in seconds. It is needed because llama.cpp's threads continue to spin for a while after their work.
PAUSE_S = 0.05
# The time limit of a round, in seconds. On busy processors llama.cpp may need a minute.
ANSWER_MAX_S = 300
OTHERS_MAX = 0.1
TICKS = os.sysconf("SC_CLK_TCK")
INSTRUCTIONS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
# A program that keeps one processor busy until its parent process ends.
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"


@dataclass(frozen=True)
class Workload:
    line: str
    name: str
    tokens: int
    goal: float
    avx2_goal: float | None = None
    also_busy: bool = False
    sequences: int = 1

    def goal_of(self, isa):
        return self.avx2_goal if self.avx2_goal and isa == "avx2" else self.goal


WORKLOADS = (
    Workload("prefill 512", "prefill of 512", 512, 2.0, avx2_goal=1.2, also_busy=True),
    Workload("prefill 2048", "prefill of 2,048, chunks of 512", 2048, 2.0, avx2_goal=1.2),
    Workload("decode 2048 1", "decode of 32 after 2,048", 32, 1.0),
    Workload("decode 512 1", "decode of 32 after 512", 32, 1.0, also_busy=True),
    Workload("decode 512 8", "decode of 32 after 512, 8 sequences", 8 * 32, 2.0, sequences=8),
)


class Side:
    """A process that computes one round of a workload for each line of its input."""

    def __init__(self, name, command):
        self.name = name
        # The process has its own process group, so that Ctrl-C reaches only this script, which then ends the process.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, process_group=0
        )
        self.greeting = self.answer()

    def answer(self):
        if not select.select([self.process.stdout], [], [], ANSWER_MAX_S)[0]:
            sys.exit(f"{self.name} took more than {ANSWER_MAX_S} s for a round: stop other work on this machine")
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended early with status {self.process.wait()}; its error is above")
        return line.strip()

    def seconds(self, workload):
        time.sleep(PAUSE_S)
        self.process.stdin.write(workload.line + "\n")
        return float(self.answer())

    def processor_s(self):
        words = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS

    def end(self):
        self.process.kill()
        self.process.wait()


class Sides:
    """All measured processes. Each is started at its first use."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.running = {}
        self.references = {}

    def side(self, name, *command):
        if command not in self.running:
            self.running[command] = Side(name, command)
        return self.running[command]

    def ours(self, threads, *isa):
        return self.side("our engine", self.arguments.ours, "--stdin", "--threads", str(threads), *isa, self.arguments.model)

    def reference(self, workload, threads):
        """Returns the process that runs llama.cpp with its fastest settings for the workload."""
        key = (workload, threads)
        if key not in self.references:
            script = [sys.executable, str(HERE / "cpu_reference.py"), "--threads", str(threads), self.arguments.model]
            settings = [[], ["--flash"]]
            if workload.sequences > 1:
                settings += [[*setting, "--unified"] for setting in settings]
            candidates = [self.side(" ".join(["llama.cpp", *setting]), *script, *setting) for setting in settings]
            self.references[key] = min(candidates, key=lambda side: min(warm_up(side, workload)))
        return self.references[key]

    def end(self):
        for side in self.running.values():
            side.end()


class OtherWork:
    """Measures the fraction of the processors' time that other processes use after this object was created."""

    def __init__(self, sides):
        self.sides = sides
        self.start = self.seconds()

    def seconds(self):
        user, nice, system, idle, wait, *rest = map(int, pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        busy = (user + nice + system + sum(rest)) / TICKS
        measured = time.process_time() + sum(side.processor_s() for side in self.sides.running.values())
        return busy - measured, busy + (idle + wait) / TICKS

    def share(self):
        (others, everything), (others_before, everything_before) = self.seconds(), self.start
        return max(0.0, (others - others_before) / (everything - everything_before))


def warm_up(side, workload):
    return [side.seconds(workload) for _ in range(WARM_UPS)]


@contextlib.contextmanager
def busy_loops():
    """Runs one busy loop for each processor that this script may use."""
    loops = []
    try:
        for _ in os.sched_getaffinity(0):
            loops.append(subprocess.Popen([sys.executable, "-c", BUSY_LOOP], process_group=0))
        # Wait until all busy loops have started.
        time.sleep(0.3)
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def alternate(sides, workload, rounds, conditions=(contextlib.nullcontext,)):
    """Returns a list of tokens per second, one per round, for each side under each condition: [condition][side][round].

    In every round each side runs once under each condition. Every second round has the reverse order."""
    rates = [[[] for _ in sides] for _ in conditions]
    for number in range(rounds):
        step = -1 if number % 2 else 1
        for condition, of_condition in list(zip(conditions, rates))[::step]:
            with condition():
                for side, of_side in list(zip(sides, of_condition))[::step]:
                    of_side.append(workload.tokens / side.seconds(workload))
    return rates


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
        met = statistics.median(values) >= goal
        self.all_met &= met
        return f"{shown(values, pattern)} | ≥ {pattern.format(goal)} | {'met' if met else '**not met**'}"


def quiet_table(sides, report, rounds):
    lines = [
        "| workload | threads | Tandem, tok/s | llama.cpp, tok/s | its settings | Tandem ÷ llama.cpp | goal | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in WORKLOADS:
        for threads in THREADS:
            reference = sides.reference(workload, threads)
            ours = [sides.ours(threads)]
            if workload.avx2_goal and ours[0].greeting == "avx512":
                ours.append(sides.ours(threads, "--isa", "avx2"))
            for side in ours:
                warm_up(side, workload)
            [[theirs, *rates]] = alternate([reference, *ours], workload, rounds)
            for side, rate in zip(ours, rates, strict=True):
                lines.append(
                    f"| {workload.name}, {side.greeting} | {threads} | {shown(rate, '{:.0f}')} | {shown(theirs, '{:.0f}')} "
                    f"| {reference.name.removeprefix('llama.cpp').strip() or '–'} "
                    f"| {report.judge(ratios(rate, theirs), workload.goal_of(side.greeting), '{:.2f}')} |"
                )
                progress(lines[-1])
    return "\n".join(lines)


def busy_table(sides, report, rounds):
    lines = [
        "| workload | threads | | quiet, tok/s | busy, tok/s | busy ÷ quiet | goal | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in (workload for workload in WORKLOADS if workload.also_busy):
        for threads in THREADS:
            pair = [sides.ours(threads), sides.reference(workload, threads)]
            for side in pair:
                warm_up(side, workload)
            quiet, busy = alternate(pair, workload, rounds, (contextlib.nullcontext, busy_loops))
            for name, before, loaded in zip(("ours", "llama.cpp"), quiet, busy, strict=True):
                kept = ratios(loaded, before)
                judge = report.judge(kept, KEPT_MIN, "{:.0%}") if name == "ours" else f"{shown(kept, '{:.0%}')} | |"
                lines.append(
                    f"| {workload.name} | {threads} | {name} | {shown(before, '{:.0f}')} | {shown(loaded, '{:.1f}')} | {judge} |"
                )
                progress(lines[-1])
    return "\n".join(lines)


def processor_lines():
    return pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]


def processor_flags():
    return re.search(r"^flags\s*: (.*)$", processor_lines(), re.M)[1].split()


def machine():
    name, family, model = (
        re.search(rf"^{key}\s*: (.*)$", processor_lines(), re.M)[1] for key in ("model name", "cpu family", "model")
    )
    processors = len(os.sched_getaffinity(0))
    flags = processor_flags()
    sets = ", ".join(flag for flag in INSTRUCTIONS if flag in flags)
    return f"{name} (family {family}, model {model}), {processors} processors; {sets}. Linux {platform.release()}."


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE).stdout.strip()


def versions(sides):
    import llama_cpp

    commit = output("git", "describe", "--always", "--dirty", "--exclude=*")
    built = sides.reference(WORKLOADS[0], THREADS[0]).greeting
    return f"Tandem at {commit}, {output('rustc', '--version')}; llama-cpp-python {llama_cpp.__version__}, {built}."


def document(arguments, sides):
    """Returns the text of docs/bench/cpu.md, and whether every goal is met."""
    load = "load average {:.2f}, {:.2f}, {:.2f}".format(*os.getloadavg())
    others = OtherWork(sides)
    time.sleep(2)
    progress(f"{load}; other work takes {others.share():.0%} of the processors")
    if arguments.write and others.share() > OTHERS_MAX:
        sys.exit(f"a stored result needs a quiet machine: stop other work that uses more than {OTHERS_MAX:.0%} of the processors")
    report = Report()
    others = OtherWork(sides)
    quiet = quiet_table(sides, report, arguments.rounds)
    others_share = others.share()
    progress(f"other work took {others_share:.1%} of the processors")
    busy = busy_table(sides, report, arguments.rounds)
    command = "bench/cpu.sh" + (f" --rounds {arguments.rounds}" if arguments.rounds != ROUNDS_MIN else "")
    page = f"""# The CPU back end against llama.cpp

Measured by `{command}` (`--write` writes this page), nothing else running: {load} at the start, and
all other work took {others_share:.1%} of the processors until the second table.

- Model: {pathlib.Path(arguments.model).name}. The same tokens for both, keys and values in half precision, chunks of 512.
- Machine: {machine()}
- Versions: {versions(sides)}

Both sides are long-lived processes. In each of {arguments.rounds} rounds Tandem computes first, then llama.cpp; every second round has the reverse order. Figures are
medians and, in brackets, the least and the most; a ratio is the median of the rounds' ratios. A prefill computes logits for the last token,
decoding for every token. llama.cpp runs with its fastest settings for the workload (with or without flash attention; for several
sequences, with one KV buffer or with one for each).

{quiet}

## On a busy machine

Quiet rounds alternate with busy ones, in which each processor also runs a busy loop. With {len(os.sched_getaffinity(0))} processors and as many busy loops, a fair
scheduler would leave one thread two thirds of its quiet speed, and two threads a half.

{busy}
"""
    return page, report.all_met


def main():
    parser = argparse.ArgumentParser(prog="bench/cpu.sh", description=__doc__)
    parser.add_argument("--ours", required=True, help="the compiled crates/devices/benches/cpu.rs (given by bench/cpu.sh)")
    parser.add_argument("--model", required=True, help="a .gguf file (given by bench/cpu.sh: TANDEM_MODEL or the default model)")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help="rounds of every workload (default: %(default)s)")
    parser.add_argument("--only", choices=("quiet", "busy"), help="print this table only")
    parser.add_argument("--write", action="store_true", help="write the result to docs/bench/cpu.md, not to the output")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.write and arguments.rounds < ROUNDS_MIN:
        parser.error(f"--write needs --rounds {ROUNDS_MIN} or more; without --write, --rounds must be 1 or more")
    if arguments.only and arguments.write:
        parser.error("the written page has both tables: --write cannot be combined with --only")
    if len(os.sched_getaffinity(0)) < max(THREADS):
        parser.error(f"this benchmark needs {max(THREADS)} processors")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    sides = Sides(arguments)
    try:
        if arguments.only:
            report = Report()
            page = {"quiet": quiet_table, "busy": busy_table}[arguments.only](sides, report, arguments.rounds)
            all_met = report.all_met
        else:
            page, all_met = document(arguments, sides)
    finally:
        sides.end()
    finish(arguments, RESULT, page, all_met)


if __name__ == "__main__":
    main()
