"""Starts stock vLLM engines on this machine, with limits, for scenarios and by hand; ends each engine with all processes that it started.

    python engines.py FOLDER RUN p+d|mixed [--dev]      starts two engines, prints their addresses, and ends them at Ctrl-C

`ci/vllm.sh setup` fills FOLDER; logs are in RUN. Each engine listens on 127.0.0.1 only.
"""

import argparse
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2"
BLOCK_SIZE = 32
# Fewer than eight documents of scenarios/routing.py need: it matters which engine has which.
BLOCKS = 160
MAX_MODEL_LEN = 4096
# The time that a prefill engine keeps blocks which no decode engine has pulled. vLLM's default of 30 s is too short for two busy cores.
LEASE_SECONDS = 60
# The limit on the address space of each process. An engine has three processes; its worker maps the most, 4.8 GB: torch, the weights and
# 0.6 GB of KV.
ADDRESS_SPACE_BYTES = 8 << 30
MEMORY_PER_ENGINE_BYTES = 4 << 30
LIFETIME_SECONDS = 3000
ENGINE_NICE = 10
START_SECONDS = 600


@dataclass(frozen=True)
class Layout:
    """The engines of a scenario: with `transfer` (NIXL) they can pull KV from each other; `dev` adds /reset_prefix_cache and /server_info.

    `model` is the model's folder in FOLDER, `blocks` the number of KV blocks, `ranks` the number of data-parallel ranks of each engine, and
    `serves` is what the model answers with, `options` are further arguments of vLLM, in which FOLDER stands for the folder.
    """

    engines: tuple = ("mixed-a", "mixed-b")
    transfer: bool = False
    dev: bool = False
    model: str = "model"
    blocks: int = BLOCKS
    max_model_len: int = MAX_MODEL_LEN
    ranks: int = 1
    serves: str = "texts"
    options: tuple = ()


HYBRID = {"engines": ("hybrid",), "model": "hybrid", "blocks": 300, "max_model_len": 1000}
# Three LoRAs, of which two fit into a batch.
LORAS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "3")
LAYOUTS = {
    "p+d": Layout(("prefill", "decode"), transfer=True),
    "mixed": Layout(),
    "hybrid": Layout(**HYBRID),
    "images": Layout(
        ("vision-a", "vision-b"),
        model="vision",
        blocks=1000,
        max_model_len=2048,
        options=("--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--skip-mm-profiling", "--distributed-executor-backend", "uni"),
    ),
    # An abort reaches the engine only through the API process that runs the request, so there is only one.
    "ranks": Layout(("ranks",), ranks=2, options=("--data-parallel-size", "2", "--api-server-count", "1")),
    "loras": Layout(("prefill", "decode"), transfer=True, options=(*LORAS, "--lora-modules", "alpha=FOLDER/loras/alpha")),
    "embeddings": Layout(("embed-a", "embed-b"), serves="embeddings"),
    "hybrid_everywhere": Layout(**HYBRID, options=("--prefix-cache-retention-interval", "None")),
}


class EngineFailed(Exception):
    """An engine did not start, or ended by itself; the message has the end of its log."""


