"""A llama.cpp server without a model, whose answers a script writes, for agents.sh.

It caches prompts in blocks, as servers do, and remembers all prompts, so that the cached tokens that a client reports can be compared with those
that its requests had in common.
"""

import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

GOLDENS = Path(__file__).parent.parent / "goldens"
BLOCK = 16
# The time limit for an answer that hangs until the client disconnects.
HANG_SECONDS = 60

# The answer to requests that are no scenario's: for titles, and Codex's for a summary.
ASIDE = "The numbers were read."


class Tokens:
    """The tokenizer of all models here: that of Qwen 2 with few merges, and the special tokens of a template."""

    def __init__(self, format):
        file = json.loads((GOLDENS / "tokenizers.json").read_text())["json"]["qwen2"]["file"]
        first = 1 + max([*file["model"]["vocab"].values(), *(token["id"] for token in file["added_tokens"])])
        self.special = {name: first + index for index, name in enumerate(format.specials)}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        named = self.special.items()
        file["added_tokens"] = [{"id": id, "content": name, "special": name not in format.words, **plain} for name, id in named]
        file["post_processor"] = None
        self.file, self.vocab = file, file["model"]["vocab"]
        # The characters that stand for the bytes in a vocabulary of bytes.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
        self.bytes = {id: bytes(byte_of[char] for char in text) for text, id in self.vocab.items() if all(char in byte_of for char in text)}
        self.bytes |= {id: name.encode() for name, id in self.special.items()}
        self.of_byte = {byte: self.vocab[char] for char, byte in byte_of.items()}
        self.split = re.compile("|".join(re.escape(name) for name in self.special))
        self.size = first + len(self.special)

    def text(self, ids):
        return b"".join(self.bytes[id] for id in ids).decode(errors="replace")

    def ids(self, text):
        """Returns the ids of an answer: a token for each special token and for each byte of the rest."""
        ids, at = [], 0
        for found in self.split.finditer(text):
            ids += [self.of_byte[byte] for byte in text[at : found.start()].encode()] + [self.special[found.group()]]
            at = found.end()
        return ids + [self.of_byte[byte] for byte in text[at:].encode()]

    def write_model(self, folder, format):
        """Writes what Tandem reads of a model: tokenizer and chat template."""
        folder.mkdir(parents=True, exist_ok=True)
        ends = [self.special[end] for end in format.ends]
        config = {
            "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 1 << 17, "vocab_size": self.size, "eos_token_id": ends,
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        (folder / "tokenizer.json").write_text(json.dumps(self.file))
        named = {"eos_token": format.ends[0]} | ({"bos_token": format.begin} if format.begin else {})
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / "chat_template.jinja").write_text((GOLDENS / f"templates/{format.template}.jinja").read_text())


@dataclass
class Answer:
    """An answer of the script. `ends`: `whole`, `limit` (cut by the limit on tokens), `hang` (never, until the client disconnects)."""

    text: str | None = None
    call: tuple | None = None
    ends: str = "whole"
    # A cut answer ends before this text.
    before: str = ""


@dataclass
class Script:
    """The answers to a scenario's requests in order. A request is the scenario's if its prompt has all these texts."""

    marks: tuple
    answers: list
    # Answers to prompts that have a certain text, whatever their place.
    cases: list = field(default_factory=list)
    prompts: list = field(default_factory=list)
    requests: list = field(default_factory=list)
    surplus: int = 0
    hangs: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)


class Engine:
    def __init__(self, format, context):
        self.format, self.context, self.tokens = format, context, Tokens(format)
        self.lock, self.cached, self.script = threading.Lock(), set(), Script((), [])
        handler = type("Handler", (Handler,), {"engine": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def forget(self):
        """Empties the cache."""
        with self.lock:
            self.cached.clear()

    def take(self, ids):
        """Returns the answer to a prompt, the number of cached tokens, and the script if the prompt is the scenario's."""
        prompt = self.tokens.text(ids)
        with self.lock:
            cached, chain = 0, 0
            for at in range(0, len(ids) - len(ids) % BLOCK, BLOCK):
                chain = hash((chain, *ids[at : at + BLOCK]))
                cached += BLOCK if chain in self.cached and cached == at else 0
                self.cached.add(chain)
            cached = min(cached, len(ids) - 1)
            script = self.script
            special = next((answer for mark, answer in script.cases if mark in prompt), None)
            if not script.marks or not all(mark in prompt for mark in script.marks):
                return self.format.text(prompt, ASIDE), Answer(), cached, None
            script.prompts.append(prompt)
            script.requests.append((len(ids), cached))
            script.surplus += not (special or script.answers)
            answer = special or (script.answers.pop(0) if script.answers else Answer("Nothing is left to do."))
        if answer.call:
            text = self.format.call(prompt, *answer.call)
        else:
            text = self.format.text(prompt, answer.text)
        return (text[: text.index(answer.before)] if answer.before else text), answer, cached, script


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        tokens = self.engine.tokens
        self.reply({
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": "m", "meta": {"n_vocab": tokens.size}}]},
            "/props": {
                "default_generation_settings": {"n_ctx": self.engine.context}, "total_slots": 4, "eos_token": self.engine.format.ends[0],
                "model_path": "none", "build_info": "script", "media_marker": "script",
            },
        }.get(self.path, {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self.reply({"tokens": self.engine.tokens.ids(body["content"])})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            self.answer(body)
        except OSError:
            pass

    def event(self, value):
        data = f"data: {json.dumps(value)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def answer(self, body):
        ids = body["prompt"]
        text, answer, cached, script = self.engine.take(ids)
        progress = {"total": len(ids), "cache": cached, "processed": len(ids), "time_ms": 0}
        self.event({"content": "", "tokens": [0], "stop": False, "tokens_predicted": 0, "prompt_progress": progress})
        generated = self.engine.tokens.ids(text)
        is_cut = len(generated) > body["n_predict"]
        generated = generated[: body["n_predict"]]
        for count, id in enumerate(generated, 1):
            self.event({"content": "", "tokens": [id], "stop": False, "tokens_predicted": count})
        if answer.ends == "hang":
            script.hangs.set()
            self.wait_until_closed()
            script.aborted.set()
            return
        stop = "limit" if is_cut or answer.ends == "limit" else "eos"
        self.event({"stop": True, "stop_type": stop, "tokens_predicted": len(generated), "timings": {"cache_n": cached}})
        self.wfile.write(b"0\r\n\r\n")

    def wait_until_closed(self):
        self.connection.settimeout(HANG_SECONDS)
        try:
            while self.connection.recv(1, socket.MSG_PEEK):
                time.sleep(0.05)
        except OSError:
            pass
