"""Drives coding agents against Tandem in front of a scripted engine: python3 run.py TANDEM PACKAGES FOLDER [FILTER]. Started by agents.sh."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from clients import Claude, Codex, Vibe
from engine import ASIDE, Answer, Engine, Script
from formats import FORMATS

START_SECONDS = 60
CONTENT = 'first line\n\t"quoted" \'single\' back\\slash \\n é 😀 </tool_call> {"a": 1}\n\nlast line\n'
SESSION_REQUESTS = 40
# The most characters at the end of a prompt that only open the answer.
TAIL_MAX = 200
# The number of characters of a result that are printed.
LINE_MAX = 160
# The least cached share of what a session's prompts make possible.
SHARE_MIN = 0.95


class Failed(Exception):
    pass


def check(holds, what):
    if not holds:
        raise Failed(what)


class Cluster:
    """`tandem up` in front of a scripted engine with a template."""

    def __init__(self, binary, format, folder, context):
        self.engine = Engine(format, context)
        self.engine.tokens.write_model(folder / "m", format)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.log = folder / "tandem.log"
        command = [binary, "up", "--engine", "llama-cpp", "--engine-url", self.engine.url(), "--model", str(folder / "m"), "--served-model-name", "m"]
        state = {**os.environ, "XDG_STATE_HOME": str(folder)}
        log = open(self.log, "wb")
        self.process = subprocess.Popen([*command, "--listen", f"127.0.0.1:{self.port}"], stdout=log, stderr=log, env=state)
        self.url = f"http://127.0.0.1:{self.port}"
        end = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if time.monotonic() > end or self.process.poll() is not None:
                self.stop()
                raise Failed(f"tandem is not ready; its log is {self.log}")
            time.sleep(0.1)

    def is_ready(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.engine.server.shutdown()


class Scenarios:
    """The scenarios of one agent, each with a home and a working directory of its own."""

    def __init__(self, cluster, kind, program, folder):
        self.cluster, self.kind, self.program, self.folder = cluster, kind, program, folder

    def agent(self, scenario):
        return self.kind(self.program, self.folder / scenario, self.cluster.url)

    def script(self, *answers):
        script = Script((self.kind.mark,), list(answers))
        self.cluster.engine.script = script
        return script

    def hello(self):
        script = self.script(Answer("Hello, it is the script."))
        turn = self.agent("hello").turn("Say hello.")
        self.expect(turn, "Hello, it is the script.", script)

    def tool_loop(self):
        agent = self.agent("loop")
        path = agent.work / "notes.txt"
        script = self.script(Answer(call=agent.write(path, CONTENT)), Answer(call=agent.command("cat notes.txt")), Answer("It is written."))
        self.expect(agent.turn("Write the notes."), "It is written.", script)
        check(path.exists(), "the file was not written")
        check(path.read_text() == CONTENT, f"the file has {path.read_text()!r}")
        check("last line" in script.prompts[2].split("first line")[-1], "the result of the second call is not in the prompt")
        return agent

    def second_turn(self):
        agent = self.tool_loop_in("second")
        script = self.script(Answer("You asked for notes."))
        self.expect(agent.turn("What did I ask for?", resume=True), "You asked for notes.", script)
        for text in ("Write the notes.", "It is written.", "What did I ask for?"):
            check(text in script.prompts[0], f"{text!r} is not in the second turn's prompt")

    def tool_loop_in(self, scenario):
        agent = self.agent(scenario)
        script = self.script(Answer(call=agent.write(agent.work / "notes.txt", CONTENT)), Answer("It is written."))
        self.expect(agent.turn("Write the notes."), "It is written.", script)
        return agent

    def deferred_tool(self):
        """Claude Code adds a tool to its list after the model has searched for it. The prompt's head must not change."""
        agent = self.agent("deferred")
        script = self.script(Answer(call=("ToolSearch", {"query": "select:CronList"})), Answer(call=("CronList", {})), Answer("No jobs."))
        self.expect(agent.turn("List the jobs."), "No jobs.", script)
        first, second, third = script.prompts
        same = len(os.path.commonprefix([first, second]))
        check(same > len(first) - TAIL_MAX, f"after the search, only {same} of {len(first)} characters of the prompt are the same")
        check("CronList" in second[same:] and "scheduled" in third[len(second) - TAIL_MAX :], "the tool was not described, or not run")

    def cut_call(self):
        """The limit on tokens ends an answer within a call, whose beginning is a command of its own."""
        agent = self.agent("cut")
        cut = Answer(call=agent.command("touch cut.txt; true and the rest of it"), ends="limit", before=" and the rest")
        script = self.script(cut, *[Answer("Then another step.")] * 8)
        turn = agent.turn("Make a file.")
        check(not (agent.work / "cut.txt").exists(), "the cut call was run")
        for prompt in script.prompts[1:]:
            check("Invalid" not in prompt.split("Make a file.")[-1], "the cut call was given to a tool")
        check(turn.text == "Then another step." or turn.errors, f"the turn ended with {turn.text!r}")
        said = turn.errors[-1] if turn.errors else f"continued, {len(script.prompts)} requests"
        after = self.script(Answer("Next turn."))
        self.expect(agent.turn("And now?", resume=True), "Next turn.", after)
        return said

    def interrupted_call(self):
        agent = self.agent("interrupted")
        call = agent.command("touch interrupted.txt; true and the rest of it")
        script = self.script(Answer(call=call, ends="hang", before=" and the rest"))
        process = agent.start("Make a file.")
        waited = script.hangs.wait(60)
        agent.kill(process)
        check(waited, "no request came")
        check(script.aborted.wait(20), "the engine's request was not ended")
        check(not (agent.work / "interrupted.txt").exists(), "the interrupted call was run")
        after = self.script(Answer("Next turn."))
        self.expect(agent.turn("And now?", resume=True), "Next turn.", after)

    def session(self):
        """A tool loop. Everything that one prompt had is possible in the next one."""
        agent = self.agent("session")
        self.cluster.engine.forget()
        calls = [Answer(call=agent.command(f"echo step {step}; cat /etc/hostname")) for step in range(1, SESSION_REQUESTS)]
        script = self.script(*calls, Answer("All steps are done."))
        turn = agent.turn("Do the steps.")
        self.expect(turn, "All steps are done.", script)
        prompts = [tokens for tokens, _ in script.requests]
        check(len(prompts) == SESSION_REQUESTS, f"{len(prompts)} requests instead of {SESSION_REQUESTS}")
        possible = sum(prompts[:-1])
        share = turn.cached_tokens / possible
        text = f"{turn.cached_tokens} of {turn.input_tokens} tokens cached ({turn.cached_tokens / turn.input_tokens:.1%}), {share:.1%} of the possible"
        check(abs(turn.input_tokens - sum(prompts)) <= 0.05 * sum(prompts), f"the client counts {turn.input_tokens} tokens, the engine {sum(prompts)}")
        check(share >= SHARE_MIN, text)
        return text

    def over_long(self):
        """The results of commands fill the context. The client must learn from the error that it has to shorten the conversation."""
        agent = self.agent("long")
        calls = [Answer(call=agent.command(f"seq {first} {first + 399}")) for first in range(10_000, 60_000, 1_000)]
        script = self.script(*calls)
        summary = Answer(f"<summary>{ASIDE}</summary>")
        marks = ("REMINDER: Do NOT call any tools", "Any tool call will be rejected")
        script.cases = [(ASIDE, Answer("All is read.")), *((mark, summary) for mark in marks)]
        turn = agent.turn("Read the numbers.", output_max=2_048, window=self.cluster.engine.context)
        check(not turn.errors, f"the client says {turn.errors}")
        check(turn.text == "All is read.", f"the client's text is {turn.text!r}")
        return f"{len(script.prompts)} requests"

    def unknown_context(self):
        """A client that does not know the context's length must at least show the server's message."""
        agent = self.agent("unknown")
        self.script(*[Answer(call=agent.command(f"seq {first} {first + 399}")) for first in range(10_000, 60_000, 1_000)])
        turn = agent.turn("Read the numbers.", output_max=2_048, window=None)
        check(any("context" in error.lower() or "too long" in error for error in turn.errors), f"{turn.errors}, {turn.text!r}")
        return turn.errors[-1]

    def expect(self, turn, text, script):
        check(not turn.errors, f"the client says {turn.errors}")
        check(turn.text == text, f"the client's text is {turn.text!r}, not {text!r}")
        check(not script.answers and not script.surplus, f"{len(script.answers)} answers are left, {script.surplus} more were needed")


