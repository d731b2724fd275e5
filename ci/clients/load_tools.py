"""Runs the load tools aiperf and guidellm against a simulated cluster: python load_tools.py TANDEM FOLDER. Started by `clients.sh load-tools`.

Exits with 1 if a request failed, or if a tool saw no cached tokens although it repeated what it had sent before."""

import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster import Cluster

# Endpoint of aiperf, and the turns of a conversation. aiperf sends one turn only to plain completions.
ENDPOINTS = {"chat": 3, "completions": 1, "responses": 3, "messages": 3}
# The simulated device ends an answer long before its limit. aiperf ignores the usage of a response that ends at the limit.
CONVERSATIONS, PROMPT_TOKENS, ANSWER_TOKENS, CONCURRENCY = 20, 200, 1000, 4
LIMIT_SECONDS = 300


def byte_tokenizer(folder):
    """Writes the tokenizer of `--engine sim`, in which each byte is a token, for tools that make prompts of a given length."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def run(command, log):
    with open(log, "wb") as output:
        status = subprocess.run([str(part) for part in command], stdout=output, stderr=output, timeout=LIMIT_SECONDS).returncode
    assert status == 0, f"{command[0]} failed, see {log}:\n{log.read_text(errors='replace')[-2000:]}"


def aiperf(folder, cluster, tokenizer, endpoint, turns):
    """Returns the requests that succeeded and failed, the prompt tokens and the cached ones."""
    results = folder / f"aiperf-{endpoint}"
    command = [folder / "aiperf/bin/aiperf", "profile", "--model", cluster.model, "--url", cluster.url, "--endpoint-type", endpoint, "--streaming"]
    command += ["--tokenizer", tokenizer, "--use-server-token-count", "--concurrency", CONCURRENCY, "--num-conversations", CONVERSATIONS]
    command += ["--conversation-turn-mean", turns, "--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", ANSWER_TOKENS]
    # aiperf counts an answer without text as a failure, and the simulated device may end one at once.
    command += ["--extra-inputs", "min_tokens:8"]
    run([*command, "--output-artifact-dir", results, "--ui", "none", "--workers-max", 2], folder / f"logs/aiperf-{endpoint}.log")
    found = json.loads((results / "profile_export_aiperf.json").read_text())
    names = ("request_count", "error_request_count", "total_usage_prompt_tokens", "total_usage_prompt_cache_read_tokens")
    return [int(found[name]["avg"]) if found.get(name) else 0 for name in names]


def guidellm(folder, cluster, tokenizer):
    results = folder / "guidellm.json"
    command = [folder / "guidellm/bin/guidellm", "run", "--backend", f"kind=openai_http,target={cluster.url},model={cluster.model}"]
    command += ["--profile", f"kind=concurrent,streams={CONCURRENCY}", "--constraint", f"kind=max_requests,count={3 * CONVERSATIONS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={results}", "--disable-progress"]
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens=30,turns=3"
    run([*command, "--data", data], folder / "logs/guidellm.log")
    [benchmark] = json.loads(results.read_text())["benchmarks"]
    totals, done = benchmark["metrics"]["request_totals"], benchmark["requests"]["successful"]
    counts = [sum(request[name] for request in done) for name in ("prompt_tokens", "cached_tokens")]
    return [totals["successful"], totals["errored"], *counts]


def main(tandem, folder):
    folder = Path(folder)
    tokenizer = byte_tokenizer(folder / "byte-tokenizer")
    cluster = Cluster(tandem, folder / "logs", "load-tools", "sim", "--engine", "sim", "--sim-speedup", "10")
    try:
        rows = [(f"aiperf, {endpoint}", turns, aiperf(folder, cluster, tokenizer, endpoint, turns)) for endpoint, turns in ENDPOINTS.items()]
        rows.append(("guidellm, chat", 3, guidellm(folder, cluster, tokenizer)))
        cluster.check()
    finally:
        cluster.end()
    print("| Tool | Requests | Errors | Prompt tokens | Cached |\n|---|---|---|---|---|")
    for name, _, counts in rows:
        print(f"| {name} | " + " | ".join(map(str, counts)) + " |")
    if any(errors or not done or turns > 1 and not cached for _, turns, (done, errors, _, cached) in rows):
        sys.exit("load_tools.py: requests failed, or no cached tokens were reported")


if __name__ == "__main__":
    main(*sys.argv[1:])
