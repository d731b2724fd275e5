"""Runs all parts of bench/gpu.py on an emulated GPU, checks its report, and makes the emulated GPU refuse things. Run by ci/gpu.sh."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import gpu
import gpu_report
from gpu_reference import write_model

FOLDER = pathlib.Path(sys.argv[1])


def fail(text):
    sys.exit(f"ci/gpu: {text}")


def run_all_parts():
    done = subprocess.run([sys.executable, gpu.__file__, FOLDER, "--dry-run"])
    results = [json.loads(line) for line in (FOLDER / "results.jsonl").read_text().splitlines()]
    kinds = {line["kind"] for line in results}
    if done.returncode:
        fail("a part of the dry run has failed: see above")
    if missing := {"check", "kernel", "speed", "handoff", "turns", "part"} - kinds:
        fail(f"the dry run has no results of {missing}")
    found = {line["what"] for line in results if line["kind"] == "kernel"}
    if len(found) < 14:
        fail(f"only these kernels were timed: {sorted(found)}")


def check_report():
    """Every goal is found from the results that the real workloads give, and FP8 alone is not measured."""
    lines = [{"kind": "kernel", "case": "ceiling", "what": what, "seconds": 1e-3, "flop": 8e11, "bytes": 4e9} for what in ("gemm", "copy")]
    for cases in gpu.SPEED:
        for case in cases.split():
            what, *rest = case.split(":")
            names = {"prefill": ("tokens",), "cached": ("before", "new"), "decode": ("batch", "context", "sampling")}[what]
            fields = {name: int(text) if text.isdigit() else text for name, text in zip(names, rest)}
            lines.append({"kind": "speed", "what": what, **fields, "seconds": 1e-3, "whole_seconds": 1.0})
    lines += [{"kind": "kernel", "case": "prompt 8192 after 8192", "what": "attend_prompt", "seconds": 1.0, "flop": 1e12, "bytes": 1e9}]
    lines += [{"kind": "transformers", "batch": batch, "seconds": 5e-3} for batch in (1, 32)]
    lines += [{"kind": "handoff", "bytes": 1, "seconds": 1e-6, "plain_seconds": 1e-6, "open_seconds": 0, "close_seconds": 0, "equal": True}]
    goals = gpu_report.goals(gpu_report.Results(lines), gpu.QWEN3_8B)
    not_measured = [name for name, _, _, met in goals if met is None]
    missed = [name for name, _, _, met in goals if met is False]
    if not_measured != ["decode with FP8 weights (not built), times as fast as bf16"] or missed != ["attention of a 16k prompt's second half, of the matmul rate"]:
        fail(f"the goals {not_measured} are not measured, and {missed} are missed")
    text, passed = gpu_report.report(lines, gpu.QWEN3_8B)
    if passed or text.count("| not measured |") != 1 or text.count("| missed |") != 1:
        fail(f"the report is wrong:\n{text}")


def refused(model, command, expected, status, **environment):
    """Runs the benchmark program on a GPU with this environment, and checks its output and exit status."""
    settings = {f"EMULATED_GPU_{name}": str(value) for name, value in environment.items()}
    done = subprocess.run([FOLDER / "cuda", "--untuned", *command(model)], capture_output=True, text=True, env={**os.environ, **settings}, timeout=60)
    if done.returncode != status or expected not in done.stdout:
        fail(f"{settings}: status {done.returncode}, not {status}; {expected!r} is not in {done.stdout!r}\n{done.stderr}")


def main():
    check_report()
    run_all_parts()
    with tempfile.TemporaryDirectory() as model:
        write_model(pathlib.Path(model), gpu.DRY_MODEL)
        refused(model, lambda _: ["versions"], "the NVIDIA driver supports CUDA 12.8", 1, DRIVER=12_080)
        refused(model, lambda model: ["replayed", model], "equal", 0, NO_GRAPHS=1)
        refused(model, lambda model: ["transports", model, "40"], "the transfer from device to device failed", 1, NO_IPC=1)
        refused(model, lambda model: ["logits", model, "1,2,3", "3", f"{model}/logits"], "the device is lost", 1, LOST_AFTER=10)
    print("ci/gpu: the dry run and the refusals are as expected")


main()
