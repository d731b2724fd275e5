"""Clusters that the tests use: `tandem up` on a free port, ended with the test run."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

READY_SECONDS = 120
# A cluster that outlives this time is killed, so that no process remains if this program is killed.
LIFETIME_SECONDS = 900


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Cluster:
    """`tandem up` with these arguments. `url` is its address, without `/v1`; `model` is the model's name in requests."""

    def __init__(self, tandem, folder, name, model, *arguments):
        self.model, self.url, self.log = model, f"http://127.0.0.1:{free_port()}", Path(folder) / f"{name}.log"
        listen = self.url.removeprefix("http://")
        command = ["timeout", "--kill-after=10", str(LIFETIME_SECONDS), tandem, "up", "--listen", listen, *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        with open(self.log, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        self.wait("it is ready", lambda: self.get("/ready") is not None, READY_SECONDS)

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name):
        """Returns the sum of a metric over all its series."""
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.M))

    def wait(self, what, holds, seconds=10):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, f"tandem exited:\n{self.log_end()}"
            with contextlib.suppress(OSError):
                if holds():
                    return
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {what}\n{self.log_end()}")

    def log_end(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def check(self):
        """Checks that no request remains and that nothing failed inside the cluster."""
        self.wait("no request is in flight", lambda: self.metric("tandem_frontend_inflight_requests") == 0)
        failures = [line for line in self.log.read_text(errors="replace").splitlines() if " ERROR " in line or "panicked" in line]
        assert not failures, "the cluster logged errors:\n" + "\n".join(failures)

    def end(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                return
