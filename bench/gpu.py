"""Is the CUDA back end right, and how fast is it? Run by bench/gpu.sh."""

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
# Of the logits' size.
ERROR_MAX = {torch.bfloat16: 1e-2, torch.float16: 3e-3}
# Two likeliest tokens that are nearer than this are a tie.
TIE = 5e-2
# Qwen3-8B.
LARGE = dict(vocab_size=151_936, hidden_size=4_096, intermediate_size=12_288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
LAYERS = int(os.environ.get("BENCH_LAYERS", "36"))
# What is asked of a card: shares of what it does at its best (issue 6).
PREFILL_GOAL, DECODE_GOAL = 0.6, 0.8
# Of a plain copy's bandwidth, and of a prompt's time to its first token.
COPY_GOAL, HANDOFF_GOAL = 0.7, 0.05
DECODE_STEPS = 16
# All of it takes less than eight minutes.
ENDS = time.monotonic() + 470


def within(command, seconds, errors=subprocess.STDOUT):
    """What it gave: exit status and output; no status when it took longer. Whatever it started ends with it."""
    run = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        said = run.communicate(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        said = run.communicate()
        return subprocess.CompletedProcess(command, None, *said)
    return subprocess.CompletedProcess(command, run.returncode, *said)


def ours(*arguments, seconds=60):
    """What it printed, or why there is none of it: it failed, or was not done in this time or in what is left of all."""
    seconds = min(seconds, ENDS - time.monotonic())
    done = within([OURS, *arguments], seconds, subprocess.PIPE)
    if done.returncode is None:
        return None, f"{arguments[0]}: not done after {max(seconds, 0):.0f} seconds. {done.stdout}{done.stderr}"
    if done.returncode:
        return None, f"{arguments[0]}: {done.stdout}{done.stderr}"
    return done.stdout, ""


def small_models():
    """Name, configuration, type of the weights."""
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
    # Releases of transformers differ in what they call a model's type; all follow torch's own default.
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    torch.set_default_dtype(torch.float32)
    # Biases and norms start as zeros and ones, which would hide what is done with them.
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def right(name, config, dtype, folder):
    """Logits in one piece and in many, and greedy tokens, against the same weights in single precision."""
    model = random_model(config, dtype)
    model.save_pretrained(folder)
    model = model.float()
    tokens = torch.randint(0, config.vocab_size, (700,), device="cuda")
    listed, failures = ",".join(map(str, tokens.tolist())), []
    with torch.no_grad():
        expected = model(tokens[None]).logits[0].cpu().numpy()
    worst = 0.0
    for chunk in (700, 193, 64, 1):
        said, wrong = ours("logits", folder, listed, chunk, folder / "logits")
        if wrong:
            failures.append(" ".join(wrong.split()))
            break
        found = numpy.fromfile(folder / "logits", dtype=numpy.float32).reshape(expected.shape)
        worst = max(worst, float(numpy.linalg.norm(found - expected) / numpy.linalg.norm(expected)))
        sequence = tokens.tolist()
        for step, token in enumerate(map(int, said.split(","))):
            with torch.no_grad():
                row = model(torch.tensor([sequence], device="cuda")).logits[0, -1]
            if row.max() - row[token] > TIE * row.std():
                failures.append(f"chunks of {chunk}: greedy token {step} is {token}, not {int(row.argmax())}")
                break
            sequence.append(token)
    if not worst < ERROR_MAX[dtype]:
        failures.append(f"logits are wrong by {worst:.2e} of their size")
    # Tokens of sequences that continue together, and blocks received from another engine.
    for check in ("replayed", "transfer"):
        said, wrong = ours(check, folder)
        if wrong or said.strip() != "equal":
            failures.append(" ".join((wrong or f"{check}: {said}").split()))
    print(f"| {name} | {str(dtype).removeprefix('torch.')} | {worst:.1e} | {'; '.join(failures) or 'equal'} |", flush=True)
    return not failures


def sanitizer():
    """compute-sanitizer: the machine's, or the one that bench/gpu.sh build has fetched."""
    if found := shutil.which("compute-sanitizer"):
        return found
    for wheel in FOLDER.glob("nvidia_cuda_sanitizer_api-*.whl"):
        zipfile.ZipFile(wheel).extractall(FOLDER / "sanitizer")
    for found in (FOLDER / "sanitizer").glob("**/compute-sanitizer/compute-sanitizer"):
        for file in found.parent.iterdir():
            file.chmod(0o755)
        return found
    sys.exit("compute-sanitizer is missing: run bench/gpu.sh build again")


def clean(tool, folder):
    """No finding of compute-sanitizer: memory out of bounds, races in shared memory. In the time that is left."""
    print("\n| compute-sanitizer | Model | Findings |\n|---|---|---|")
    good = True
    for name, config, dtype in small_models()[1::2]:
        model = folder / re.sub(r"\W+", "-", name)
        random_model(config, dtype).save_pretrained(model)
        for check in ("memcheck", "racecheck"):
            left = ENDS - time.monotonic()
            done = within([tool, "--tool", check, "--error-exitcode", "9", OURS, "exercise", model], left)
            status = done.returncode
            found = "none" if status == 0 else "not known: no time was left" if status is None else " ".join(done.stdout.splitlines()[-12:])
            good &= found == "none"
            print(f"| {check} | {name} | {found} |", flush=True)
    return good


def tokenizer_file(path, size):
    """Bytes, and a word for every other id: random weights say nothing anyway."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġ{number}" for number in range(size - len(letters))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(path))


def converse(model):
    """A prefill and a decode worker on the one card."""
    tokenizer_file(model / "tokenizer.json", LARGE["vocab_size"])
    command = [FOLDER / "tandem", "up", "--engine", "cuda", "--model", model, "--prefill-workers", "1", "--prefill", "remote"]
    command += ["--listen", "127.0.0.1:0", "--log", "error", "--kv-capacity-tokens", "200000"]
    cluster = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    try:
        for line in cluster.stdout:
            if found := re.search(r"frontend +http://(\S+)", line):
                break
        else:
            print(f"tandem up ended with {cluster.wait()}: its error is above")
            return False
        print("\nTwo workers on the one card, Qwen3-8B's shape. ", end="")
        turns.measure(found[1], turns.shape_of()[1])
    finally:
        cluster.kill()
        cluster.wait()
    return True


def seconds_of(work, rounds=5):
    work()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def ceilings():
    """What the card does at its best: floating-point operations and bytes a second."""
    a, b = (torch.randn(8_192, 8_192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8_192**3 / seconds_of(lambda: a @ b)
    block = torch.empty(1 << 30, device="cuda", dtype=torch.int8)
    other = torch.empty_like(block)
    return flops, 2 * block.numel() / seconds_of(lambda: other.copy_(block))


def work_of(config, tokens):
    """Floating-point operations of a prompt without logits."""
    heads = config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim
    matrices = config.hidden_size * (2 * heads + kv + 3 * config.intermediate_size)
    return config.num_hidden_layers * (2 * tokens * matrices + 2 * tokens * tokens * heads)


def fast(folder):
    flops, bandwidth = ceilings()
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
    said, wrong = ours("speed", folder, seconds=240)
    if wrong:
        print(f"\n{wrong}", flush=True)
        return False
    for line in said.splitlines():
        found = json.loads(line)
        seconds = found["seconds"]
        if found["what"] == "prefill":
            name, share, goal = f"prefill {found['tokens']}", work_of(config, found["tokens"]) / seconds / flops, PREFILL_GOAL
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
    return handed_over(folder, prefill[4_096]) and met


def handed_over(folder, prefill):
    """A prompt of 4,096 tokens from another process's memory on the same card."""
    said, wrong = ours("transports", folder, 4_096, seconds=120)
    if wrong:
        print(f"\ncuda_ipc: {wrong}", flush=True)
        return False
    found = json.loads(said.splitlines()[-1])
    rate, share = 2 * found["bytes"] / found["seconds"], found["plain_seconds"] / found["seconds"]
    added = found["seconds"] / prefill
    print("\n| 4,096 tokens from another process | goal |\n|---|---|")
    print(f"| cuda_ipc: {rate / 1e12:.2f} TB/s (read + write), {share:.0%} of a plain copy | {COPY_GOAL:.0%} |")
    print(f"| adds {added:.1%} to the time of its prefill | {HANDOFF_GOAL:.0%} |")
    print(f"| what is decoded from it: {'equal' if found['equal'] else 'DIFFERENT'} | equal |", flush=True)
    return found["equal"] and share >= COPY_GOAL and added <= HANDOFF_GOAL


def transformers_speed(model):
    """Seconds by workload: prompts with the last token's logits, and steps of decoding sequences."""
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
    print("| Model | Weights | Logits wrong by | Greedy tokens, replayed steps and moved blocks |\n|---|---|---|---|")
    # Reference products in single precision, not in TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    good, tool = True, sanitizer()
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, config, dtype) in enumerate(small_models()):
            good &= right(name, config, dtype, pathlib.Path(folder) / str(i))
        said, wrong = ours("nccl", pathlib.Path(folder) / "0")
        print(f"\nNCCL, from the card to itself (it refuses two ranks on one): {(said or wrong).strip()}", flush=True)
        good &= not wrong and said.startswith("equal")
    large = pathlib.Path(tempfile.mkdtemp())
    try:
        good &= fast(large)
        good &= converse(large)
    finally:
        shutil.rmtree(large)
    with tempfile.TemporaryDirectory() as folder:
        good &= clean(tool, pathlib.Path(folder))
    return 0 if good else 1


sys.exit(main())
