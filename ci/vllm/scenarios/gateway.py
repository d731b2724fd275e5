"""A real Envoy with `tandem epp` sends questions to the vLLM server that has their document, also after faults; texts are those of vLLM alone.

Envoy runs with deploy/gateway/envoy.yaml. Eight documents, asked about at the same time, in chats and completions, streamed and whole: each
question reaches the server that has its document, and the servers find at least 99 % of the tokens that the picker's router has promised.
Clients that leave end their bookings within a second, and their requests in the servers. The picker, and then a server, is killed with SIGKILL
in use: while the picker is away, clients get Envoy's errors, and with the same key it finds all documents again. When the loss of a server is
detected, no request fails, and all reach the other one. The server takes part again after its restart.
"""

import os
import secrets
import threading
import time
from pathlib import Path

from client import Client, Gate, InBackground, Table, prose, seconds_until, together, wait_until
from cluster import PATIENT, READY_SECONDS, Process, Tandem, answers
from engines import BLOCK_SIZE, LAYOUTS, free_port
from scenarios.compare_routers import cached_tokens
from scenarios.counts import prefix_cache
from scenarios.faults import running, story
from scenarios.routing import index_equals_caches

LAYOUT = LAYOUTS["mixed"]
# One of the engines is another process afterwards.
CHANGES_ENGINES = True
CONFIGURATION = Path(__file__).parents[3] / "deploy/gateway/envoy.yaml"
DOCUMENTS, QUESTIONS, AT_ONCE = 8, 5, 4
# About as many tokens, so that one engine of 160 blocks can cache all documents. A word is at least one token.
DOCUMENT_WORDS = 450
DOCUMENT_TOKENS_MIN = DOCUMENT_WORDS // BLOCK_SIZE * BLOCK_SIZE
ANSWER_TOKENS = 8
OF_PROMISED_MIN = 0.99
# Together with the documents, all of this fits into an engine's cache.
STREAMS, LEFT_TOKENS, LONG_WORDS, LEAVE_SECONDS = 6, 300, 1_000, 2
BOOKING_SECONDS, ABORT_SECONDS = 1.0, 5.0
CLIENTS = 4


def question(document, number):
    """Returns a question about a document, for the endpoint at which all questions about it are asked."""
    text = prose(f"Document {document}", DOCUMENT_WORDS)
    asked = f"Question {number}: what about {prose(f'{document} {number}', 6)}?"
    if document % 2:
        return "completions", f"{text} {asked}"
    return "chat", [{"role": "system", "content": text}, {"role": "user", "content": asked}]


