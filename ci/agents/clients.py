"""Runs Claude Code, Codex and mistral-vibe without a terminal, for agents.sh."""

import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

TURN_SECONDS = 180


@dataclass
class Turn:
    """What a client printed: its last text, its errors, and its own counts of input tokens."""

    text: str = ""
    errors: list = field(default_factory=list)
    input_tokens: int = 0
    cached_tokens: int = 0
    output: str = ""


class Agent:
    def __init__(self, program, folder, url):
        self.program, self.url = program, url
        self.home, self.work = Path(folder) / "home", Path(folder) / "work"
        for path in (self.home, self.work):
            path.mkdir(parents=True)

    def start(self, prompt, resume=False, **limits):
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
        environment |= {"HOME": str(self.home), "NO_PROXY": "127.0.0.1", **self.environment(**limits)}
        command = [str(self.program), *self.arguments(prompt, resume, **limits)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.work, env=environment, text=True, start_new_session=True, **pipes)

    def turn(self, prompt, resume=False, **limits):
        process = self.start(prompt, resume, **limits)
        try:
            out, err = process.communicate(timeout=TURN_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill(process)
            return Turn(errors=[f"no end within {TURN_SECONDS} s"])
        turn = self.read(out)
        turn.output = out + err
        if process.returncode and not turn.errors:
            turn.errors.append(f"exit status {process.returncode}")
        return turn

    @staticmethod
    def kill(process):
        """Ends the client as a crash does, with its tools."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Claude(Agent):
    name = "claude-code"
    # A tool that only the agent's own requests have, not those for titles.
    mark = "Writes a file to the local filesystem"
    write_tool, command_tool = "Write", "Bash"

    def environment(self, output_max=8192, **_):
        return {
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "m", "ANTHROPIC_SMALL_FAST_MODEL": "m",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output_max), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        }

    def arguments(self, prompt, resume, **_):
        return ["-p", prompt, "--output-format", "json", "--permission-mode", "bypassPermissions", *(["--continue"] if resume else [])]

    def write(self, path, content):
        return "Write", {"file_path": str(path), "content": content}

    def command(self, command):
        return "Bash", {"command": command, "description": "Runs a step"}

    def read(self, out):
        try:
            result = json.loads(out.strip().splitlines()[-1])
        except (IndexError, ValueError):
            return Turn(errors=["no JSON on stdout"])
        turn = Turn(text=result.get("result") or "")
        if result.get("is_error"):
            turn.errors.append(turn.text)
        usages = result.get("modelUsage", {}).values()
        turn.cached_tokens = sum(usage["cacheReadInputTokens"] for usage in usages)
        turn.input_tokens = turn.cached_tokens + sum(usage["inputTokens"] + usage["cacheCreationInputTokens"] for usage in usages)
        return turn


class Codex(Agent):
    name = "codex"
    mark = "Runs a command in a PTY"

    def environment(self, **_):
        folder = self.home / "codex"
        folder.mkdir(exist_ok=True)
        return {"CODEX_HOME": str(folder)}

    def arguments(self, prompt, resume, window=131_072, **_):
        provider = f'model_providers.tandem={{name="Tandem",base_url="{self.url}/v1",wire_api="responses"}}'
        limit = ["-c", f"model_context_window={window}"] if window else []
        options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "m"]
        options += ["-c", "model_provider=tandem", "-c", provider, *limit]
        return ["exec", *options, *(["resume", "--last"] if resume else []), prompt]

    def write(self, path, content):
        return "exec_command", {"cmd": f"cat > '{path}' <<'END_OF_FILE'\n{content}END_OF_FILE"}

    def command(self, command):
        return "exec_command", {"cmd": command}

    def read(self, out):
        turn = Turn()
        for line in out.splitlines():
            event = json.loads(line) if line.startswith("{") else {}
            kind, item = event.get("type"), event.get("item", {})
            if kind == "item.completed" and item.get("type") == "agent_message":
                turn.text = item["text"]
            elif kind in ("error", "turn.failed"):
                turn.errors.append(event.get("message") or event["error"]["message"])
            elif kind == "turn.completed":
                usage = event["usage"]
                turn.input_tokens, turn.cached_tokens = usage["input_tokens"], usage["cached_input_tokens"]
        return turn


class Vibe(Agent):
    name = "vibe"
    mark = "Create or overwrite a UTF-8 file."

    def environment(self, output_max=8192, window=131_072, **_):
        folder = self.home / "vibe"
        folder.mkdir(exist_ok=True)
        provider = ["[[providers]]", 'name = "tandem"', f'api_base = "{self.url}/v1"']
        model = ["[[models]]", 'name = "m"', 'provider = "tandem"', f"max_output_tokens = {output_max}"]
        model += [f"max_context_length = {window}"] if window else []
        settings = ['active_model = "m"', "enable_telemetry = false", "enable_update_checks = false", "[experiments]", "enable = false"]
        (folder / "config.toml").write_text("\n".join([*settings, *provider, *model, ""]))
        return {"VIBE_HOME": str(folder)}

    def arguments(self, prompt, resume, **_):
        shutil.rmtree(self.export, ignore_errors=True)
        return ["-p", prompt, "--auto-approve", "--output", "json", "--output-dir", str(self.export), *(["--continue"] if resume else [])]

    @property
    def export(self):
        return self.home / "export"

    def write(self, path, content):
        return "write_file", {"path": str(path), "content": content}

    def command(self, command):
        return "bash", {"command": command}

    def read(self, out):
        try:
            result = json.loads((self.export / "export.json").read_text())
            # Nothing is printed if the turn fails.
            entries = json.loads(out or "[]")
        except (OSError, ValueError) as error:
            return Turn(errors=[f"no result: {error}"])
        turn = Turn(input_tokens=result["usage"]["input_tokens"], cached_tokens=result["usage"]["cached_input_tokens"])
        texts = [entry["content"] for entry in entries if entry["type"] == "message" and entry["role"] == "assistant"]
        turn.text = "".join(part.get("text", "") for part in texts[-1]) if texts else ""
        if result["outcome"] != "finished":
            message = (result["error"] or {}).get("message") or result["outcome"]
            turn.errors.append(message.splitlines()[-1])
        return turn
