"""Tandem's processes in front of the engines: started with limits, and ended with the scenario."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import tempfile
from pathlib import Path

from client import Client, wait_until
from engines import LEASE_SECONDS, MODEL, free_port

LIFETIME_SECONDS = 1200
ADDRESS_SPACE_BYTES = 4 << 30
READY_SECONDS = 60
CONCURRENT = ("--batch-max", "16")
# No request is refused because the machine is slow.
PATIENT = ("--max-wait", "off")
NIXL = ("--engine-kv-connector", "nixl", "--engine-kv-lease", str(LEASE_SECONDS))


class Process:
    """A program in a session of its own, so that one signal reaches all its processes."""

    def __init__(self, name, command, folder):
        self.name, self.log, self.group = name, Path(folder) / f"{name}.log", Path(folder) / f"{name}.group"

        def limits():
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        command = ["timeout", "--kill-after=10", str(LIFETIME_SECONDS), *(str(part) for part in command)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        # `tandem up` keeps its key in the state folder. With a folder for each start, no cluster finds what earlier ones have cached.
        environment["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-", dir=folder)
        with open(self.log, "ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, **streams, env=environment, start_new_session=True, preexec_fn=limits)
        # The shell script ends the groups named here if this program cannot.
        self.group.write_text(f"{self.process.pid}\n")

    def kill(self):
        """Ends the program at once, as `kill -9` does."""
        self.end(signal.SIGKILL)

    def end(self, first=signal.SIGTERM):
        for number in (first, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                break
        self.group.unlink(missing_ok=True)

    def cpu_seconds(self):
        """Returns the processor time that the program's processes have used so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def log_end(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


class Tandem:
    """The processes of one scenario, by name; leaving the `with` block ends them."""

    def __init__(self, stage):
        self.stage, self.processes, self.ledgers, self.workers = stage, {}, [], stage.folder / "workers"
        # gRPC's address and the metrics' address of each worker process.
        self.addresses = {}

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        for process in reversed(self.processes.values()):
            process.end()
        logs = {process.log.name: process.log.read_text(errors="replace") for process in self.processes.values()}
        errors = [f"{name}: {line}" for name, log in logs.items() for line in log.splitlines() if " ERROR " in line or "panicked" in line]
        assert failure or not errors, "processes logged errors:\n" + "\n".join(errors)

    def start(self, name, *arguments):
        """Starts one process of the binary. A process with a name that was used before takes the other's place."""
        self.processes[name] = Process(name, [self.stage.tandem, *arguments], self.stage.folder)

    def end(self, *names):
        for name in names:
            self.processes.pop(name).end()

    def ledger(self, name):
        self.ledgers.append(self.stage.folder / f"{name}.ledger")
        return ("--ledger", self.ledgers[-1])

    def up(self, name, engines, prefill=(), *flags, ranks=1):
        """Starts `tandem up` in front of engines that run, each with so many ranks, and returns a client of its frontend. Its workers are decode-0,
        decode-1, … and prefill-0, …, in the order of the engines and of their ranks."""
        listen = f"127.0.0.1:{free_port()}"
        urls = ["--engine-url", ",".join(engine.url for engine in engines)]
        if prefill:
            urls += ["--prefill-engine-url", ",".join(engine.url for engine in prefill)]
            urls += ["--engine-kv-lease", LEASE_SECONDS] if engines[0].kind == "vllm" else []
        self.start(name, "up", "--engine", engines[0].kind, "--listen", listen, *urls, *CONCURRENT, *PATIENT, *self.ledger(name), *flags)
        client = Client(listen)
        self.ready(client, name)
        workers = (len(engines) + len(prefill)) * ranks
        wait_until(f"{workers} workers joined", lambda: client.metric("tandem_router_workers", state="joined") == workers, READY_SECONDS)
        return client

    def router(self, *flags):
        """Starts a router that takes its workers from a file, which `join` writes."""
        self.listen("")
        grpc, self.router_admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.start("router", "router", "--listen", grpc, "--admin-listen", self.router_admin, "--workers-file", self.workers, *flags)
        return grpc

    def listen(self, text):
        self.workers.write_text(text)

    def frontend(self, router):
        listen = f"127.0.0.1:{free_port()}"
        model, served = next(iter(self.stage.engines)).folder / "model", ("--served-model-name", MODEL)
        self.start("frontend", "frontend", "--engine", next(iter(self.stage.engines)).kind, "--listen", listen, "--router", router, "--model", model, *served, *PATIENT)
        return Client(listen)

    def worker(self, name, role, engine, *flags):
        """Starts a worker process for an engine, at its former addresses if one of this name has run before."""
        grpc, admin = self.addresses.setdefault(name, (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"))
        listen = ("--listen", grpc, "--admin-listen", admin, "--worker-id", name)
        self.start(name, f"{role}-worker", "--engine", engine.kind, "--engine-url", engine.url, *listen, *CONCURRENT, *self.ledger(name), *flags)

    def join(self, *names):
        """Makes these the router's workers, and waits until the router has joined all of them and no other one."""
        self.listen("".join(f"{self.addresses[name][0]}\n" for name in names))
        router = Client(self.router_admin)

        def joined():
            return set(re.findall(r'tandem_router_index_blocks\{worker="(.*?)"', router.get("/metrics")[1])) == set(names)

        wait_until(f"the router's workers are {', '.join(names)}", lambda: answers(joined), READY_SECONDS)

    def ready(self, client, name):
        """Waits until the frontend says that requests can be served."""

        def is_ready():
            process = self.processes[name]
            assert process.process.poll() is None, f"{name} ended with {process.process.returncode}:\n{process.log_end()}"
            return answers(lambda: client.get("/ready")[0] == 200)

        wait_until(f"{name} is ready", is_ready, READY_SECONDS, 0.2)

    def audit(self, answers, metrics, *flags):
        """Runs `tandem audit check`; returns its last line."""
        def line(answer):
            usage = {"prompt_tokens": answer.prompt_tokens, "cached_tokens": answer.cached_tokens, "source": answer.source} if answer.complete else None
            return {name: value for name, value in {"request_id": answer.request_id, "usage": usage}.items() if value is not None}

        folder = self.stage.folder
        (folder / "client.jsonl").write_text("".join(json.dumps(line(answer)) + "\n" for answer in answers))
        (folder / "metrics.txt").write_text(metrics)
        arguments = ["--client", folder / "client.jsonl", "--metrics", folder / "metrics.txt"]
        for ledger in self.ledgers:
            arguments += ["--ledger", ledger]
        done = subprocess.run([self.stage.tandem, "audit", "check", *arguments, *flags], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"the audit fails:\n{done.stdout}{done.stderr}"
        return done.stdout.strip().splitlines()[-1]


def answers(condition):
    try:
        return condition()
    except OSError:
        return False
