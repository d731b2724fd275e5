"""Tables and goals from the results of bench/gpu.py."""

# The fractions of the card's highest measured rates that prefill, attention and decode should reach.
PREFILL, ATTENTION, DECODE = 0.60, 0.50, 0.80
# The largest share of the time of 32k tokens that 128 tokens after them may take.
CACHED = 0.15
# The largest fraction that a hand-off may add to a prompt's TTFT, and the smallest fraction of a plain copy's bandwidth.
HANDOFF, COPY = 0.05, 0.70
# How many times as fast as transformers a decode step should be, and decode with FP8 weights compared with bf16.
TRANSFORMERS, FP8 = 3.0, 1.6


def prefill_operations(model, tokens):
    """Returns the floating-point operations of a prefill without logits."""
    queries, kv = model.num_attention_heads * model.head_dim, 2 * model.num_key_value_heads * model.head_dim
    matrices = model.hidden_size * (2 * queries + kv + 3 * model.intermediate_size)
    return model.num_hidden_layers * (2 * tokens * matrices + 2 * tokens * tokens * queries)


def decode_bytes(model, batch, context):
    """Returns the bytes that a decode step must read: the weights without the embedding, and the KV."""
    weights = sum(rows * (columns[0] if columns else 1) for name, (rows, *columns) in model.tensors().items() if "embed_tokens" not in name)
    kv = batch * context * model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim
    return 2 * (weights + kv)


class Results:
    def __init__(self, lines):
        self.lines = lines

    def last(self, kind, **fields):
        """Returns the last line of this kind with these fields; None if there is none."""
        found = [line for line in self.lines if line["kind"] == kind and all(line.get(name) == value for name, value in fields.items())]
        return found[-1] if found else None

    def latest(self, kind, *keys):
        """Returns the last line for each combination of the keys."""
        return list({tuple(line.get(key) for key in keys): line for line in self.lines if line["kind"] == kind}.values())


def ceilings(results):
    """Returns the card's highest rates: floating-point operations per second and bytes per second; None if they were not measured."""
    gemm, copy = (results.last("kernel", case="ceiling", what=what) for what in ("gemm", "copy"))
    return (gemm["flop"] / gemm["seconds"], copy["bytes"] / copy["seconds"]) if gemm and copy else (None, None)


def goals(results, model):
    """Returns each goal: its name, the found value and the wanted one as texts, and whether it is met; None if it was not measured."""
    flops, bandwidth = ceilings(results)
    rows = []

    def goal(name, value, wanted, at_least=True, text="{:.0%}"):
        met = None if value is None else value >= wanted if at_least else value <= wanted
        rows.append((name, "–" if value is None else text.format(value), ("≥ " if at_least else "≤ ") + text.format(wanted), met))

    def ratio(line, work):
        return work(line) if line and flops else None

    def speed(**fields):
        return results.last("speed", **fields)

    for batch in (1, 32):
        for mode in ("greedy", "drawn"):
            line = speed(what="decode", batch=batch, context=2_048, sampling=mode)
            goal(f"decode {batch} × 2048, {mode}, of the bandwidth", ratio(line, lambda line: decode_bytes(model, batch, 2_048) / line["seconds"] / bandwidth), DECODE)
    for tokens in (4_096, 16_384, 65_536):
        line = speed(what="prefill", tokens=tokens)
        goal(f"prefill {tokens}, of the matmul rate", ratio(line, lambda line: prefill_operations(model, tokens) / line["seconds"] / flops), PREFILL)
    line = results.last("kernel", what="attend_prompt", case="prompt 8192 after 8192")
    goal("attention of a 16k prompt's second half, of the matmul rate", ratio(line, lambda line: line["flop"] / line["seconds"] / flops), ATTENTION)
    line = speed(what="cached", before=32_768, new=128)
    goal("128 new tokens after 32k cached ones, of the time of 32k", line and line["seconds"] / line["whole_seconds"], CACHED, at_least=False)
    copied, prompt = results.last("handoff"), speed(what="prefill", tokens=4_096)
    goal("hand-off of 4k tokens, of the prefill's time", copied["seconds"] / prompt["seconds"] if copied and prompt else None, HANDOFF, at_least=False)
    goal("copy from another process, of a plain copy's bandwidth", copied and copied["plain_seconds"] / copied["seconds"], COPY)
    for batch in (1, 32):
        ours, theirs = speed(what="decode", batch=batch, context=2_048, sampling="greedy"), results.last("transformers", batch=batch)
        goal(f"decode {batch} × 2048, times as fast as transformers", theirs["seconds"] / ours["seconds"] if ours and theirs else None, TRANSFORMERS, text="{:.1f}")
    goal("decode with FP8 weights (not built), times as fast as bf16", None, FP8, text="{:.1f}")
    return rows


