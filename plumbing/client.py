"""
The side of a Mixture of Attentions that has the drafter, and lives on when the line to the server is cut:

    verify    a tree goes to the server, tokens and states come back (Client.step chooses what to do)
    cut       Unreachable, after --retries: write_alone, a token at a time, the drafter's own choice with
              the same noise (moa.Drafter.next_logits), --offline-limit at most; a thread asks for the server
    back      open sends the text again, and the server goes on from there
"""
import http.client
import json
import os
import secrets
import struct
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import safetensors
import torch

from model import PAGE, arg
from tree import Sampler, Stats, Tree
from plumbing.wire import WIRE_DTYPES, Refused, Unreachable, unpack


def keep_last_layers(target, N):
    """The target as a client has it: no layers but the last N."""
    del target.blocks[:len(target.blocks) - N]


@dataclass
class Remote:
    """The line to a server."""
    server: str = arg("", "let python moa.py serve verify, at this address (http://host:port); "
                      "empty = all on this machine")
    token: str = arg("", "the server's token; empty = $NANOSPEC_TOKEN, if that is set")
    wire: str = arg("float16", "how states come down; int8 has a scale for every vector",
                    choices=list(WIRE_DTYPES))
    timeout: float = arg(5.0, "seconds to wait for the server before trying again", low=0.01)
    retries: int = arg(3, "how often to try again before going on alone; each pause is twice the last")
    offline_limit: int = arg(128, "tokens to write without the server, one after the other, before giving up")
    probe: float = arg(1.0, "seconds between looks whether a lost server is back", low=0.01)
    rtt_ms: float = arg(0.0, "simulated network: milliseconds added to a round trip")
    mbit: float = arg(0.0, "simulated network: megabits per second each way (0 = no limit)")


@dataclass
class RemoteStats(Stats):
    """
    Stats of a text verified by a server.
    Tokens written without it are in offline, and in no count of accepted ones.
    """
    offline: list = field(default_factory=list)                        # their places in the new text, from 0
    calls: int = 0                                                     # requests sent, repeated ones too
    up: int = 0                                                        # bytes, headers too
    down: int = 0
    waiting: float = 0.0                                               # seconds


# What a bad line does to a call: no answer, half an answer, an answer of somebody else.
LINE_ERRORS = (OSError, http.client.HTTPException, safetensors.SafetensorError, struct.error,
               ValueError, KeyError, TypeError)


class RemoteText:
    """A text in the making: what the client has of it, and whether the server is there to go on with it."""

    def __init__(self, target, prompt, max_len, drafter, sampler, wire):
        self.target, self.drafter, self.sampler = target, drafter, sampler
        self.tokens = list(prompt)
        self.n_known = 0                                               # tokens whose states have come
        self.is_open = False                                           # has the server tokens[:n_known]?
        self.n_offline = 0                                             # tokens since the server was lost
        self.server_back = None                                        # then: an Event, set when it is back
        budget = getattr(drafter, "node_budget", None)
        self.limit = budget.usual if budget else None                  # a round trip costs more than nodes
        self.session = secrets.token_hex(16)
        self.opening = dict(session=self.session, backbone=target.fingerprint, max_len=max_len,
                            drafter=drafter and drafter.net.fingerprint, wire=wire)
        for name in ("temperature", "top_k", "top_p", "seed"):
            self.opening[name] = getattr(sampler, name)


