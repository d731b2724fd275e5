#!/usr/bin/env python3
"""Prints what each GPU kernel should take on one H200 for Qwen3-8B's shape, from bytes, operations and the card's rates. docs/bench/gpu.md
has the output next to what was measured, and says how to read it.

    python3 bench/gpu_estimates.py
"""

# An H200's rates: bf16 GEMM and copy (read + write) as PyTorch reaches them, multiprocessors, and their clock under load.
GEMM, COPY, PROCESSORS, CLOCK = 790e12, 4.3e12, 132, 1.75e9
# What a multiprocessor does in one cycle: bytes of shared memory; floating-point operations of its tensor cores, of which `mma.sync` reaches the
# given share on Hopper; special functions (ex2); other 32-bit operations.
SHARED, TENSOR, MMA_SYNC, SPECIAL, SINGLE = 128, 4_096, 0.62, 16, 128
# The time of an empty kernel in a CUDA graph, and the shares of the ceilings that cuBLASLt and simple kernels reach.
LAUNCH, GEMM_SHARE, COPY_SHARE, GEMV_SHARE = 2e-6, 0.89, 0.85, 0.85

# What a multiprocessor reads from L2 in a second: 64 bytes a cycle. The fences, the counter and the barriers of a block that shares its tokens.
L2_BLOCK, ARRIVAL = 64 * CLOCK, 1e-6

# What the host adds to a step: lists, launches, reading the tokens.
HOST = 80e-6

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, DIM, VOCABULARY = 36, 4_096, 12_288, 32, 8, 128, 151_936
QKV = (HEADS + 2 * KV_HEADS) * DIM
KV_ROW = 2 * KV_HEADS * DIM * 2


def tile_cycles():
    """Returns the cycles of a thread block of attend_prompt for 64 positions: 128 rows, four warps, two fragments of 16 rows each."""
    loads = 4 * (16 + 32 + 32) * 512  # ldmatrix.x4: queries, keys, values; 512 bytes each
    shared = (loads + 2 * 64 * DIM * 2) / SHARED
    tensor = 4 * 128 * 64 * DIM / (TENSOR * MMA_SYNC)
    special, single = 128 * 64 / SPECIAL, 128 * 64 * 5 / SINGLE
    return shared, tensor, special, single


def rows(step, count, new, context):
    """Returns the kernels of a step: `count` sequences of `context` tokens, of which `new` are computed."""
    shared, tensor, special, single = tile_cycles()
    # Tensor cores and shared memory overlap; of the softmax, half overlaps with the other thread block of the multiprocessor.
    cycles = max(shared, tensor) + (special + single) / 2 + 200
    gemms = {"gemm qkv": (WIDTH, QKV, 2), "gemm attention out": (WIDTH, WIDTH, 8), "gemm gates": (WIDTH, 2 * FFN, 2), "gemm down": (FFN, WIDTH, 8)}
    tokens = count * new
    # Both are launched once a step.
    yield step, "rope + embed", tokens * (WIDTH * 6 + DIM * 4) / COPY, 2 * LAUNCH + tokens * (WIDTH * 6 + DIM * 4) / (COPY * COPY_SHARE), "a row of the embedding, and the rotations of a head"
    stream = lambda numbers, bytes_each: (numbers * bytes_each / COPY, LAUNCH + numbers * bytes_each / (COPY * COPY_SHARE))
    yield step, "rms_norm", *stream(tokens * WIDTH, 6), "4 bytes read, 2 written a number"
    for name, (inputs, outputs, written) in gemms.items():
        moved = 2 * inputs * (outputs + tokens) + written * tokens * outputs
        floor = max(2 * tokens * inputs * outputs / GEMM, moved / COPY)
        share = GEMM_SHARE if 2 * tokens * inputs * outputs / GEMM > moved / COPY else GEMV_SHARE
        yield step, name, floor, floor / share + LAUNCH, f"{2 * tokens * inputs * outputs / 1e9:.1f} GFLOP, {moved / 1e6:.0f} MB"
    yield step, "store_kv", *stream(tokens * QKV, 4), "2 bytes read, 2 written a number"
    if new > 1:
        scores = new * (context - new) + new * (new + 1) / 2
        flop = 4 * scores * HEADS * DIM
        tiles = scores * HEADS / 128 / 64
        parallel = PROCESSORS if new > 1_024 else 256 / 2
        # Tiles that thread blocks share: the results of eight parts are written, and the last blocks, 32 of them, read them out of L2.
        partial = tokens * 8 * HEADS * (DIM + 2) * 4 if new <= 1_024 else 0
        combined = partial / COPY + partial / (32 * L2_BLOCK) + ARRIVAL if partial else 0
        work = f"{flop / 1e12:.2f} TFLOP, {tiles:.0f} tiles of {cycles:.0f} cycles a multiprocessor" + (f", {partial / 1e6:.1f} MB of 8 parts" if partial else "")
        yield step, "attend_prompt", flop / GEMM, tiles * cycles / parallel / CLOCK + LAUNCH + combined, work
    else:
        moved = count * context * KV_ROW
        yield step, "attend_token", moved / COPY, LAUNCH * 1.5 + ARRIVAL + moved / (COPY * 0.82), f"{moved / 1e6:.1f} MB of KV; the last block combines"
    yield step, "swiglu", *stream(tokens * FFN, 6), "4 bytes read, 2 written a number"
    if new == 1:
        head = 2 * WIDTH * VOCABULARY + tokens * VOCABULARY * 4
        yield step, "gemm head", head / COPY, head / (COPY * 0.93) + LAUNCH, f"{head / 1e6:.0f} MB"
        row = VOCABULARY * 4
        # One thread block a row: a pass reads the row from L2. Each of 512 threads has 16 numbers in flight, which take 600 cycles.
        once = max(row / (512 * 16 * 4) * 600 / CLOCK, row / L2_BLOCK)
        yield step, "sample, greedy", tokens * row / COPY, once + LAUNCH, "1 pass over the row"
        yield step, "sample, top-k and top-p", tokens * row / COPY, 11 * once + 6 * 8e-6 + LAUNCH, "11 passes, 6 of them with histograms"