def free_port():
    """Returns a port below those that the system assigns, so that no connection takes it while its server restarts."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Engine:
    # The value of Tandem's --engine.
    kind = "vllm"
    script = "ci/vllm.sh"
    block_size = BLOCK_SIZE
    address_space_bytes = ADDRESS_SPACE_BYTES

    def __init__(self, name, folder, run, layout):
        self.name, self.folder, self.run, self.layout = name, Path(folder).absolute(), Path(run).absolute(), layout
        self.port, self.side_channel = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = self.run / f"{name}.log"
        self.process, self.reports_cached = None, True

    def command(self):
        # With tcp://*:0, vLLM chooses a free port at VLLM_HOST_IP, here 127.0.0.1. Any other TCP address that vLLM binds has `*` as its
        # host, which means every network interface.
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv"}
        command = ["timeout", "--kill-after=10", str(LIFETIME_SECONDS), str(self.folder / "venv/bin/vllm"), "serve"]
        command += [str(self.folder / self.layout.model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(self.layout.max_model_len), "--max-num-seqs", "16"]
        command += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(self.layout.blocks)]
        if self.layout.serves == "embeddings":
            return [*command, "--runner", "pooling", "--convert", "embed"]
        command += ["--enable-prefix-caching", "--enable-scale-out", "--kv-events-config", json.dumps(events)]
        command += [option.replace("FOLDER", str(self.folder)) for option in self.layout.options]
        command += ["--enable-prompt-tokens-details"] if self.reports_cached else []
        if self.layout.transfer:
            extra = {"kv_lease_duration": LEASE_SECONDS}
            transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_connector_extra_config": extra}
            command += ["--kv-transfer-config", json.dumps(transfer)]
        return command

    def environment(self):
        temporary = self.run / "tmp"
        temporary.mkdir(exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "UCX_", "TANDEM_"))}
        return inherited | {
            "LD_LIBRARY_PATH": str(self.folder / "stubs"),
            "TMPDIR": str(temporary),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel),
            "VLLM_SERVER_DEV_MODE": "1" if self.layout.dev else "0",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if "--enable-lora" in self.layout.options else "0",
            "UCX_TLS": "sm,tcp,self",
            "UCX_NET_DEVICES": "lo",
        }

    def start(self, reports_cached=True):
        """Starts the engine in a session of its own, so that one signal reaches all its processes. Its ports stay those of earlier starts."""
        self.reports_cached = reports_cached
        assert self.process is None, f"{self.name} runs already"

        def limits():
            resource.setrlimit(resource.RLIMIT_AS, (self.address_space_bytes, self.address_space_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # After the first transfer, a thread of NIXL polls without a pause in each engine. On two processors, the routers and the client would hardly run.
            os.nice(ENGINE_NICE)

        with open(self.log, "ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            own = {"env": self.environment(), "cwd": self.run, "start_new_session": True, "preexec_fn": limits}
            self.process = subprocess.Popen(self.command(), **streams, **own)
        # The shell script kills the process groups named in these files if this program cannot.
        (self.run / f"{self.name}.group").write_text(f"{self.process.pid}\n")

    def wait(self):
        """Returns when the engine serves."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise EngineFailed(f"{self.name} ended with status {self.process.returncode}:\n{self.log_end()}")
            if self.healthy():
                self.unpin()
                return
            time.sleep(0.5)
        raise EngineFailed(f"{self.name} did not serve within {START_SECONDS} s:\n{self.log_end()}")

    def healthy(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def log_end(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def processes(self):
        """Returns the ids of the engine's processes."""
        ids = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            # The process is in the session that `start` opened, and is no zombie.
            if self.process and int(fields[3]) == self.process.pid and fields[0] != "Z":
                ids.append(int(stat.parent.name))
        return ids

    def unpin(self):
        """Lets the engine use all cores. NIXL binds an engine's worker to the last core, which two engines would share."""
        cores = os.sched_getaffinity(0)
        for process in self.processes():
            for thread in Path(f"/proc/{process}/task").glob("[0-9]*"):
                try:
                    os.sched_setaffinity(int(thread.name), cores)
                except ProcessLookupError:
                    pass

    def memory_bytes(self):
        """Returns the memory of the engine's processes; shared pages are counted once."""
        total = 0
        for process in self.processes():
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        return total

    def send(self, number):
        """Sends a signal to all processes of the engine."""
        os.killpg(self.process.pid, number)

    def kill(self):
        """Ends all processes of the engine at once, as `kill -9` does."""
        self.end(signal.SIGKILL)

    def stop(self):
        self.end(signal.SIGTERM)

    def end(self, first):
        if self.process is None:
            return
        for number in (first, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + 10
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
        self.process.wait()
        self.process = None
        (self.run / f"{self.name}.group").unlink(missing_ok=True)

    def get(self, path):
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as response:
            return content(response)

    def post(self, path, body, headers=None, timeout=120):
        """Returns the status and the answer."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, content(response)
        except urllib.error.HTTPError as error:
            return error.code, content(error)

    def generate(self, token_ids, *, cache_salt=None, kv_transfer_params=None, **sampling_params):
        """Returns the answer of the endpoint that takes token ids. By default it is greedy and ignores the end of the sequence."""
        body = {"token_ids": token_ids, "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling_params}}
        body |= {"cache_salt": cache_salt} if cache_salt else {}
        body |= {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else {}
        status, answer = self.post("/inference/v1/generate", body)
        assert status == 200, f"{self.name} answered {status}: {answer}"
        return answer

    def tokenize(self, messages):
        """Returns the token ids of a conversation, in the engine's chat template."""
        status, answer = self.post("/tokenize", {"model": MODEL, "messages": messages})
        assert status == 200, answer
        return answer["tokens"]

    def event_sources(self, rank=0):
        """Returns the addresses at which a rank of the engine publishes its KV events and replays them."""
        source = self.get("/kv_event_sources")[str(rank)]
        return source["endpoint"], source["replay_endpoint"]

    def metric(self, name, **labels):
        """Returns the sum of the metric's values with these labels."""
        return metric(self.get("/metrics"), name, **labels)


class Engines:
    """The engines of a layout, by name; at the end of the `with` block they are ended."""

    def __init__(self, layout, folder, run, engine=Engine):
        self.layout, self.run = layout, Path(run)
        self.run.mkdir(parents=True, exist_ok=True)
        self.by_name = {name: engine(name, folder, run, layout) for name in layout.engines}

    def __enter__(self):
        needed, available = MEMORY_PER_ENGINE_BYTES * len(self.by_name) * self.layout.ranks, memory_available()
        if available < needed:
            raise EngineFailed(f"{len(self.by_name)} engines need {needed >> 30} GiB of free memory; {available / (1 << 30):.1f} GiB are free")
        started = time.monotonic()
        try:
            for engine in self.by_name.values():
                engine.start()
            for engine in self.by_name.values():
                engine.wait()
                memory = engine.memory_bytes() / (1 << 30)
                print(f"{engine.name} serves after {time.monotonic() - started:.0f} s with {memory:.1f} GiB of memory", flush=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for engine in self.by_name.values():
            engine.stop()

    def __getitem__(self, name):
        return self.by_name[name]

    def __iter__(self):
        return iter(self.by_name.values())


def content(response):
    """Returns an answer's JSON, or its text."""
    body = response.read()
    return json.loads(body or b"null") if "json" in (response.headers["content-type"] or "") else body.decode()


def metric(text, name, **labels):
    """Returns the sum of a metric's values with these labels in the text of a /metrics page."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")) and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


def memory_available():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def main(layouts=LAYOUTS, engine=Engine):
    parser = argparse.ArgumentParser(description="Starts engines and ends them at Ctrl-C.")
    parser.add_argument("folder")
    parser.add_argument("run")
    parser.add_argument("layout", choices=layouts)
    if engine is Engine:
        parser.add_argument("--dev", action="store_true", help="vLLM's development endpoints, such as POST /reset_prefix_cache")
    arguments = parser.parse_args()
    layout = layouts[arguments.layout]
    if getattr(arguments, "dev", False):
        layout = Layout(layout.engines, layout.transfer, dev=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        with Engines(layout, arguments.folder, arguments.run, engine) as engines:
            for one in engines:
                events, replay = one.event_sources()
                print(f"{one.name}: {one.url}  events {events}  replay {replay}  log {one.log}", flush=True)
            print(f"press Ctrl-C to stop the engines; they stop by themselves after {LIFETIME_SECONDS // 60} minutes", flush=True)
            while all(one.process.poll() is None for one in engines):
                time.sleep(0.5)
            raise EngineFailed("an engine ended:\n" + "\n".join(one.log_end() for one in engines if one.process.poll() is not None))
    except EngineFailed as error:
        sys.exit(f"{engine.script}: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