class Client:
    """Decodes with a server's target. offline: was the last step written without it?"""

    def __init__(self, opt):
        url = urlsplit(opt.server)
        # reading the port of a URL raises by itself where it is no port
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.port == 0:
            raise ValueError(f"--server must look like http://127.0.0.1:8765, not {opt.server!r}")
        self.opt, self.url, self.line, self.offline = opt, url, None, False
        token = opt.token or os.environ.get("NANOSPEC_TOKEN", "")
        self.headers = {"Authorization": f"Bearer {token}".encode()} if token else {}

    def connect(self):
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        return kind(self.url.hostname, self.url.port, timeout=self.opt.timeout)

    def hang_up(self):
        if self.line:
            self.line.close()
        self.line = None

    def sleep_for_bytes(self, n):
        """As long as n bytes take on the simulated network."""
        time.sleep(8e-6 * n / self.opt.mbit if self.opt.mbit else 0)

    def send(self, path, body):
        """One request on the line at hand -> status, bytes."""
        stats, half_trip = self.stats, self.opt.rtt_ms / 2000
        if self.line is None:
            self.line = self.connect()
            send_bytes = self.line.send

            def counted(data):
                stats.up += len(data)
                self.sleep_for_bytes(len(data))
                send_bytes(data)
            self.line.send = counted
            time.sleep(2 * half_trip)                                  # a handshake
        stats.calls += 1
        time.sleep(half_trip)
        self.line.request("POST", path, body, self.headers)
        response = self.line.getresponse()
        data = response.read()
        # headers are lines of "name: value", and the status line is 17 characters and a reason
        headers = sum(len(name) + len(value) + 4 for name, value in response.headers.items())
        n = len(data) + headers + len(response.reason) + 17
        stats.down += n
        self.sleep_for_bytes(n)
        time.sleep(half_trip)
        return response.status, data

    def call(self, path, message, like, tries):
        """
        -> the answer and its tensors, as unpack gives them.
        Raises Refused for a 4xx, and Unreachable if no try brought an answer.
        """
        body, began = json.dumps(message).encode(), time.perf_counter()
        try:
            for i in range(tries):
                if i:
                    time.sleep(min(0.1 * 2**i, 5.0))
                try:
                    status, data = self.send(path, body)
                    if status == 200:
                        return unpack(data, like)
                    error = json.loads(data)["error"]
                    if status < 500 and status not in (408, 429):      # those may be served a moment later
                        raise Refused(status, f"the server refuses: {error}")
                except LINE_ERRORS as e:
                    error = str(e) or type(e).__name__
                self.hang_up()
            raise Unreachable(f"no answer from {self.opt.server} after {tries} tries ({error})")
        finally:
            self.stats.waiting += time.perf_counter() - began

    def watch_for_server(self):
        """
        -> an Event that is set once the server answers again.
        A thread looks now and then, so that no token waits for it.
        """
        back = threading.Event()

        def look():
            while not back.wait(self.opt.probe):
                line = self.connect()
                try:
                    line.request("GET", "/", headers=self.headers)
                    line.getresponse().read()
                    back.set()
                except LINE_ERRORS:
                    pass
                finally:
                    line.close()
        threading.Thread(target=look, daemon=True).start()
        return back

    def lap(self, what):
        """The time since the last lap went into what."""
        before, self.clock = self.clock, time.perf_counter()
        self.stats.seconds[what] += self.clock - before

    @torch.inference_mode()
    def generate(self, target, prompt, max_new_tokens, drafter=None, sampler=None, eos=()):
        """
        tree.generate with the server's target; of target here only embeddings, lm_head and the last N
        layers are used. Same text, as long as the server answers. Without it the drafter writes on by
        itself, at most opt.offline_limit tokens at a stretch; what was shown stays, and the server
        takes it as given when it is back. Returns RemoteStats.

        Raises ValueError as generate, Refused, and Unreachable if the server is lost for longer than that.
        """
        block_size = target.cfg.block_size
        if not 0 < len(prompt) < block_size:
            raise ValueError(f"the prompt has {len(prompt)} tokens: it must have some, and leave room in a "
                             f"context of {block_size}")
        left = min(max_new_tokens, block_size - len(prompt))
        stop = "budget" if max_new_tokens <= block_size - len(prompt) else "context"
        stats = self.stats = RemoteStats(stop=stop)
        text = RemoteText(target, prompt, len(prompt) + left, drafter, sampler or Sampler(), self.opt.wire)
        if drafter:
            drafter.start(target, len(prompt) + left)
        self.clock = time.perf_counter()
        try:
            while left and stats.stop != "eos":
                out = self.step(text, left)
                end = next((i + 1 for i, token in enumerate(out) if token in eos), 0)
                if end:
                    out, stats.stop = out[:end], "eos"
                if self.offline:
                    part = "rest"
                    stats.offline.append(len(text.tokens) - len(prompt))
                else:
                    part = "verify" if stats.accepted else "prompt"
                    stats.accepted.append(len(out))
                text.tokens += out
                left -= len(out)
                text.sampler.forget(len(text.tokens) - 1)
                self.lap(part)
                yield out
                self.clock = time.perf_counter()                       # what the caller did is not ours
            return stats
        finally:
            self.hang_up()
            self.stop_watching(text)

    def step(self, text, left):
        """
        -> the next tokens of a text: the server's, or without it one of the drafter's own.
        left is how many are wanted; more may come.
        """
        while True:
            self.offline = False
            try:
                if text.is_open:
                    return self.verify(text, left)
                lost = text.server_back and not text.server_back.is_set()
                if lost and text.n_offline < self.opt.offline_limit:
                    return self.write_alone(text)
                return self.open(text)
            except Refused as e:
                # The session was thrown out, the server was restarted, or it went on without us: open again.
                if not text.is_open or e.status not in (404, 409):
                    raise
                text.is_open = False
            except Unreachable as e:
                if not text.n_known or not text.drafter:
                    raise
                if text.n_offline == self.opt.offline_limit:
                    raise Unreachable(f"{e}; {text.n_offline} tokens were written without it, "
                                      "--offline-limit allows no more") from None
                return self.write_alone(text)

    def open(self, text):
        """Bring the server to the text -> the token that it puts behind it."""
        # A server that was just seen to be back is asked once: there is a drafter to go on with.
        patient = text.server_back is None or text.n_offline == self.opt.offline_limit
        message = text.opening | dict(text=text.tokens, have=text.n_known)
        tries = 1 + self.opt.retries * patient
        answer, states = self.call("/open", message, text.target.wte.weight, tries)
        self.learn(text, text.tokens[text.n_known:], states)
        return [answer["bonus"]]

    def verify(self, text, left):
        """Let the server judge a tree of guesses for what follows the text -> the tokens that it takes."""
        root = text.tokens[-1]
        tree = Tree([root], [-1])
        if text.drafter:
            depth = min(left - 1, PAGE - 1 - text.n_known % PAGE)  # an exact server's tree stays in its page
            tree = text.drafter.draft(root, text.sampler, text.limit).cut(depth)
        self.lap("draft")
        message = dict(session=text.session, length=text.n_known, tokens=tree.tokens, parent=tree.parent)
        answer, states = self.call("/verify", message, text.target.wte.weight, 1 + self.opt.retries)
        path = [tree.tokens[i] for i in answer["path"]]
        self.learn(text, path, states)
        return path[1:] + [answer["bonus"]]

    def learn(self, text, tokens, states):
        """The server has these tokens now too, behind those that were known, and sent their states."""
        if text.drafter:
            text.drafter.receive(tokens, states["s"], states["k"], states["v"])
        self.stop_watching(text)
        text.n_known, text.is_open, text.n_offline = text.n_known + len(tokens), True, 0

    def write_alone(self, text):
        """-> one token, the drafter's own choice, while the server is away."""
        self.offline, text.is_open, text.n_offline = True, False, text.n_offline + 1
        if text.server_back is None or text.server_back.is_set():
            text.server_back = self.watch_for_server()
        logits = text.drafter.next_logits(text.tokens[text.n_known:])
        return text.sampler.choose(logits, [len(text.tokens)])

    def stop_watching(self, text):
        if text.server_back:
            text.server_back.set()                                     # ends the thread that looks
        text.server_back = None
