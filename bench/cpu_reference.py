"""Runs llama.cpp for bench/cpu.py, with the same protocol as `crates/devices/benches/cpu.rs --stdin`: each line of the input names a workload, and
the answer is the seconds of one round. The tokens, the chunks and the tokens with logits are the same as in our benchmark.

The first line of the output is llama.cpp's description of its build."""

import argparse
import sys
import time

import llama_cpp as api

CHUNK = 512
DECODED = 32
CONTEXT_MAX = 2_048
BATCH_MAX = 8
# The context length for each number of sequences. It is shorter for several sequences, because llama.cpp allocates the KV of all sequences
# at once.
CELLS = {1: 2_304, BATCH_MAX: 768}
TYPE_F16 = 1


@api.llama_log_callback
def quiet(_level, _text, _data):
    pass


class Context:
    """A llama.cpp context with the KV of several sequences."""

    def __init__(self, model, sequences, settings):
        params = api.llama_context_default_params()
        params.n_ctx = sequences * CELLS[sequences]
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = int(settings.flash)
        params.kv_unified = settings.unified
        params.type_k = params.type_v = TYPE_F16
        params.no_perf = True
        self.context = api.llama_init_from_model(model, params)
        if not self.context:
            sys.exit("llama.cpp made no context: try fewer sequences")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(CHUNK, 0, 1)
        vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.tokens = [(position * 7919 + 13) % vocabulary for position in range(CONTEXT_MAX + DECODED)]

    def seconds(self, kind, length, sequences):
        kept = 0 if kind == "prefill" else length
        for sequence in range(sequences):
            api.llama_memory_seq_rm(self.memory, sequence, kept, -1)
            self.prefill(sequence, api.llama_memory_seq_pos_max(self.memory, sequence) + 1, kept)
        start = time.perf_counter()
        if kind == "prefill":
            self.prefill(0, 0, length)
        else:
            for position in range(length, length + DECODED):
                self.decode([(position, sequence, True) for sequence in range(sequences)])
        return time.perf_counter() - start

    def prefill(self, sequence, start, end):
        for first in range(start, end, CHUNK):
            last = min(first + CHUNK, end)
            self.decode([(position, sequence, position == end - 1) for position in range(first, last)])

    def decode(self, entries):
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (position, sequence, logits) in enumerate(entries):
            batch.token[index] = self.tokens[position]
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = logits
        status = api.llama_decode(self.context, batch)
        if status != 0:
            sys.exit(f"llama_decode failed with {status}")
        api.llama_synchronize(self.context)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--flash", action="store_true", help="flash attention")
    parser.add_argument("--unified", action="store_true", help="one KV buffer for all sequences")
    parser.add_argument("model")
    settings = parser.parse_args()
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(settings.model.encode(), api.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {settings.model}: give another model")
    print(api.llama_print_system_info().decode().strip(" |"), flush=True)
    contexts = {}
    for line in sys.stdin:
        match line.split():
            case ["prefill", length]:
                workload = ("prefill", int(length), 1)
            case ["decode", after, sequences]:
                workload = ("decode", int(after), int(sequences))
            case _:
                sys.exit(f"unknown workload: {line!r}")
        sequences = workload[2]
        if sequences not in contexts:
            contexts[sequences] = Context(model, sequences, settings)
        print(contexts[sequences].seconds(*workload), flush=True)


main()
