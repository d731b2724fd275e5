"""Checks the CUDA back end and measures its speed, part by part. bench/gpu.sh runs it and describes the parts.

Every result is a line of JSON in results.jsonl, which is written at once. A part that fails or takes too long hides nothing: the other parts
run, and the report lists what was measured.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

import gpu_report
import numpy
import turns
from gpu_reference import Config, error_of, forward, small_models, write_large_model, write_model

# The seconds after which a part is ended.
LIMITS = {"smoke": 240, "right": 240, "kernels": 200, "speed": 480, "handoff": 150, "turns": 300, "sanitize": 1200}
# Limits on the norm of the logits' error, relative to the logits' norm, as in crates/devices/src/cuda/tests/models.rs.
ERROR_MAX = {"bfloat16": 2e-2, "float16": 3e-3}
# Logits that differ by less than this many standard deviations of their row are a tie.
TIE = 5e-2
QWEN3_8B = Config("qwen3", 4_096, 12_288, 36, 32, 8, 128, 151_936)
# The steps whose kernels are timed, and the workloads, for the card and for a dry run.
KERNELS = "ceilings:8192:1073741824 prompt:8192:8192 prompt:32768:128 decode:1:2048 decode:32:2048 decode:256:2048".split()
SPEED = ["prefill:4096 prefill:16384 prefill:65536", "cached:32768:128", "decode:1:2048:greedy decode:1:2048:drawn", "decode:32:2048:greedy decode:32:2048:drawn"]
DRY_MODEL = Config("qwen3", 64, 128, 2, 4, 2, 16, 512)
DRY_KERNELS = "ceilings:64:1048576 prompt:48:32 decode:3:40".split()
DRY_SPEED = ["prefill:64", "cached:64:16", "decode:2:70:greedy decode:2:70:drawn"]
DECODE_STEPS = 16
# The tools of compute-sanitizer, their options and time limits. racecheck takes six minutes, most of them for cuBLASLt's kernels, and does not
# end if it examines the attention kernels as well (docs/bench/gpu.md).
SANITIZER_RUNS = [("memcheck", [], 90), ("synccheck", [], 90), ("racecheck", ["--kernel-name-exclude", "kns=attend"], 500)]


class Bench:
    """The programs that bench/gpu.sh has built, and the file of results."""

    def __init__(self, folder, part, dry):
        self.folder, self.part, self.dry = folder, part, dry
        self.program, self.results = folder / "cuda", folder / "results.jsonl"
        self.model = DRY_MODEL if dry else QWEN3_8B
        self.deadline = time.monotonic() + LIMITS[part]
        # In a dry run only the cluster of the part `turns` is tuned, because times mean nothing.
        self.options = ["--untuned"] if dry else []

    def record(self, kind, **fields):
        line = json.dumps({"part": self.part, "kind": kind, **fields, "time": time.strftime("%Y-%m-%dT%H:%M:%S")})
        with open(self.results, "a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def check(self, name, ok, found):
        self.record("check", name=name, ok=bool(ok), found=found)

    def run(self, *arguments, seconds=60, program=None, on_line=None):
        """Runs a program in a process group of its own. Returns its exit status (None after the time limit) and its output."""
        # A busy machine takes three times as long for an emulated GPU's work.
        seconds = max(min(seconds * (3 if self.dry else 1), self.deadline - time.monotonic()), 1)
        command = [*map(str, program or [self.program, *self.options]), *map(str, arguments)]
        late = threading.Event()
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)

            def end():
                late.set()
                os.killpg(child.pid, signal.SIGKILL)

            timer, lines = threading.Timer(seconds, end), []
            timer.start()
            try:
                for line in child.stdout:
                    lines.append(line)
                    if on_line and line.startswith("{"):
                        on_line(json.loads(line))
                status = child.wait()
            finally:
                timer.cancel()
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            errors.seek(0)
            output = ("".join(lines) + errors.read()).strip()
        if late.is_set():
            return None, f"{output} (ended after {seconds:.0f} seconds)"
        # A program that a signal ends prints no reason.
        return status, f"{output} (ended by signal {-status})" if status < 0 else output

    def expect(self, name, *arguments, wanted=None, seconds=60):
        """Runs the benchmark program, and records whether its output is the wanted one. Returns the output, or None."""
        status, output = self.run(*arguments, seconds=seconds)
        ok = status == 0 and (wanted is None or output.startswith(wanted))
        self.check(name, ok, " ".join(output.split())[-400:])
        return output if ok else None

    def measure(self, what, *arguments, seconds):
        """Runs the benchmark program, and records each line of JSON that it prints."""
        status, output = self.run(*arguments, seconds=seconds, on_line=lambda line: self.record(what, **line))
        if status != 0:
            self.check(" ".join(map(str, arguments[:1] + arguments[2:])), False, " ".join(output.split())[-400:])

    def drawn_model(self):
        """Returns the argument for the large model with weights that are made on the GPU."""
        folder = self.folder / "large"
        write_large_model(folder, self.model, with_weights=False)
        return f"drawn:{folder}"


def check_logits(bench, name, config, folder, chunks, length):
    """Compares logits, computed in chunks of several sizes, and greedy tokens with the reference."""
    weights = write_model(folder, config)
    tokens = numpy.random.default_rng(1).integers(0, config.vocab_size, length)
    expected = forward(config, weights, tokens)
    for chunk in chunks:
        out = folder / "logits"
        status, output = bench.run("logits", folder, ",".join(map(str, tokens)), chunk, out)
        what = f"{name}, {config.torch_dtype}, chunks of {chunk}"
        if status != 0:
            bench.check(what, False, " ".join(output.split())[-400:])
            continue
        wrong = error_of(numpy.fromfile(out, dtype=numpy.float32).reshape(expected.shape), expected)
        greedy = [int(token) for token in output.split(",")]
        rows = forward(config, weights, numpy.concatenate([tokens, greedy[:-1]]))[len(tokens) - 1 :]
        lost = [step for step, (row, token) in enumerate(zip(rows, greedy)) if row.max() - row[token] > TIE * row.std()]
        found = f"logits wrong by {wrong:.1e} of their size (limit {ERROR_MAX[config.torch_dtype]:.0e})"
        bench.check(what, wrong < ERROR_MAX[config.torch_dtype] and not lost, found + (f"; greedy tokens {lost} differ" if lost else "; greedy tokens equal"))


def dry_models():
    return {"qwen3": Config("qwen3", 64, 128, 2, 4, 2, 16, 512)}


def smoke(bench):
    """Finds the first fault: versions, one small model, every way of a transfer."""
    bench.expect("versions", "versions")
    models = dry_models() if bench.dry else small_models()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        check_logits(bench, "qwen3", models["qwen3"], folder, (40, 1) if bench.dry else (700, 64, 1), 40 if bench.dry else 700)
        bench.expect("replayed steps equal direct steps", "replayed", folder, wanted="equal", seconds=40)
        bench.expect("blocks moved through host memory", "transfer", folder, wanted="equal", seconds=40)
        bench.expect("blocks copied from another process", "transports", folder, 100, wanted='{"what":"cuda_ipc"', seconds=40)
        bench.expect("NCCL, from the card to itself", "nccl", folder, wanted="equal", seconds=40)


def right(bench):
    """Compares all small models with the references."""
    for name, config in (dry_models() if bench.dry else small_models()).items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            check_logits(bench, name, config, folder, (40, 7) if bench.dry else (700, 193, 64, 1), 40 if bench.dry else 700)
            for command in () if bench.dry else ("replayed", "transfer"):
                bench.expect(f"{name}: {command}", command, folder, wanted="equal")


def kernels(bench):
    model = bench.drawn_model()
    for case in DRY_KERNELS if bench.dry else KERNELS:
        bench.measure("kernel", "kernels", model, case, seconds=90)


def speed(bench):
    model = bench.drawn_model()
    bench.measure("kernel", "kernels", model, (DRY_KERNELS if bench.dry else KERNELS)[0], seconds=60)
    for cases in DRY_SPEED if bench.dry else SPEED:
        bench.measure("speed", "speed", model, *cases.split(), seconds=120)
    if bench.dry:
        return
    status, output = bench.run("transformers", program=[sys.executable, __file__, bench.folder, "--inside"], seconds=150, on_line=lambda line: bench.record("transformers", **line))
    if status != 0:
        bench.check("transformers", False, " ".join(output.split())[-400:])


def transformers_speed():
    """Prints the seconds of a decode step of transformers, with weights that are made on the GPU."""
    import torch
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    fields = {name: value for name, value in QWEN3_8B.json().items() if name not in ("model_type", "architectures", "torch_dtype")}
    with torch.device("cuda"), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**fields)).eval()
        for batch in (1, 32):
            prompt = torch.randint(0, 1_000, (batch, 2_048))
            cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
            times = []
            for _ in range(3):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(DECODE_STEPS):
                    model(prompt[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) / DECODE_STEPS)
            print(json.dumps({"what": "decode", "batch": batch, "context": 2_048, "seconds": sorted(times)[1]}), flush=True)
            del cache


def handoff(bench):
    model, tokens = bench.drawn_model(), 100 if bench.dry else 4_096
    bench.measure("speed", "speed", model, f"prefill:{tokens}", seconds=60)
    bench.measure("handoff", "transports", model, tokens, seconds=90)


def write_tokenizer(path, size):
    """Writes a tokenizer whose first ids are bytes and whose other ids are numbers, because random weights generate no text anyway."""
    # GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others are numbered from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    words = letters + [f"Ġ{number}" for number in range(size - len(letters))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": [], "byte_fallback": False, "fuse_unk": False, "ignore_merges": False}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}))


def measure_turns(bench):
    """Measures conversations on a prefill worker and a decode worker that share the card."""
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        write_large_model(folder, bench.model, with_weights=True)
        write_tokenizer(folder / "tokenizer.json", bench.model.vocab_size)
        command = [bench.folder / "tandem", "up", "--engine", "cuda", "--model", folder, "--prefill-workers", 1, "--prefill", "remote"]
        command += ["--listen", "127.0.0.1:0", "--log", "error", "--kv-capacity-tokens", 4_096 if bench.dry else 200_000]
        command += ["--prefill-chunk-budget", 256, "--batch-max", 8] if bench.dry else []
        cluster = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            for line in cluster.stdout:
                if found := re.search(r"frontend +http://(\S+)", line):
                    break
            else:
                bench.check("tandem up", False, f"ended with status {cluster.wait()}: its error is above")
                return
            small = ["--conversations", "2", "--turns", "2", "--first", "64", "--added", "32", "--answer", "4", "--concurrency", "2", "--vocabulary", "500"]
            _, shape = turns.shape_of(small if bench.dry else ())
            bench.record("turns", **turns.measure(found[1], shape))
        finally:
            os.killpg(cluster.pid, signal.SIGKILL)
            cluster.wait()
    finally:
        shutil.rmtree(folder)


def sanitizer(bench):
    """Returns the path of compute-sanitizer: the machine's, or the one that `bench/gpu.sh build` has downloaded; None if there is none."""
    if found := os.environ.get("BENCH_SANITIZER") or shutil.which("compute-sanitizer", path=os.environ["PATH"] + ":/usr/local/cuda/bin"):
        return found
    for wheel in bench.folder.glob("nvidia_cuda_sanitizer_api-*.whl"):
        zipfile.ZipFile(wheel).extractall(bench.folder / "sanitizer")
    for found in (bench.folder / "sanitizer").glob("**/compute-sanitizer/compute-sanitizer"):
        for file in found.parent.iterdir():
            file.chmod(0o755)
        return found
    return None


