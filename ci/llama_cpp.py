"""Checks Tandem in front of a llama.cpp server: python3 llama_cpp.py TANDEM LLAMA_SERVER MODEL FOLDER. Started by llama_cpp.sh."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# The time limit for each wait.
LIMIT_SECONDS = 120
GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"]}
MESSAGES = [{"role": "user", "content": "Explain in two sentences what a tandem bicycle is, and name one advantage of riding it."}]
CHARACTERS = "<|im_start|>user\nRepeat exactly: 😀🚀 你好 🎉<|im_end|>\n<|im_start|>assistant\n😀🚀 你好 "


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def call(port, path, body=None):
    """Returns the status and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def result(port, path, body=None):
    status, text = call(port, path, body)
    assert status == 200, f"{path}: HTTP {status}: {text}"
    return json.loads(text)


def until(what, holds):
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        assert time.monotonic() < end, f"not within {LIMIT_SECONDS} s: {what}"
        time.sleep(0.05)


class Checks:
    def __init__(self, tandem, server, model, folder):
        self.commands, self.folder, self.processes = (tandem, server, model), Path(folder), []
        self.port, self.listen = free_port(), free_port()

    def start(self, name, *command):
        log = open(self.folder / f"{name}.log", "ab")
        # `tandem up` keeps its key in the state folder.
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "XDG_STATE_HOME": str(self.folder)})
        self.processes.append(process)
        return process

    def start_server(self):
        _, server, model = self.commands
        settings = ["--alias", "smollm", "--parallel", "2", "--ctx-size", "4096", "--metrics"]
        process = self.start("server", server, "-m", model, "--host", "127.0.0.1", "--port", str(self.port), *settings)
        until("the server is ready", lambda: call(self.port, "/health")[0] == 200)
        return process

    def start_tandem(self):
        arguments = ["up", "--engine", "llama-cpp", "--engine-url", f"http://127.0.0.1:{self.port}"]
        self.start("tandem", self.commands[0], *arguments, "--listen", f"127.0.0.1:{self.listen}")
        until("tandem is ready", lambda: call(self.listen, "/ready")[0] == 200)

    def server_cached(self):
        """Prompt tokens that the server has found in its cache since its start."""
        return int(re.search(r"^llamacpp:prompt_tokens_cached_total (\d+)", call(self.port, "/metrics")[1], re.M)[1])

    def answer(self, path, **body):
        """Returns an answer of Tandem, and the tokens that the server found for it."""
        before = self.server_cached()
        answer = result(self.listen, path, {"model": "smollm", "temperature": 0, **body})
        return answer, self.server_cached() - before

    def idle(self):
        return not any(slot["is_processing"] for slot in result(self.port, "/slots"))

    def own_answer(self, prompt, tokens):
        body = {"content": prompt, "add_special": False, "parse_special": True}
        ids = result(self.port, "/tokenize", body)["tokens"]
        return result(self.port, "/completion", {"prompt": ids, "n_predict": tokens, "cache_prompt": False, **GREEDY})["content"]

    def chat_answers_are_the_servers(self):
        for round in range(2):
            answer, cached = self.answer("/v1/chat/completions", messages=MESSAGES, max_tokens=40)
            usage = answer["usage"]
            reported = usage["prompt_tokens_details"]["cached_tokens"]
            assert reported == cached, f"{reported} tokens are reported, the server counted {cached}"
            assert (reported > 0) == (round == 1), f"request {round + 1} had {reported} cached tokens"
            assert answer.get("cached_tokens_source", "worker") == "worker", answer
        prompt = result(self.port, "/apply-template", {"messages": MESSAGES})["prompt"]
        own, text = self.own_answer(prompt, 40), answer["choices"][0]["message"]["content"]
        assert own == text, f"the server generates {own!r}, Tandem has {text!r}"
        print(f"chat: the server's text, {reported} of {usage['prompt_tokens']} tokens cached as the server counts")

    def characters_of_several_tokens_are_whole(self):
        answer, _ = self.answer("/v1/completions", prompt=CHARACTERS, max_tokens=12)
        own, text = self.own_answer(CHARACTERS, 12), answer["choices"][0]["text"]
        assert own.rstrip("\ufffd") == text.rstrip("\ufffd") and "🎉" in text, f"the server generates {own!r}, Tandem has {text!r}"
        print(f"characters of several tokens: {text!r}")

    def stop_string_ends_an_answer_with_its_count(self):
        answer, cached = self.answer("/v1/chat/completions", messages=MESSAGES, max_tokens=200, stop=[" bicycle"])
        assert answer["choices"][0]["finish_reason"] == "stop", answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached > 0, (answer, cached)
        until("the slot is free", self.idle)
        print("stop string: the slot is free, the count is reported")

    def abort_frees_the_slot(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.listen, timeout=LIMIT_SECONDS)
        body = {"model": "smollm", "prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        connection.getresponse().readline()
        assert not self.idle(), "the request does not run"
        begin = time.monotonic()
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        until("the slot is free", self.idle)
        print(f"abort: the slot is free after {time.monotonic() - begin:.2f} s")

    def what_the_server_lacks_is_refused(self):
        for extra in ({"cache_salt": "tenant"}, {"min_tokens": 3}):
            status, text = call(self.listen, "/v1/completions", {"model": "smollm", "prompt": "a", **extra})
            assert status == 400 and "llama.cpp" in text, f"{extra}: HTTP {status}: {text}"
        print("cache_salt and min_tokens: refused")

    def restarted_server_is_used_again(self, server):
        server.send_signal(signal.SIGKILL)
        server.wait()
        self.start_server()
        until("tandem answers again", lambda: call(self.listen, "/v1/completions", {"model": "smollm", "prompt": "a", "max_tokens": 1})[0] == 200)
        print("restart: the server is used again")

    def run(self):
        server = self.start_server()
        self.start_tandem()
        self.chat_answers_are_the_servers()
        self.characters_of_several_tokens_are_whole()
        self.stop_string_ends_an_answer_with_its_count()
        self.abort_frees_the_slot()
        self.what_the_server_lacks_is_refused()
        self.restarted_server_is_used_again(server)

    def stop(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    checks = Checks(*sys.argv[1:])
    try:
        checks.run()
    except BaseException:
        print(f"failed; the logs are in {checks.folder}", file=sys.stderr)
        raise
    finally:
        checks.stop()
    print("all checks passed")


main()