ALL = ["hello", "tool_loop", "second_turn", "cut_call", "interrupted_call", "session"]
NAMES = {Claude: [*ALL, "deferred_tool"], Codex: ALL, Vibe: ALL}
# These run with a short context. Codex and mistral-vibe need a setting for its length.
LONG = {Claude: ["over_long"], Codex: ["over_long", "unknown_context"], Vibe: ["over_long", "unknown_context"]}


def run(binary, packages, folder, wanted):
    """Runs the scenarios whose titles contain `wanted`. Returns the number that ran and the number that failed."""
    vibe = packages.parent / "vibe/bin/vibe"
    programs = {Claude: packages / "claude_agent_sdk/_bundled/claude", Codex: packages / "codex_cli_bin/bin/codex", Vibe: vibe}
    kinds = [kind for kind in programs if kind is not Vibe or vibe.exists()]
    passed = []
    shutil.rmtree(folder, ignore_errors=True)
    for format in FORMATS:
        for context, named in ((1 << 17, NAMES), (3 << 14, LONG)):
            titles = [(kind, name, f"{kind.name} {format.template} {name}") for kind in kinds for name in named[kind]]
            titles = [title for title in titles if wanted in title[2]]
            place = folder / format.template
            cluster = Cluster(binary, format, place / str(context), context) if titles else None
            try:
                for kind, name, title in titles:
                    scenarios = Scenarios(cluster, kind, programs[kind], place / kind.name)
                    passed.append(reported(title, getattr(scenarios, name)))
            finally:
                if cluster:
                    cluster.stop()
    return len(passed), passed.count(False)


def reported(title, scenario):
    """Runs a scenario, and prints its line."""
    begin = time.monotonic()
    try:
        text = scenario()
        text = f"passed{f': {text}' if isinstance(text, str) else ''}"
    except Failed as failure:
        text = f"FAILED: {failure}"
    print(f"{title}: {text[:LINE_MAX]} ({time.monotonic() - begin:.1f} s)", flush=True)
    return text.startswith("passed")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    binary, packages, folder, *wanted = sys.argv[1:]
    count, failures = run(binary, Path(packages), Path(folder), "".join(wanted))
    print(f"{failures} of {count} scenarios failed; logs and homes are in {folder}" if failures or not count else f"all {count} scenarios passed")
    sys.exit(bool(failures or not count))


if __name__ == "__main__":
    main()