def ask_all(client, number, **options):
    """Asks a question about each document, four at a time: more would let a server's queue cost more than computing a document again. Half
    of the answers are streamed, other ones each time."""
    options |= {"max_tokens": ANSWER_TOKENS}
    streamed = lambda document: (document // 2 + number) % 2 == 0
    calls = [
        lambda document=document: client.ask(*question(document, number), stream=streamed(document), **options).check()
        for document in range(DOCUMENTS)
    ]
    return [answer for first in range(0, DOCUMENTS, AT_ONCE) for answer in together(calls[first : first + AT_ONCE])]


class Load:
    """Clients that send one short request after the other. Leaving the `with` block ends them."""

    def __init__(self, client):
        self.client, self.ended, self.answers = client, threading.Event(), []

    def __enter__(self):
        self.clients = InBackground([lambda number=number: self.ask(number) for number in range(CLIENTS)])
        wait_until("each client has several answers", lambda: len(self.since()) >= 3 * CLIENTS)
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.clients.results()

    def ask(self, number):
        # Shorter than a block, so that nothing is cached, and the load alone decides.
        prompt = prose(f"Load {number}", 5)
        while not self.ended.is_set():
            began = time.perf_counter()
            self.answers.append((began, self.client.ask("completions", prompt, stream=True, max_tokens=ANSWER_TOKENS)))
            if not self.answers[-1][1].complete:
                time.sleep(0.1)

    def since(self, start=0, end=float("inf")):
        """Returns the answers to requests that began in this time."""
        return [answer for began, answer in list(self.answers) if start <= began < end]

    def failed(self, *times):
        return [answer for answer in self.since(*times) if not answer.complete]


class Gateway:
    def __init__(self, stage, tandem):
        self.tandem, self.engines = tandem, list(stage.engines)
        self.workers = {f"decode-{number}": engine for number, engine in enumerate(self.engines)}
        # With another key, a picker that starts again would not find what is cached.
        self.key = stage.folder / "cluster.key"
        self.key.write_text(secrets.token_hex(32))
        self.key.chmod(0o600)
        clients, picker, admin = (free_port() for _ in range(3))
        self.listen, self.admin = f"127.0.0.1:{picker}", Client(f"127.0.0.1:{admin}")
        self.start_picker()
        configuration = stage.folder / "envoy.yaml"
        configuration.write_text(adapted(clients, picker))
        command = [os.environ["TANDEM_ENVOY"], "--concurrency", "1", "--disable-hot-restart", "--log-level", "warn", "-c", configuration]
        tandem.processes["envoy"] = Process("envoy", command, stage.folder)
        # The picker refuses requests for details of the cluster, which a gateway passes on for anyone.
        self.client = Client(f"127.0.0.1:{clients}", details=False)
        wait_until("Envoy has a picker and servers", lambda: answers(lambda: self.client.get("/health")[0] == 200), READY_SECONDS, 0.2)
        self.table = Table("what", "requests", "failed", "promised", "vLLM found", "seen")
        self.places, self.expected = None, []

    def start_picker(self):
        urls = ",".join(engine.url for engine in self.engines)
        model, ports = self.engines[0].folder / LAYOUT.model, ("--listen", self.listen, "--admin-listen", self.admin.address)
        # With smaller blocks than the servers', the router would promise parts of blocks.
        flags = ("--cluster-key-file", self.key, "--block-size", BLOCK_SIZE, *PATIENT)
        self.tandem.start("picker", "epp", "--engine-url", urls, "--model", model, *ports, *flags)
        self.tandem.ready(self.admin, "picker")
        self.wait_for_workers(2)

    def wait_for_workers(self, count):
        wait_until(f"{count} workers joined", lambda: self.admin.metric("tandem_router_workers", state="joined") == count, READY_SECONDS)

    def bookings(self):
        return self.admin.metric("tandem_router_bookings")

    def settle(self):
        """Waits until the index equals the engines' caches, and returns the blocks of each worker as a text."""
        wait_until("no request is booked", lambda: self.bookings() == 0, 10)
        sizes, _ = index_equals_caches(self.admin, self.workers, block=BLOCK_SIZE)
        return ", ".join(f"{worker} {blocks}" for worker, blocks in sizes.items())

    def counts(self):
        """Returns the tokens that the picker's router has promised when it placed prompts, those of the prompts of which it knows what vLLM found,
        and those that vLLM's metrics count: of all prompts, and the cached ones."""
        promised = self.admin.metric("tandem_router_overlap_blocks_sum") * BLOCK_SIZE
        return list(map(int, (promised, self.admin.metric("tandem_router_funnel_tokens_total", stage="prompt"), *prefix_cache(self.engines))))

    def ask(self, number):
        """Asks a question about each document through Envoy, and compares the texts with vLLM's own."""
        received = ask_all(self.client, number)
        other = [(answer.text, text) for answer, text in zip(received, self.expected[number]) if answer.text != text]
        assert not other, f"{len(other)} texts differ, such as {other[0][0]!r} from {other[0][1]!r}"
        return received

    def ask_where_cached(self, what, numbers):
        """Asks these questions. Each must reach the engine that has the document, and find what the picker's router has promised."""
        before = self.counts()
        rounds = [self.ask(number) for number in numbers]
        received = [answer for asked in rounds for answer in asked]
        prompt, found = sum(answer.prompt_tokens for answer in received), sum(map(cached_tokens, received))
        wait_until("no request is booked", lambda: self.bookings() == 0, 10)
        wait_until("vLLM counts the prompts", lambda: self.counts()[2] - before[2] >= prompt, 10)
        promised, compared, *counted = (now - then for now, then in zip(self.counts(), before))
        share, least = found / max(promised, 1), min(map(cached_tokens, received))
        seen = f"{share:.4f} of what was promised; {least} or more of each prompt; the router has compared {compared} of {prompt} tokens"
        self.table.row(what, len(received), 0, promised, found, seen)
        places = [[answer.server for answer in asked] for asked in rounds]
        assert all(asked == self.places for asked in places), f"questions reached other engines: {places}, not {self.places}"
        assert least >= DOCUMENT_TOKENS_MIN, f"only {least} tokens of a prompt were found"
        assert share >= OF_PROMISED_MIN, f"{found} tokens were found, and {promised} were promised"
        assert counted == [prompt, found], f"the answers have {prompt} tokens, {found} cached; vLLM's metrics {counted}"

    def documents(self):
        alone = Client(self.engines[0].url)
        for number in range(QUESTIONS + 2):
            self.expected.append([answer.text for answer in ask_all(alone, number, cache_salt="alone")])
        self.places = [answer.server for answer in self.ask(0)]
        counted = [self.places.count(address(engine)) for engine in self.engines]
        self.table.row("first question about each document", DOCUMENTS, 0, "", "", f"documents on each server: {counted}")
        assert all(counted) and sum(counted) == DOCUMENTS, f"the documents are not spread: {self.places}"
        self.settle()
        self.ask_where_cached(f"{QUESTIONS - 1} more questions about each document", range(1, QUESTIONS))
        self.table.row("index after them", 0, 0, "", "", f"equals the servers' caches: {self.settle()} blocks")

    def clients_leave(self):
        gate = Gate()
        asked = lambda number: self.client.ask("chat", story(f"Left {number}"), stream=True, max_tokens=LEFT_TOKENS, on_chunk=gate.of(number))
        streams = InBackground([lambda number=number: asked(number) for number in range(STREAMS)])
        wait_until("all streams have begun", lambda: gate.reached(STREAMS, 3))
        assert self.bookings() == STREAMS, f"{self.bookings()} bookings of {STREAMS} streams"
        gate.closed = True
        self.left("clients leave streams", streams.results(), ABORT_SECONDS)
        prompt, options = prose("Left before the answer", LONG_WORDS), {"max_tokens": LEFT_TOKENS, "leave": LEAVE_SECONDS}
        waiting = InBackground([lambda: self.client.ask("completions", prompt, **options)])
        wait_until("the prompt is booked", lambda: self.bookings() == 1, LEAVE_SECONDS, 0.01)
        # If the prompt is in prefill, vLLM ends its step first.
        self.left("client leaves before its answer", waiting.results(), 60)

    def left(self, what, left, abort_seconds):
        booked = seconds_until("no request is booked", lambda: self.bookings() == 0, 30, 0.01)
        idle = booked + seconds_until("the servers run nothing", lambda: not any(map(running, self.engines)), 60, 0.01)
        self.table.row(what, len(left), 0, "", "", f"no booking after {booked:.2f} s, servers run nothing after {idle:.2f} s")
        assert all(answer.error == "left" and not answer.complete for answer in left), f"a client did not leave: {left}"
        assert booked <= BOOKING_SECONDS, f"a request was booked for {booked:.2f} s after the last client left"
        assert idle <= abort_seconds, f"a server ran requests for {idle:.2f} s after the last client left"

    def picker_is_killed(self):
        with Load(self.client) as load:
            killed = time.perf_counter()
            self.tandem.processes["picker"].kill()
            wait_until("requests fail", lambda: len(load.failed()) >= CLIENTS)
            self.start_picker()
            ready = time.perf_counter()
            wait_until("requests are answered again", lambda: len(load.since(ready)) >= 3 * CLIENTS)
        self.faults("kill -9 of the picker, and start", load, ready, f"ready {ready - killed:.1f} s after the kill")
        self.settle()
        self.ask_where_cached("next question about each document", [QUESTIONS])

    def faults(self, what, load, over, seen):
        """Checks that requests failed with Envoy's errors or in the middle of their answers, and none that began when the fault was over."""
        failed = load.failed()
        refused = sorted({answer.status for answer in failed if answer.status != 200})
        broken = sum(answer.status == 200 for answer in failed)
        self.table.row(what, len(load.answers), len(failed), "", "", f"{seen}; {broken} answers ended early, other failures: HTTP {refused}")
        assert all(500 <= status < 600 for status in refused), f"not an error of Envoy: {failed}"
        assert not load.failed(over), f"{len(load.failed(over))} requests failed afterwards, such as {load.failed(over)[0]}"

    def engine_is_killed(self):
        kept, lost = self.engines
        with Load(self.client) as load:
            both = {address(engine) for engine in self.engines}
            wait_until("both servers answer", lambda: {answer.server for answer in load.since()} == both, 30)
            killed = time.perf_counter()
            lost.kill()
            self.wait_for_workers(1)
            detected = time.perf_counter()
            wait_until("requests are answered", lambda: len(load.since(detected)) >= 5 * CLIENTS)
            restarted = time.perf_counter()
            lost.start()
            lost.wait()
            self.wait_for_workers(2)
            joined = time.perf_counter()
            wait_until("the restarted server answers", lambda: address(lost) in {answer.server for answer in load.since(joined)}, 60)
        seen = f"detected after {detected - killed:.1f} s, joined again {joined - restarted:.0f} s after its start"
        self.faults("kill -9 of a server, and start", load, detected, seen)
        elsewhere = {answer.server for answer in load.since(detected, restarted)} - {address(kept)}
        assert not elsewhere, f"requests after the loss was detected reached {elsewhere}"
        places = [answer.server for answer in self.ask(QUESTIONS + 1)]
        counted = [places.count(address(engine)) for engine in self.engines]
        moved = [place for place, before in zip(places, self.places) if before == address(kept) != place]
        assert not moved, f"{len(moved)} questions about documents of the other server did not reach it"
        assert counted[1], f"no question reached the restarted server: {places}"
        seen = f"documents on each server: {counted}; index equals their caches: {self.settle()} blocks"
        self.table.row("next question about each document", DOCUMENTS, 0, "", "", seen)


def address(engine):
    return engine.url.removeprefix("http://")


def adapted(clients, picker):
    """Returns Envoy's configuration with these ports. Answers name the server that gave them."""
    text = CONFIGURATION.read_text()
    named = '{ append_action: OVERWRITE_IF_EXISTS_OR_ADD, header: { key: x-server, value: "%UPSTREAM_REMOTE_ADDRESS%" } }'
    changes = {
        "port_value: 8080": f"port_value: {clients}",
        "port_value: 9002": f"port_value: {picker}",
        "- name: all\n": f"- name: all\n{' ' * 22}response_headers_to_add: [{named}]\n",
    }
    for part, other in changes.items():
        assert text.count(part) == 1, f"{CONFIGURATION} has {part!r} {text.count(part)} times"
        text = text.replace(part, other)
    return text


def scenario(stage):
    with Tandem(stage) as tandem:
        gateway = Gateway(stage, tandem)
        gateway.documents()
        gateway.clients_leave()
        gateway.picker_is_killed()
        gateway.engine_is_killed()
        wait_until("no request is booked", lambda: gateway.bookings() == 0, 10)