def sanitize(bench):
    """Runs every feature under compute-sanitizer: accesses out of bounds, races in shared memory, wrong barriers, uninitialised memory."""
    tool = sanitizer(bench)
    if not tool:
        bench.check("compute-sanitizer", False, "not found: run bench/gpu.sh build again")
        return
    models = dry_models() if bench.dry else {name: small_models()[name] for name in ("qwen3", "llama, 9 heads, tied")}
    for name, config in models.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(pathlib.Path(folder), config)
            for check, options, seconds in SANITIZER_RUNS[:1] if bench.dry else SANITIZER_RUNS:
                program = [tool, "--tool", check, *options, "--error-exitcode", "9", bench.program, "--untuned"]
                status, output = bench.run("exercise", folder, program=program, seconds=seconds)
                found = "no findings" if status == 0 else " ".join(output.splitlines()[-12:])[-600:]
                bench.check(f"{check}: {name}", status == 0, found)


def compile_kernels(folder):
    """Compiles the kernels of all models for Hopper and the driver R580, on a machine without a GPU."""
    with tempfile.TemporaryDirectory() as models:
        for number, config in enumerate([QWEN3_8B, *small_models().values()]):
            model = pathlib.Path(models) / str(number)
            write_large_model(model, config, with_weights=False)
            subprocess.run([folder / "cuda", "compile", model, "sm_90a", "13000", str(227 << 10)], check=True)