def main():
    shared, tensor, special, single = tile_cycles()
    print(f"A tile of attend_prompt (128 rows, 64 positions): shared memory {shared:.0f} cycles, tensor cores {tensor:.0f}, ex2 {special:.0f}, other {single:.0f}.\n")
    print("| Step | Kernel | Floor, µs | Estimate, µs | Work | Measured |\n|---|---|--:|--:|---|---|")
    steps = ("prompt 8192 after 8192", 1, 8_192, 16_384), ("prompt 128 after 32768", 1, 128, 32_896), ("decode 1 x 2048", 1, 1, 2_048), ("decode 32 x 2048", 32, 1, 2_048)
    for step in steps:
        for name, kernel, floor, estimate, work in rows(*step):
            print(f"| {name} | {kernel}{', twice' if kernel == 'rms_norm' else ''} | {floor * 1e6:.1f} | {estimate * 1e6:.1f} | {work} | *not measured* |")
    print("\n| Goal | Estimate |\n|---|--:|")
    for batch in (1, 32):
        for mode in ("greedy", "top-k and top-p"):
            floor, estimate = of_step(batch, 1, 2_048, mode)
            print(f"| decode {batch} × 2048, {mode}, of the bandwidth | {floor / (estimate + HOST):.0%} |")
    for tokens in (4_096, 16_384, 65_536):
        print(f"| prefill {tokens}, of the matmul rate | {operations(tokens) / GEMM / prefill(tokens):.0%} |")
    _, _, floor, estimate, _ = next(row for row in rows(*steps[0]) if row[1] == "attend_prompt")
    print(f"| attention of a 16k prompt's second half, of the matmul rate | {floor / estimate:.0%} |")
    print(f"| 128 new tokens after 32k cached ones, of the time of 32k | {of_step(1, 128, 32_896, '')[1] / prefill(32_768):.1%} |")
    print(f"| hand-off of 4k tokens, of the prefill's time | {2 * 4_096 * LAYERS * KV_ROW / COPY / prefill(4_096):.1%} |")


def of_step(count, new, context, mode):
    """Returns the floor and the estimate of a whole step in seconds."""
    floor, estimate = 0.0, 0.0
    for _, kernel, least, likely, _ in rows("", count, new, context):
        times = {"rope + embed": 1, "rms_norm": 2 * LAYERS + 1, "gemm head": 1}.get(kernel, LAYERS)
        if kernel.startswith("sample"):
            times = 1 if mode and mode in kernel else 0
        floor, estimate = floor + times * least, estimate + times * likely
    return floor, estimate


def prefill(tokens):
    """Returns the estimated seconds of a prompt, in chunks of 8,192 tokens."""
    return sum(of_step(1, min(8_192, tokens - done), min(done + 8_192, tokens), "")[1] + HOST for done in range(0, tokens, 8_192))


def operations(tokens):
    return LAYERS * (2 * tokens * WIDTH * (QKV + WIDTH + 3 * FFN) + 2 * tokens * tokens * HEADS * DIM)


if __name__ == "__main__":
    main()
