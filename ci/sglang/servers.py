"""Starts stock SGLang servers on this machine's CPU, with limits, for the scenarios and by hand.

    python servers.py FOLDER RUN mixed|p+d      starts two servers, prints their addresses, and ends them at Ctrl-C

`ci/sglang.sh setup` fills FOLDER; logs are in RUN. Each server listens on 127.0.0.1 only.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import engines
from engines import MODEL, Engine, Layout, free_port

PAGE_SIZE = 16
MAX_TOKENS = 5120
MAX_MODEL_LEN = 4096
PAIRS = ("prefill", "prefill-b", "decode", "decode-b")
LAYOUTS = {"mixed": Layout(("mixed-a", "mixed-b")), "p+d": Layout(("prefill", "decode"), transfer=True), "pairs": Layout(PAIRS, transfer=True)}


class Server(Engine):
    """A SGLang server, started and ended as the vLLM engines are."""

    kind = "sglang"
    script = "ci/sglang.sh"
    block_size = PAGE_SIZE
    # SGLang's three processes map more than they use: torch, triton and the weights.
    address_space_bytes = 32 << 30

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.events, self.replay = free_port(), free_port()
        # The half of each request that the server computes, if it computes one half.
        self.mode = self.name.partition("-")[0]

    def command(self):
        events = {"publisher": "zmq", "bind": True, "endpoint": f"tcp://127.0.0.1:{self.events}", "topic": "kv"}
        events["replay_endpoint"] = f"tcp://127.0.0.1:{self.replay}"
        command = ["timeout", "--kill-after=10", str(engines.LIFETIME_SECONDS), sys.executable, str(Path(__file__).with_name("serve.py"))]
        command += ["--model-path", str(self.folder / self.layout.model), "--served-model-name", MODEL, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
        command += ["--disable-overlap-schedule", "--page-size", str(PAGE_SIZE), "--max-total-tokens", str(MAX_TOKENS)]
        command += ["--context-length", str(MAX_MODEL_LEN), "--max-running-requests", "16", "--chunked-prefill-size", "512"]
        # Both forms of streams: with all tokens so far, and with the new ones only.
        command += ["--incremental-streaming-output"] if self.name.endswith("-b") else []
        # By default, /v1/loads is up to 15 steps old.
        command += ["--load-snapshot-publish-interval", "1"]
        command += ["--enable-metrics", "--enable-cache-report", "--kv-events-config", json.dumps(events)]
        if self.layout.transfer:
            command += ["--disaggregation-mode", self.mode, "--disaggregation-transfer-backend", "mooncake_tcp"]
            command += ["--disaggregation-bootstrap-port", str(self.side_channel)] if self.mode == "prefill" else []
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"] if self.mode == "decode" else []
        return command + list(self.layout.options)

    def environment(self):
        temporary = self.run / "tmp"
        temporary.mkdir(exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "MC_", "TANDEM_", "PYTHON"))}
        # Each process would import all of SGLang's model files, which takes longer than all the rest of its start.
        models = {path.stem for path in self.folder.glob("venv/lib/python*/site-packages/sglang/srt/models/*.py")} - {"llama"}
        libraries = [str(self.folder / "stubs"), inherited.get("LD_LIBRARY_PATH", "")]
        return inherited | {
            "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
            "TMPDIR": str(temporary),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(models)),
            "SGLANG_LOCAL_IP_NIC": "lo",
            "SGLANG_HOST_IP": "127.0.0.1",
            "HOST_IP": "127.0.0.1",
            "MC_FORCE_TCP": "1",
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        }

    def alone(self, token_ids, tokens, **options):
        """Returns the server's greedy answer to token ids by itself; its blocks have a salt that Tandem never uses."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        status, answer = self.post("/generate", {"input_ids": token_ids, "sampling_params": sampling, "cache_salt": "alone", **options})
        assert status == 200, f"{self.name} answered {status}: {answer}"
        return answer

    def control(self, path, **body):
        """Sends an order to an endpoint whose answer is not JSON; returns the status."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def load(self):
        """Returns the requests that run or wait."""
        (load,) = self.get("/v1/loads?include=core")["loads"]
        return load["num_running_reqs"] + load["num_waiting_reqs"]

    def counted(self):
        """Returns the tokens of all prompts that have ended, and those of them that were cached, as the server's metrics have them. A prefill
        server counts the prompts of its own health checks, too."""
        if self.mode == "prefill":
            computed, cached = (int(self.metric("sglang:prefill_effective_tokens_total", mode=mode)) for mode in ("input", "device_hit"))
            return [computed + cached, cached]
        return [int(self.metric(f"sglang:{name}_tokens_total")) for name in ("prompt", "cached")]

    def event_sources(self):
        found = self.get("/server_info")["kv_events"]
        return tuple(f"tcp://{found['endpoint_host']}:{found[f'{part}port_base']}" for part in ("endpoint_", "replay_endpoint_"))


if __name__ == "__main__":
    engines.main(LAYOUTS, Server)