PARTS = {"smoke": smoke, "right": right, "kernels": kernels, "speed": speed, "handoff": handoff, "turns": measure_turns, "sanitize": sanitize}


def run_part(folder, part, dry):
    """Runs a part in a process of its own, which is ended at the part's limit. Returns whether it has ended by itself."""
    bench, began = Bench(folder, part, dry), time.monotonic()
    child = subprocess.Popen([sys.executable, __file__, folder, "--inside", part, *(["--dry-run"] if dry else [])], start_new_session=True)
    try:
        status = child.wait(timeout=LIMITS[part] + 10)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    bench.record("part", name=part, ok=status == 0, status=status, seconds=round(time.monotonic() - began, 1))
    return status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=pathlib.Path, help="the folder that bench/gpu.sh build has written")
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} [default: all]; report; or compile")
    parser.add_argument("--dry-run", action="store_true", help="small sizes, for a GPU that is emulated")
    parser.add_argument("--inside", metavar="PART", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.inside == "transformers":
        return transformers_speed()
    if given.inside:
        return PARTS[given.inside](Bench(folder, given.inside, given.dry_run))
    if given.parts == ["compile"]:
        return compile_kernels(folder)
    parts = given.parts or list(PARTS)
    if unknown := set(parts) - {*PARTS, "report"}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    ended = [run_part(folder, part, given.dry_run) for part in parts if part != "report"]
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    text, passed = gpu_report.report(results, DRY_MODEL if given.dry_run else QWEN3_8B)
    print("\n" + text, flush=True)
    return 0 if passed and all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
