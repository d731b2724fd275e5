"""Checks the results of the CUDA back end against transformers and measures its speed. Run by bench/gpu.sh."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy
import tokenizers
import torch
import transformers
import turns

FOLDER = pathlib.Path(sys.argv[1]).resolve()
OURS = FOLDER / "cuda"
# Limits on the norm of the logits' error, relative to the logits' norm.
ERROR_MAX = {torch.bfloat16: 1e-2, torch.float16: 3e-3}
# Logits that differ by less than this many standard deviations of their row are a tie.
TIE = 5e-2
# The shape of Qwen3-8B.
LARGE = dict(vocab_size=151_936, hidden_size=4_096, intermediate_size=12_288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
LAYERS = int(os.environ.get("BENCH_LAYERS", "36"))
# Goals for prefill and decode, as fractions of the card's highest measured rates.
PREFILL_GOAL, DECODE_GOAL = 0.6, 0.8
# Goals for transfers: the minimum fraction of a plain copy's bandwidth, and the maximum fraction that a handoff adds to a prompt's TTFT.
COPY_GOAL, HANDOFF_GOAL = 0.7, 0.05
DECODE_STEPS = 16
# Benchmarks are ended at this time, so that the whole run takes less than eight minutes.
DEADLINE = time.monotonic() + 470


def run_with_limit(command, seconds, errors=subprocess.STDOUT):
    """Runs a command. Returns its exit status and output; the status is None after the time limit. Its child processes end with it."""
    run = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        output = run.communicate(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        output = run.communicate()
        return subprocess.CompletedProcess(command, None, *output)
    return subprocess.CompletedProcess(command, run.returncode, *output)


def run_bench(*arguments, seconds=60):
    """Runs engine/benches/cuda.rs. Returns its output, or None and an error if it failed or reached the time limit."""
    seconds = min(seconds, DEADLINE - time.monotonic())
    done = run_with_limit([OURS, *arguments], seconds, subprocess.PIPE)
    if done.returncode is None:
        return None, f"{arguments[0]}: not finished after {max(seconds, 0):.0f} seconds. {done.stdout}{done.stderr}"
    if done.returncode:
        return None, f"{arguments[0]}: {done.stdout}{done.stderr}"
    return done.stdout, ""


def small_models():
    """Returns small models: their names, configurations and types of weights."""
    common = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, vocab_size=512, max_position_embeddings=4_096)
    llama = transformers.LlamaConfig(**common, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False)
    odd = transformers.LlamaConfig(**{**common, "hidden_size": 576}, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    qwen2 = transformers.Qwen2Config(**common, num_attention_heads=14, num_key_value_heads=2, head_dim=64)
    qwen3 = transformers.Qwen3Config(**common, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    return [
        ("llama", llama, torch.bfloat16),
        ("llama, 9 heads, tied", odd, torch.float16),
        ("qwen2", qwen2, torch.bfloat16),
        ("qwen3", qwen3, torch.bfloat16),
    ]


def random_model(config, dtype):
    torch.manual_seed(7)
    # Releases of transformers have different names for the argument that sets the type, but all use torch's default type.
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    torch.set_default_dtype(torch.float32)
    # Biases and norms start as zeros and ones, which would hide errors in their use.
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def check_model(name, config, dtype, folder):
    """Compares logits, computed in one chunk and in many, and greedy tokens with the same weights in single precision."""
    model = random_model(config, dtype)
    model.save_pretrained(folder)
    model = model.float()
    tokens = torch.randint(0, config.vocab_size, (700,), device="cuda")
    listed, failures = ",".join(map(str, tokens.tolist())), []
    with torch.no_grad():
        expected = model(tokens[None]).logits[0].cpu().numpy()
    worst = 0.0
    for chunk in (700, 193, 64, 1):
        output, error = run_bench("logits", folder, listed, chunk, folder / "logits")
        if error:
            failures.append(" ".join(error.split()))
            break
        found = numpy.fromfile(folder / "logits", dtype=numpy.float32).reshape(expected.shape)
        worst = max(worst, float(numpy.linalg.norm(found - expected) / numpy.linalg.norm(expected)))
        sequence = tokens.tolist()
        for step, token in enumerate(map(int, output.split(","))):
            with torch.no_grad():
                row = model(torch.tensor([sequence], device="cuda")).logits[0, -1]
            if row.max() - row[token] > TIE * row.std():
                failures.append(f"chunks of {chunk}: greedy token {step} is {token}, not {int(row.argmax())}")
                break
            sequence.append(token)
    if not worst < ERROR_MAX[dtype]:
        failures.append(f"logits are wrong by {worst:.2e} of their size")
    # These checks compare the tokens of sequences that are decoded together, and blocks that are received from another engine.
    for check in ("replayed", "transfer"):
        output, error = run_bench(check, folder)
        if error or output.strip() != "equal":
            failures.append(" ".join((error or f"{check}: {output}").split()))
    print(f"| {name} | {str(dtype).removeprefix('torch.')} | {worst:.1e} | {'; '.join(failures) or 'equal'} |", flush=True)
    return not failures


def sanitizer():
    """Returns the path of compute-sanitizer: the machine's, or the one that `bench/gpu.sh build` has downloaded."""
    if found := shutil.which("compute-sanitizer"):
        return found
    for wheel in FOLDER.glob("nvidia_cuda_sanitizer_api-*.whl"):
        zipfile.ZipFile(wheel).extractall(FOLDER / "sanitizer")
    for found in (FOLDER / "sanitizer").glob("**/compute-sanitizer/compute-sanitizer"):
        for file in found.parent.iterdir():
            file.chmod(0o755)
        return found
    sys.exit("compute-sanitizer is missing: run bench/gpu.sh build again")


