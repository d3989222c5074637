"""
The side of a Mixture of Attentions that has the drafter, and lives on when the line to the server is cut.
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

from model import arg
from tree import Sampler, Stats, Tree
from plumbing.wire import WIRES, Refused, Unreachable, unpack


def keep_last(target, N):
    """The target as a client has it: no layers but the last N."""
    del target.blocks[:len(target.blocks) - N]


@dataclass
class Remote:
    """The line to a server."""
    server: str = arg("", "let python moa.py serve verify, at this address (http://host:port); empty = all on this machine")
    token: str = arg("", "the server's token; empty = $NANOSPEC_TOKEN, if that is set")
    wire: str = arg("float16", "how states come down; int8 has a scale for every vector", choices=list(WIRES))
    timeout: float = arg(5.0, "seconds to wait for the server before trying again", low=0.01)
    retries: int = arg(3, "how often to try again before going on alone; each pause is twice the last")
    offline_limit: int = arg(128, "tokens to write without the server, one after the other, before giving up")
    probe: float = arg(1.0, "seconds between looks whether a lost server is back", low=0.01)
    rtt_ms: float = arg(0.0, "simulated network: milliseconds added to a round trip")
    mbit: float = arg(0.0, "simulated network: megabits per second each way (0 = no limit)")


@dataclass
class RemoteStats(Stats):
    """Stats of a text verified by a server. Tokens written without it are in offline, and in no count of accepted ones."""
    offline: list = field(default_factory=list)                        # their places in what was written, from 0
    calls: int = 0                                                     # requests sent, repeated ones too
    up: int = 0                                                        # bytes, headers too
    down: int = 0
    waiting: float = 0.0                                               # seconds


# what a line can do to an exchange: no answer, half an answer, another's answer
FAULTS = (OSError, http.client.HTTPException, safetensors.SafetensorError, struct.error, ValueError, KeyError, TypeError)


class Client:
    """Decodes with a server's target. alone: was the last step written without it?"""

    def __init__(self, opt):
        url = urlsplit(opt.server)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.port == 0:        # or it raises
            raise ValueError(f"--server must look like http://127.0.0.1:8765, not {opt.server!r}")
        self.opt, self.url, self.line, self.alone = opt, url, None, False
        token = opt.token or os.environ.get("NANOSPEC_TOKEN", "")
        self.headers = {"Authorization": f"Bearer {token}".encode()} if token else {}

    def connect(self):
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        return kind(self.url.hostname, self.url.port, timeout=self.opt.timeout)

    def travel(self, n):
        """What n bytes more cost on the simulated network."""
        time.sleep(8e-6 * n / self.opt.mbit if self.opt.mbit else 0)

    def exchange(self, path, body):
        """One request on the line at hand -> status, bytes."""
        stats, half = self.stats, self.opt.rtt_ms / 2000
        if self.line is None:
            self.line = self.connect()
            send = self.line.send
            def counted(data):
                stats.up += len(data)
                self.travel(len(data))
                send(data)
            self.line.send = counted
            time.sleep(2 * half)                                       # a handshake
        stats.calls += 1
        time.sleep(half)
        self.line.request("POST", path, body, self.headers)
        r = self.line.getresponse()
        data = r.read()
        n = len(data) + sum(len(k) + len(v) + 4 for k, v in r.headers.items()) + len(r.reason) + 17        # and the status line
        stats.down += n
        self.travel(n)
        time.sleep(half)
        return r.status, data

    def call(self, path, message, like, tries):
        """-> answer and tensors. Raises Refused for a 4xx, and Unreachable if no try brought an answer."""
        body, start = json.dumps(message).encode(), time.perf_counter()
        try:
            for i in range(tries):
                if i:
                    time.sleep(min(0.1 * 2**i, 5.0))
                try:
                    status, data = self.exchange(path, body)
                    if status == 200:
                        return unpack(data, like)
                    error = json.loads(data)["error"]
                    if status < 500 and status not in (408, 429):
                        raise Refused(status, f"the server refuses: {error}")
                except FAULTS as e:
                    error = str(e) or type(e).__name__
                self.hang_up()
            raise Unreachable(f"no answer from {self.opt.server} after {tries} tries ({error})")
        finally:
            self.stats.waiting += time.perf_counter() - start

    def hang_up(self):
        if self.line:
            self.line.close()
        self.line = None

    def watch(self):
        """-> an event that is set once the server answers again. A thread looks now and then; no token waits for it."""
        back = threading.Event()
        def look():
            while not back.wait(self.opt.probe):
                line = self.connect()
                try:
                    line.request("GET", "/", headers=self.headers)
                    line.getresponse().read()
                    back.set()
                except FAULTS:
                    pass
                finally:
                    line.close()
        threading.Thread(target=look, daemon=True).start()
        return back

    @torch.inference_mode()
    def generate(self, target, prompt, max_new_tokens, drafter=None, sampler=None, eos=()):
        """
        tree.generate with the server's target; of target here only embeddings, lm_head and the last N layers are used. Same
        text, as long as the server answers. Without it the drafter writes on by itself, at most opt.offline_limit tokens at
        a stretch; what was shown stays, and the server takes it as given when it is back. Returns RemoteStats.

        Raises ValueError as generate, Refused, and Unreachable if the server is lost for longer than that.
        """
        block, opt, sampler = target.cfg.block_size, self.opt, sampler or Sampler()
        if not 0 < len(prompt) < block:
            raise ValueError(f"the prompt has {len(prompt)} tokens: it must have some, and leave room in a context of {block}")
        left = min(max_new_tokens, block - len(prompt))
        stats = self.stats = RemoteStats(stop="budget" if max_new_tokens <= block - len(prompt) else "context")
        text, like, known = list(prompt), target.wte.weight, 0         # known: tokens whose states are here
        live, back, alone = False, None, 0                             # live: the server has text[:known], the root is behind it
        session = dict(session=secrets.token_hex(16), backbone=target.fingerprint, max_len=len(prompt) + left,
                       drafter=drafter and drafter.net.fingerprint, wire=opt.wire,
                       **{k: getattr(sampler, k) for k in ("temperature", "top_k", "top_p", "seed")})
        if drafter:
            drafter.start(target, len(prompt) + left)
        clock = time.perf_counter()
        def lap(what):
            nonlocal clock
            clock, before = time.perf_counter(), clock
            stats.seconds[what] += clock - before

        try:
            while left and stats.stop != "eos":
                self.alone = False
                try:
                    if live:
                        tree = drafter.draft(text[-1], sampler).cut(left - 1) if drafter else Tree([text[-1]], [-1])
                        lap("draft")
                        message = dict(session=session["session"], length=known, tokens=tree.tokens, parent=tree.parent)
                        answer, states = self.call("/verify", message, like, 1 + opt.retries)
                        new = [tree.tokens[i] for i in answer["path"]]
                    elif back and not back.is_set() and alone < opt.offline_limit:
                        raise Unreachable
                    else:
                        patient = back is None or alone == opt.offline_limit
                        message = session | dict(text=text, have=known)
                        answer, states = self.call("/open", message, like, 1 + opt.retries * patient)
                        new = text[known:]
                    if drafter:
                        drafter.receive(new, states["s"], states["k"], states["v"])
                    out = (new[1:] if live else []) + [answer["bonus"]]
                    if back:
                        back.set()                                     # nobody need look any longer
                    known, live, back, alone = known + len(new), True, None, 0
                except Refused as e:
                    if live and e.status in (404, 409):                # evicted, restarted, or gone on without us: open again
                        live = False
                        continue
                    raise
                except Unreachable as e:
                    if not known or not drafter or alone == opt.offline_limit:
                        raise Unreachable(f"{e}; {alone} tokens were written without it, --offline-limit allows no more"
                                          if known and drafter else str(e)) from None
                    live, self.alone, alone = False, True, alone + 1
                    back = self.watch() if back is None or back.is_set() else back
                    out = sampler.choose(drafter.alone(text[known:]), [len(text)])
                end = next((i + 1 for i, token in enumerate(out) if token in eos), 0)
                out = out[:end or None]
                stats.stop = "eos" if end else stats.stop
                if self.alone:
                    stats.offline.append(len(text) - len(prompt))
                else:
                    stats.accepted.append(len(out))
                text += out
                left -= len(out)
                sampler.forget(len(text) - 1)
                lap("rest" if self.alone else "verify" if len(stats.accepted) > 1 else "prompt")
                yield out
                clock = time.perf_counter()                            # what the caller did meanwhile is not ours
            return stats
        finally:
            self.hang_up()
            if back:
                back.set()