def kernel_row(line, flops, bandwidth):
    """Returns a table's row. The ceiling that a kernel is closer to is the one that limits it."""
    seconds, shares = line["seconds"], []
    if line["flop"]:
        shares.append((line["flop"] / seconds / flops, f"{line['flop'] / seconds / 1e12:.1f} TFLOP/s"))
    shares.append((line["bytes"] / seconds / bandwidth, f"{line['bytes'] / seconds / 1e9:.0f} GB/s"))
    share, rate = max(shares)
    return f"| {line['case']} | {line['what']} | {seconds * 1e3:.4f} | {rate} | {share:.0%} |"


def report(lines, model):
    """Returns the tables as text, and whether every check has passed and no goal was missed."""
    results, text = Results(lines), []
    checks = results.latest("check", "part", "name")
    text += ["| Part | Check | Result |\n|---|---|---|"]
    text += [f"| {check['part']} | {check['name']} | {'ok' if check['ok'] else 'FAILED'}: {check['found']} |" for check in checks]
    flops, bandwidth = ceilings(results)
    timed = results.latest("kernel", "case", "what")
    if flops:
        text += ["", f"Ceilings: {flops / 1e12:.0f} TFLOP/s (GEMM), {bandwidth / 1e12:.2f} TB/s (copy, read + write)", ""]
        text += ["| Step | Kernel | ms | Rate | of the ceiling |\n|---|---|--:|--:|--:|"]
        text += [kernel_row(line, flops, bandwidth) for line in timed if line["case"] != "ceiling"]
    workloads = results.latest("speed", "what", "tokens", "before", "new", "batch", "context", "sampling")
    if workloads:
        text += ["", "| Workload | ms |\n|---|--:|"]
        for line in workloads:
            name = " ".join(str(line[key]) for key in ("what", "tokens", "before", "new", "batch", "context", "sampling") if key in line)
            text += [f"| {name} | {line['seconds'] * 1e3:.2f} |"]
    if copied := results.last("handoff"):
        text += ["", f"Memory of another process: mapped in {copied['open_seconds'] * 1e3:.2f} ms, unmapped in {copied['close_seconds'] * 1e3:.2f} ms; "
                 f"decode from the copied blocks is {'equal' if copied['equal'] else 'DIFFERENT'}."]
    if conversed := results.last("turns"):
        text += ["", f"Conversations: TTFT by turn {conversed['ttft_ms']} ms, TPOT {conversed['tpot_ms']} ms, {conversed['tokens_per_second']} tokens/s."]
    rows = goals(results, model)
    names = {True: "met", False: "missed", None: "not measured"}
    text += ["", "| Goal | Found | Wanted | |\n|---|--:|--:|---|"]
    text += [f"| {name} | {found} | {wanted} | {names[met]} |" for name, found, wanted, met in rows]
    parts = results.latest("part", "name")
    text += [""] + [f"Part {part['name']}: {'ended' if part['ok'] else 'FAILED or took too long'} after {part['seconds']} s." for part in parts]
    equal = all(line["equal"] for line in results.latest("handoff", "bytes"))
    passed = equal and all(check["ok"] for check in checks) and all(part["ok"] for part in parts)
    return "\n".join(text), passed and not any(met is False for *_, met in rows)
