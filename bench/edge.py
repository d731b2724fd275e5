"""Compares what a frontend and a router of Tandem and of Dynamo spend on requests, and reports which goals are met. Run by `bench/edge.sh`.

Both clusters have four workers that compute nothing, and run all the time. The same load is sent to both in turns, by one client, which acknowledges
packets at once: a delayed acknowledgement of a socket without TCP_NODELAY would measure the client's kernel. Workers and client use the same processors as the
measured processes. So requests/s are those of the whole machine, and CPU times are those of frontend and router only.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass

import gguf
from cluster import HERE, finish, machine, output, progress

RESULT = HERE.parent / "docs/bench/edge.md"
ROUNDS_MIN = 5
SOAK = 50_000
WORKERS = 4
KV_TOKENS = 262_144
ANSWER = 16
SEQUENCES_MAX = 2_048
# The longest time without a byte of any answer.
SILENCE_MAX_S = 60
START_MAX_S = 120
# The end of an answer that is sent in chunks, and the usage of a complete one.
END = b"0\r\n\r\n"
USAGE = re.compile(rb'"usage":{"prompt_tokens":(\d+),"completion_tokens":(\d+).*?"cached_tokens":(\d+).*data: \[DONE\]', re.S)
# The lengths of texts, in sentences: about 510 tokens, 6,000 tokens and 60 tokens.
PROMPT, LONG, SHORT = 25, 320, 2
TURNS = 100
# The goals: the most CPU and memory relative to Dynamo's, the fewest requests/s, and the longest time of a plain client.
CPU_MAX, REPEATED_MAX, RATE_MIN, MEMORY_MAX, PLAIN_MAX_MS = 0.45, 0.8, 1.5, 1 / 3, 2.0
# Memory is flat if it grows by no more than this factor in the second half of the requests.
FLAT_MAX = 1.05


def model_folder(file, folder):
    """Writes the tokenizer, the chat template and the configuration of a GGUF file in the format that Dynamo reads."""
    fields = gguf.GGUFReader(file).fields
    value = lambda key: fields[key].contents()
    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    if (value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        sys.exit(f"{file} has another tokenizer than SmolLM2, which this benchmark does not convert")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    control = gguf.TokenType.CONTROL
    added = [{"id": at, "content": tokens[at], **flags, "special": True} for at, kind in enumerate(types) if kind == control]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe = {"type": "BPE", "vocab": {token: at for at, token in enumerate(tokens)}, "merges": value("tokenizer.ggml.merges")}
    pre = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    context, eos = value("llama.context_length"), value("tokenizer.ggml.eos_token_id")
    files = {
        "tokenizer.json": {"version": "1.0", "added_tokens": added, "pre_tokenizer": pre, "decoder": byte_level, "model": bpe},
        "tokenizer_config.json": {
            "chat_template": value("tokenizer.chat_template"),
            "eos_token": tokens[eos],
            "model_max_length": context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "eos_token_id": eos,
            "hidden_size": value("llama.embedding_length"),
            "max_position_embeddings": context,
            "model_type": "llama",
            "num_attention_heads": value("llama.attention.head_count"),
            "num_hidden_layers": value("llama.block_count"),
            "num_key_value_heads": value("llama.attention.head_count_kv"),
            "vocab_size": len(tokens),
        },
        "generation_config.json": {"eos_token_id": eos},
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


class Server:
    """The processes of one cluster. `edge` are those that are measured: the frontend and, if it is a process of its own, the router."""

    def __init__(self, running, folder, environment):
        self.running, self.folder, self.environment, self.processes = running, folder, environment, {}
        self.port = free_port()

    def start(self, name, *command):
        log = open(self.folder / f"{self.name}-{name}.log", "w")
        # The process has its own process group, so that Ctrl-C reaches only this script, which then ends the process.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=self.folder, process_group=0)
        self.running.callback(lambda: (process.kill(), process.wait()))
        self.processes[name] = process

    def wait(self):
        """Waits until the cluster answers a chat."""
        until = time.monotonic() + START_MAX_S
        while not self.is_ready():
            if time.monotonic() > until or any(process.poll() is not None for process in self.processes.values()):
                logs = "".join(log.read_text()[-2_000:] for log in self.folder.glob(f"{self.name}-*.log"))
                sys.exit(f"{self.name} does not answer:\n{logs}")
            time.sleep(0.2)

    def is_ready(self):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            try:
                connection.request("POST", "/v1/chat/completions", body("Hello"), {"content-type": "application/json"})
                return b"[DONE]" in connection.getresponse().read()
            except OSError:
                return False

    def measured(self):
        return [self.processes[name].pid for name in self.edge]

    def cpu_ms(self):
        stats = (pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in self.measured())
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) * 1e3 / os.sysconf("SC_CLK_TCK")

    def memory_mib(self):
        statuses = (pathlib.Path(f"/proc/{pid}/status").read_text() for pid in self.measured())
        return sum(int(re.search(r"^VmRSS:\s+(\d+) kB$", status, re.M)[1]) for status in statuses) / 1024


class Tandem(Server):
    name, edge = "Tandem", ("frontend", "router")

    def __init__(self, running, folder, arguments):
        super().__init__(running, folder, {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")})
        tandem, ports = str(pathlib.Path(arguments.tandem).resolve()), [free_port() for _ in range(2 + 2 * WORKERS)]
        at = lambda port: f"127.0.0.1:{port}"
        model = ["--engine", "sim", "--model", arguments.model, "--served-model-name", "M", "--max-concurrent-requests", str(SEQUENCES_MAX), "--log", "warn"]
        workers = ",".join(at(port) for port in ports[2::2])
        listen = lambda first: ["--listen", at(ports[first]), "--admin-listen", at(ports[first + 1])]
        self.start("router", tandem, "router", *listen(0), "--prefill", "local", "--workers", workers, "--log", "warn")
        for number in range(WORKERS):
            engine = ["--sim-speedup", "1e12", "--kv-capacity-tokens", str(KV_TOKENS)]
            self.start(f"worker-{number}", tandem, "decode-worker", *listen(2 + 2 * number), *model, *engine)
        limits = ["--max-sequences-per-account", str(SEQUENCES_MAX)]
        frontend = [*model, *limits, "--listen", at(self.port), "--router", at(ports[0])]
        self.start("frontend", tandem, "frontend", *frontend)


class Dynamo(Server):
    name, edge = "Dynamo", ("frontend",)

    def __init__(self, running, folder, arguments):
        model_folder(arguments.model, folder / "model")
        super().__init__(running, folder, {**os.environ, "DYN_FILE_KV": str(folder / "kv"), "DYN_LOG": "warn"})
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        python = [sys.executable, "-m"]
        self.start("frontend", *python, "dynamo.frontend", "--http-port", str(self.port), "--router-mode", "kv", *planes)
        blocks = ["--block-size", "16", "--num-gpu-blocks-override", str(KV_TOKENS // 16), "--num-workers", str(WORKERS)]
        engine = ["--model-path", "model", "--model-name", "M", "--speedup-ratio", "1e12", *blocks]
        self.start("mocker", *python, "dynamo.mocker", *engine, *planes)


def free_port():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def body(*texts):
    """Returns a chat whose messages have these texts, the first and every second one of the user."""
    messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
    return json.dumps({"model": "M", "messages": messages, "max_tokens": ANSWER, **options}).encode()


class Connection:
    """A client's connection, on which one request after the other is sent. The clients of one load may share the queue of requests."""

    def __init__(self, port, queue, quick_ack, poll, connections):
        self.port, self.queue, self.quick_ack, self.poll, self.connections = port, queue, quick_ack, poll, connections
        self.connect()

    def connect(self):
        self.socket = socket.create_connection(("127.0.0.1", self.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections[self.socket.fileno()] = self
        self.poll.register(self.socket, select.EPOLLIN)

    def send(self):
        """Sends the next request. Returns whether there was one."""
        if not self.queue:
            return False
        content = self.queue.popleft()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.parts, self.sent = [], time.perf_counter()
        self.socket.sendall(head.encode() + content)
        return True

    def receive(self):
        """Reads what has arrived. Returns the answer once it has ended; an answer that is refused or cut off ends with its connection."""
        data = self.socket.recv(1 << 16)
        if self.quick_ack:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self.parts.append(data)
        if data and self.parts[0].startswith(b"HTTP/1.1 200"):
            tail = data if len(data) >= len(END) else b"".join(self.parts[-len(END) :])
            return b"".join(self.parts) if tail.endswith(END) else None
        self.socket.close()
        self.connect()
        return b""


@dataclass(frozen=True)
class Load:
    """Requests of `clients` clients, each of which waits for an answer before it sends its next request. Client i sends sequence i; if there are fewer sequences,
    clients share them."""

    name: str
    clients: int
    sequences: list
    cpu_max: float | None = None
    rate_min: float | None = None
    quick_ack: bool = True


@dataclass(frozen=True)
class Measured:
    """What one load cost one cluster. Times are those of one request."""

    cpu_ms: float
    per_second: float
    latency_ms: float
    client_ms: float
    errors: int
    prompt_tokens: float
    cached_tokens: float


def run(server, load):
    """Sends a load to a cluster."""
    queues = [deque(sequence) for sequence in load.sequences]
    poll, connections, latencies, usages = select.epoll(), {}, [], []
    clients = [
        Connection(server.port, queues[at % len(queues)], load.quick_ack, poll, connections) for at in range(load.clients)
    ]
    requests = sum(map(len, queues))
    cpu, client, began = server.cpu_ms(), time.process_time(), time.perf_counter()
    busy = sum(client.send() for client in clients)
    while busy:
        ready = poll.poll(SILENCE_MAX_S)
        if not ready:
            sys.exit(f"{server.name} has sent nothing for {SILENCE_MAX_S} s; {busy} requests are unanswered")
        for descriptor, _ in ready:
            connection = connections[descriptor]
            answer = connection.receive()
            if answer is None:
                continue
            usage = USAGE.search(answer)
            if usage and int(usage[2]) == ANSWER:
                latencies.append(time.perf_counter() - connection.sent)
                usages.append((int(usage[1]), int(usage[3])))
            busy -= not connection.send()
    seconds, client, cpu = time.perf_counter() - began, time.process_time() - client, server.cpu_ms() - cpu
    for connection in clients:
        connection.socket.close()
    if not usages:
        sys.exit(f"{server.name} has answered no request")
    prompt, cached = (statistics.mean(counts) for counts in zip(*usages, strict=True))
    latency_ms, errors = statistics.median(latencies) * 1e3, requests - len(usages)
    return Measured(cpu / requests, requests / seconds, latency_ms, client * 1e3 / requests, errors, prompt, cached)


class Texts:
    """Makes texts of sentences. A sentence occurs in many texts, and no two texts have the same beginning."""

    def __init__(self, tokenizer):
        words = [token[1:] for token in tokenizer["model"]["vocab"] if re.fullmatch("Ġ[a-z]{3,9}", token)]
        draw = random.Random("words")
        # As in prose, some words are frequent, and about one in ten is not one token.
        frequent = draw.sample(words, 400)
        word = lambda: draw.choice(frequent if draw.random() < 0.6 else words) + (draw.choice(words) if draw.random() < 0.1 else "")
        sentence = lambda: " ".join([word().capitalize(), *(word() for _ in range(draw.randint(8, 18)))]) + draw.choice([".", ".", "?", ",\n"])
        self.sentences = [sentence() for _ in range(4_000)]
        self.count = 0

    def text(self, sentences):
        self.count += 1
        draw = random.Random(self.count)
        return " ".join([f"{draw.randrange(10**6):x}", *draw.choices(self.sentences, k=sentences)])


class Loads:
    """Makes the loads of a round. Loads that repeat text have the same texts in every round; all other texts are sent to each cluster once."""

    def __init__(self, texts):
        self.texts = texts
        self.long, self.short = body(texts.text(LONG)), [body(texts.text(SHORT)) for _ in range(8)]

    def distinct(self, requests):
        return [[body(self.texts.text(PROMPT)) for _ in range(requests)]]

    def conversation(self):
        messages = [self.texts.text(1) for _ in range(2 * TURNS)]
        return [body(*messages[: 2 * turn + 1]) for turn in range(TURNS)]

    def round(self):
        yield Load("distinct prompts", 1, self.distinct(300))
        yield Load("distinct prompts", 16, self.distinct(1_500), CPU_MAX, RATE_MIN)
        yield Load("distinct prompts", 64, self.distinct(1_500), CPU_MAX)
        yield Load("distinct prompts", 256, self.distinct(1_500), CPU_MAX)
        yield Load("the same long prompt", 16, [[self.long] * 400], REPEATED_MAX)
        yield Load(f"conversations of {TURNS} turns", 4, [self.conversation() for _ in range(4)], REPEATED_MAX)
        yield Load("8 short prompts, repeated", 16, [self.short * 200])
        yield Load("distinct prompts, 1,000 streams", 1_000, self.distinct(2_000))
        yield Load("distinct prompts, plain client", 1, self.distinct(200), quick_ack=False)


def measure(servers, loads, rounds):
    """Returns for each load what it has cost each server in each round."""
    found = {}
    for number in range(rounds):
        for load in loads.round():
            # Every second round has the reverse order.
            for server in servers[:: -1 if number % 2 else 1]:
                measured = run(server, load)
                found.setdefault((load.name, load.clients), (load, {}))[1].setdefault(server.name, []).append(measured)
                progress(f"round {number + 1} of {rounds}: {load.name}, {load.clients} clients, {server.name}: {measured}")
    return found


def shown(values, pattern):
    """Formats the median and the range of values."""
    low, middle, high = (pattern.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"**{middle}** ({low}..{high})"


class Report:
    def __init__(self):
        self.all_met = True

    def judge(self, met, goal):
        self.all_met &= met
        return f"{goal}: {'met' if met else '**not met**'}"

    def row(self, load, ours, theirs):
        """Returns a line of the table of loads."""
        median = lambda name: " / ".join(f"{statistics.median(getattr(one, name) for one in of):,.2f}" for of in (ours, theirs))
        ratios = lambda name: [getattr(one, name) / getattr(other, name) for one, other in zip(ours, theirs, strict=True)]
        cpu, rate, goals = ratios("cpu_ms"), ratios("per_second"), []
        if load.cpu_max:
            goals.append(self.judge(statistics.median(cpu) <= load.cpu_max, f"CPU ≤ {load.cpu_max} times Dynamo's"))
        if load.rate_min:
            goals.append(self.judge(statistics.median(rate) >= load.rate_min, f"requests/s ≥ {load.rate_min} times Dynamo's"))
        if not load.quick_ack:
            added = statistics.median(one.latency_ms for one in ours)
            goals.append(self.judge(added <= PLAIN_MAX_MS, f"answer ≤ {PLAIN_MAX_MS} ms"))
        errors = [sum(one.errors for one in of) for of in (ours, theirs)]
        goals.append(self.judge(errors[0] == 0, "no errors"))
        tokens = f"{ours[0].prompt_tokens:,.0f}, {ours[0].cached_tokens:,.0f} / {theirs[0].cached_tokens:,.0f}"
        figures = [median("cpu_ms"), shown(cpu, "{:.2f}"), median("per_second"), shown(rate, "{:.2f}"), median("latency_ms")]
        cells = [load.name, f"{load.clients:,}", tokens, *figures, f"{errors[0]} / {errors[1]}", "; ".join(goals)]
        return f"| {' | '.join(cells)} |"

    def memory(self, samples):
        """Returns a line of the table of memory. `samples` has the memory before the load and at equal intervals, by server."""
        ours, theirs = samples.values()
        ratio, growth = ours[-1] / theirs[-1], ours[-1] / ours[len(ours) // 2]
        goals = [self.judge(ratio <= MEMORY_MAX, "≤ 1/3"), self.judge(growth <= FLAT_MAX, f"second half ≤ {FLAT_MAX}")]
        series = (", ".join(f"{mib:.0f}" for mib in of) for of in (ours, theirs))
        return f"| {' | '.join([*series, f'**{ratio:.2f}**', f'{growth:.2f}', '; '.join(goals)])} |"


def soak(servers, texts, requests):
    """Returns the memory of each server, in MiB, before this many requests and after each tenth of them."""
    found = {server.name: [server.memory_mib()] for server in servers}
    for part in range(10):
        load = Load("distinct prompts", 64, [[body(texts.text(PROMPT)) for _ in range(requests // 10)]])
        for server in servers:
            measured = run(server, load)
            found[server.name].append(server.memory_mib())
            progress(f"part {part + 1} of 10: {server.name}: {found[server.name][-1]:.0f} MiB, {measured}")
    return found


def document(arguments, servers, texts):
    """Returns the text of docs/bench/edge.md, and whether every goal is met."""
    load_note = "load average at the start {:.2f}, {:.2f}, {:.2f}".format(*os.getloadavg())
    report, parts = Report(), []
    found = measure(servers, Loads(texts), arguments.rounds)
    if found:
        client = statistics.median(one.client_ms for _, of in found.values() for each in of.values() for one in each)
        rows = [report.row(load, *of.values()) for load, of in found.values()]
        parts.append(f"""The client took {client:.2f} ms of CPU for each request (median).

| load | clients | prompt tokens, cached | CPU a request, ms | ratio | requests/s | ratio | whole answer, ms | errors | goals |
|---|--:|--:|--:|--:|--:|--:|--:|--:|---|
""" + "\n".join(rows))
    if arguments.requests:
        samples = soak(servers, texts, arguments.requests)
        parts.append(f"""Memory of frontend and router (VmRSS, MiB), before {arguments.requests:,} distinct prompts of 64 clients and after each tenth of them:

| Tandem | Dynamo | ratio, at the end | Tandem: end / half | goals |
|---|---|--:|--:|---|
{report.memory(samples)}""")
    command = f"bench/edge.sh --rounds {arguments.rounds} --requests {arguments.requests}"
    commit = output("git", "describe", "--always", "--dirty", "--exclude=*")
    page = f"""# CPU of the edge, compared with Dynamo

Measured by `{command}` (`--write` writes this page); {load_note}.

- Tandem: a frontend, a router and {WORKERS} decode workers, which also prefill; each is a process. The workers compute nothing (`--engine sim --sim-speedup 1e12`).
- Dynamo 1.6.1: a frontend (`--router-mode kv`) and a mocker with {WORKERS} workers (`--speedup-ratio 1e12`); discovery by files, requests over TCP, events over ZMQ. It logs each request, whatever `DYN_LOG` says.
- Both: the tokenizer and chat template of {pathlib.Path(arguments.model).name}, blocks of 16 tokens, {KV_TOKENS:,} tokens of KV in each worker, streamed answers of {ANSWER} tokens.
- Machine: {machine()}
- Versions: Tandem at {commit}, {output('rustc', '--version')}.

Both clusters run all the time. Each of {arguments.rounds} rounds sends the same requests to one and then to the other; every second round has the reverse order. Pairs of figures are Tandem / Dynamo, medians of the rounds; a ratio is the
median (least..most) of the rounds' ratios. CPU is that of the frontend and, for Tandem, of the router. Workers, client and frontends share the processors, so requests/s are those of the whole machine.
The client acknowledges packets at once, except the *plain* one. The time of a whole answer includes the worker's time.

{(chr(10) * 2).join(parts)}
"""
    return page, report.all_met


def main():
    parser = argparse.ArgumentParser(prog="bench/edge.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", required=True, help="the binary (given by bench/edge.sh)")
    parser.add_argument("--model", required=True, help="a .gguf file with SmolLM2's tokenizer (given by bench/edge.sh)")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help="rounds of every load (default: %(default)s; 0: none)")
    parser.add_argument("--requests", type=int, default=SOAK, help="requests of the measurement of memory (default: %(default)s; 0: none)")
    parser.add_argument("--write", action="store_true", help="write the result to docs/bench/edge.md, not to the output")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.requests) < 0 or arguments.write and (arguments.rounds < ROUNDS_MIN or arguments.requests < SOAK):
        parser.error(f"--write needs --rounds {ROUNDS_MIN} and --requests {SOAK} or more; without --write, neither may be negative")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        servers = [kind(running, pathlib.Path(folder), arguments) for kind in (Tandem, Dynamo)]
        for server in servers:
            server.wait()
        texts = Texts(json.loads((pathlib.Path(folder) / "model/tokenizer.json").read_text()))
        page, all_met = document(arguments, servers, texts)
    finish(arguments, RESULT, page, all_met)


if __name__ == "__main__":
    main()
