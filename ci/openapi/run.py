"""Starts a simulated cluster, and runs Schemathesis against it. Usage: run.py TANDEM FOLDER ARGUMENT... (of `st run`)."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

READY_SECONDS = 60


def start(tandem, log):
    """Starts the cluster at a free port, and returns its process and its address."""
    command = [tandem, "up", "--engine", "sim", "--sim-speedup", "1000", "--listen", "127.0.0.1:0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        address = re.search(r"http://(127\.0\.0\.1:[1-9]\d*)", pathlib.Path(log.name).read_text())
        if address:
            return process, address[1]
        time.sleep(0.1)
    process.kill()
    sys.exit(f"the cluster did not start; see {log.name}")


def main():
    tandem, folder, *arguments = sys.argv[1:]
    here = pathlib.Path(__file__).parent
    with open(pathlib.Path(folder, "tandem.log"), "w") as log:
        process, address = start(tandem, log)
        command = [
            pathlib.Path(sys.executable).with_name("st"), "--config-file", here / "schemathesis.toml", "run",
            f"http://{address}/openapi.json", "--checks", "all", "--wait-for-schema", "20",
            # These are described by hand, and not exactly.
            "--exclude-path-regex", "^/v1/(responses|messages)", *arguments,
        ]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(here)}
        try:
            status = subprocess.run(command, env=environment, cwd=folder).returncode
            if process.poll() is not None:
                sys.exit(f"the cluster ended; see {log.name}")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    if "panicked" in pathlib.Path(log.name).read_text():
        sys.exit(f"a task panicked; see {log.name}")
    sys.exit(status)


main()