def sanitize(tool, folder):
    """Returns whether compute-sanitizer has no findings: accesses out of bounds, races in shared memory. Runs until the deadline."""
    print("\n| compute-sanitizer | Model | Findings |\n|---|---|---|")
    passed = True
    for name, config, dtype in small_models()[1::2]:
        model = folder / re.sub(r"\W+", "-", name)
        random_model(config, dtype).save_pretrained(model)
        for check in ("memcheck", "racecheck"):
            left = DEADLINE - time.monotonic()
            done = run_with_limit([tool, "--tool", check, "--error-exitcode", "9", OURS, "exercise", model], left)
            status = done.returncode
            found = "none" if status == 0 else "not known: the time limit was reached" if status is None else " ".join(done.stdout.splitlines()[-12:])
            passed &= found == "none"
            print(f"| {check} | {name} | {found} |", flush=True)
    return passed


def tokenizer_file(path, size):
    """Writes a tokenizer whose first ids are bytes and whose other ids are numbers, because random weights generate no text anyway."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġ{number}" for number in range(size - len(letters))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path))


def measure_conversations(model):
    """Measures conversations on a prefill worker and a decode worker that share the card."""
    tokenizer_file(model / "tokenizer.json", LARGE["vocab_size"])
    command = [FOLDER / "tandem", "up", "--engine", "cuda", "--model", model, "--prefill-workers", "1", "--prefill", "remote"]
    command += ["--listen", "127.0.0.1:0", "--log", "error", "--kv-capacity-tokens", "200000"]
    cluster = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    try:
        for line in cluster.stdout:
            if found := re.search(r"frontend +http://(\S+)", line):
                break
        else:
            print(f"tandem up ended with status {cluster.wait()}: its error is above")
            return False
        print("\nTwo workers on one card, Qwen3-8B's shape. ", end="")
        turns.measure(found[1], turns.shape_of()[1])
    finally:
        cluster.kill()
        cluster.wait()
    return True


def seconds_of(work, rounds=5):
    """Returns the median time of a function on the GPU, after one run that is not measured."""
    work()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def measure_ceilings():
    """Measures the card's highest rates. Returns floating-point operations per second and bytes per second."""
    a, b = (torch.randn(8_192, 8_192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8_192**3 / seconds_of(lambda: a @ b)
    block = torch.empty(1 << 30, device="cuda", dtype=torch.int8)
    other = torch.empty_like(block)
    return flops, 2 * block.numel() / seconds_of(lambda: other.copy_(block))


def prefill_operations(config, tokens):
    """Returns the floating-point operations of a prefill without logits."""
    heads = config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim
    matrices = config.hidden_size * (2 * heads + kv + 3 * config.intermediate_size)
    return config.num_hidden_layers * (2 * tokens * matrices + 2 * tokens * tokens * heads)


def measure_speed(folder):
    """Measures prefill, decode and handoff on Qwen3-8B's shape. Returns whether all goals are met."""
    flops, bandwidth = measure_ceilings()
    print(f"\nCeilings: {flops / 1e12:.0f} TFLOP/s (bf16, 8192³), {bandwidth / 1e12:.2f} TB/s (copy, read + write)\n")
    config = transformers.Qwen3Config(**LARGE, num_hidden_layers=LAYERS, max_position_embeddings=131_072, tie_word_embeddings=False)
    model = random_model(config, torch.bfloat16)
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name) * 2
    model.save_pretrained(folder, max_shard_size="20GB")
    theirs = transformers_speed(model)
    del model
    torch.cuda.empty_cache()
    print("| Qwen3-8B's shape | ours | of the ceiling | goal | transformers | ours ÷ theirs |\n|---|---|---|---|---|---|")
    met, prefill = True, {}
    output, error = run_bench("speed", folder, seconds=240)
    if error:
        print(f"\n{error}", flush=True)
        return False
    for line in output.splitlines():
        found = json.loads(line)
        seconds = found["seconds"]
        if found["what"] == "prefill":
            name, share, goal = f"prefill {found['tokens']}", prefill_operations(config, found["tokens"]) / seconds / flops, PREFILL_GOAL
            rate, other = f"{found['tokens'] / seconds:.0f} tok/s", theirs.get(name)
            prefill[found["tokens"]] = seconds
        else:
            kv = found["batch"] * found["context"] * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
            name, share, goal = f"decode {found['batch']} × {found['context']}", (weights + kv) / seconds / bandwidth, DECODE_GOAL
            name, other = f"{name}, {found['sampling']}", theirs.get(name)
            rate = f"{seconds * 1e3:.2f} ms a step"
        met &= share >= goal
        compared = f"{other * 1e3:.1f} ms | {other / seconds:.2f}" if other else "– | –"
        print(f"| {name} | {rate} | {share:.0%} | {goal:.0%} | {compared} |", flush=True)
    return measure_handoff(folder, prefill[4_096]) and met


def measure_handoff(folder, prefill):
    """Measures the copy of a prompt of 4,096 tokens from another process's memory on the same card. Returns whether the goals are met."""
    output, error = run_bench("transports", folder, 4_096, seconds=120)
    if error:
        print(f"\ncuda_ipc: {error}", flush=True)
        return False
    found = json.loads(output.splitlines()[-1])
    rate, share = 2 * found["bytes"] / found["seconds"], found["plain_seconds"] / found["seconds"]
    added = found["seconds"] / prefill
    print("\n| 4,096 tokens from another process | goal |\n|---|---|")
    print(f"| cuda_ipc: {rate / 1e12:.2f} TB/s (read + write), {share:.0%} of a plain copy | {COPY_GOAL:.0%} |")
    print(f"| adds {added:.1%} to the time of its prefill | {HANDOFF_GOAL:.0%} |")
    print(f"| decode from the copied blocks: {'equal' if found['equal'] else 'DIFFERENT'} | equal |", flush=True)
    return found["equal"] and share >= COPY_GOAL and added <= HANDOFF_GOAL


def transformers_speed(model):
    """Returns the seconds that transformers needs for each workload: prompts with the last token's logits, and decode steps."""
    found = {}
    with torch.no_grad():
        for tokens in (4_096, 16_384):
            prompt = torch.randint(0, 1_000, (1, tokens), device="cuda")
            found[f"prefill {tokens}"] = seconds_of(lambda: model(prompt, use_cache=False, logits_to_keep=1), rounds=2)
        for batch in (1, 32):
            prompt = torch.randint(0, 1_000, (batch, 2_048), device="cuda")
            cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
            token = prompt[:, :1]

            def steps():
                for _ in range(DECODE_STEPS):
                    model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)

            found[f"decode {batch} × 2048"] = seconds_of(steps, rounds=2) / DECODE_STEPS
            del cache
    return found


def main():
    card = torch.cuda.get_device_properties(0)
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    print(f"{time.strftime('%Y-%m-%d')}, {card.name}, driver {driver.stdout.strip()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| Model | Weights | Largest error of the logits | Greedy tokens, replayed steps and moved blocks |\n|---|---|---|---|")
    # The reference is computed in single precision, not in TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    passed, tool = True, sanitizer()
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, config, dtype) in enumerate(small_models()):
            passed &= check_model(name, config, dtype, pathlib.Path(folder) / str(i))
        output, error = run_bench("nccl", pathlib.Path(folder) / "0")
        print(f"\nNCCL, from the card to itself (it refuses two ranks on one card): {(output or error).strip()}", flush=True)
        passed &= not error and output.startswith("equal")
    large = pathlib.Path(tempfile.mkdtemp())
    try:
        passed &= measure_speed(large)
        passed &= measure_conversations(large)
    finally:
        shutil.rmtree(large)
    with tempfile.TemporaryDirectory() as folder:
        passed &= sanitize(tool, pathlib.Path(folder))
    return 0 if passed else 1


sys.exit(main())
