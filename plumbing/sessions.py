"""
The texts that a server has in work: the target's cache for each, and what an /open or a /verify (see
wire.py) does to it. All of this runs on one thread, so there is nothing to lock.
"""
import math
import time

import torch

from tree import tree_mask, walk
from plumbing.wire import pack, read_message, read_open, read_verify, refuse_unless


class Session:
    """One text. Its cache has the keys and values of text, which ends before the last chosen token."""

    def __init__(self, cache, max_len):
        self.cache, self.max_len, self.text = cache, max_len, []
        self.request, self.reply = None, b""                           # the last call, and its answer
        self.size, self.used = 0, 0.0                                  # bytes in memory; time of that call


class Sessions:
    """
    Serves calls with a target and the net of a drafter.
    opt, a server.Serve, sets the bounds: sessions, memory_mb, idle and nodes.
    """

    def __init__(self, target, net, opt):
        self.target, self.net, self.opt = target, net, opt
        self.by_name = {}                                              # longest idle first

    def make_room(self, sessions=0, size=0):
        """
        Drop sessions that were idle too long,
        then the longest idle ones until so many more, of so many bytes, fit.
        """
        for name, session in list(self.by_name.items()):
            expired = session.used < time.monotonic() - self.opt.idle
            too_many = len(self.by_name) + sessions > self.opt.sessions
            total = sum(s.size for s in self.by_name.values()) + size
            if expired or too_many or total > self.opt.memory_mb * 2**20:
                del self.by_name[name]

    @torch.inference_mode()
    def answer(self, path, body):
        """A call -> bytes of the answer. Raises Refused."""
        refuse_unless(path in ("/open", "/verify"), "there are /open and /verify, nothing else", 404)
        message = read_message(body)
        name = message["session"]
        session = self.by_name.get(name)
        # A client whose answer was lost asks once more: it gets the same answer, and no work is done twice.
        if not session or session.request != (path, body):
            if path == "/open":
                session, answer, start, hidden = self.open(session, message)
            else:
                session, answer, start, hidden = self.verify(session, message)
            states = self.states(session.cache, start, hidden) if session.has_drafter else {}
            session.request, session.reply = (path, body), pack(answer, states, session.wire)
        cache = session.cache
        session.size = sum(x.nbytes for x in cache.k + cache.v) + len(session.reply)
        session.used = time.monotonic()
        self.by_name.pop(name, None)
        self.make_room(1, session.size)
        self.by_name[name] = session                                   # the last one to be thrown out
        return session.reply

    def states(self, cache, start, hidden):
        """What a drafter is told of the text from start on; hidden (1, T, C) are its hidden states."""
        N = self.net.cfg.tli
        k, v = cache.read(slice(start, cache.length))                  # (L, 1, G, T, D)
        return dict(s=self.net.read(k, v, hidden), k=k[len(k) - N:], v=v[len(v) - N:])

    def new_session(self, name, max_len):
        """An empty session for a text of at most max_len tokens, in the place of an old one of that name."""
        cfg, weight = self.target.cfg, self.target.wte.weight
        rows = max_len + self.opt.nodes
        size = 2 * cfg.n_layer * cfg.n_kv_head * cfg.head_dim * rows * weight.element_size()
        refuse_unless(size <= self.opt.memory_mb * 2**20,
                      f"{max_len} tokens need more memory than this server gives", 413)
        self.by_name.pop(name, None)
        self.make_room(1, size)                                        # before the memory is taken
        return Session(self.target.new_cache(rows), max_len)

    def open(self, session, message):
        """
        Bring a session (None: a new one) to the text of the message.
        -> session, answer, first position whose state is sent, hidden states from there on.
        """
        sampler = read_open(message, self.target, self.net)
        text, have, max_len = message["text"], message["have"], message["max_len"]
        if not session or session.max_len != max_len:
            session = self.new_session(message["session"], max_len)
        shorter = min(len(session.text), len(text))
        same = next((i for i in range(shorter) if session.text[i] != text[i]), shorter)
        # Rows before start hold, and their states are not asked for; the last token is run for its logits.
        start = min(same, have, len(text) - 1)
        session.cache.crop(start)
        session.text, session.request = text[:start], None
        session.sampler, session.wire = sampler, message["wire"]
        session.has_drafter = message.get("drafter") is not None
        device = self.target.wte.weight.device
        hidden = self.target.hidden(torch.tensor([text[start:]], device=device), cache=session.cache)
        bonus, = sampler.choose(self.target.logits(hidden[:, -1]), [len(text)])
        session.cache.keep(range(len(text) - start))
        session.text = text
        return session, {"path": [], "bonus": bonus}, have, hidden[:, have - start:]

    def verify(self, session, message):
        """One target forward over the tree of the message, and the walk -> as open."""
        refuse_unless(session, "there is no such session, or no longer", 404)
        cache, sampler, S = session.cache, session.sampler, len(session.text)
        tree = read_verify(message, S, session.max_len, self.target.cfg.vocab_size, self.opt.nodes)
        device = self.target.wte.weight.device
        while True:
            pos = torch.tensor(tree.depth, device=device) + S
            mask = tree_mask(tree.parent, S).to(device)
            hidden = self.target.hidden(torch.tensor([tree.tokens], device=device), pos, mask, cache)
            try:
                choice = sampler.choose(self.target.logits(hidden[0]), [S + d + 1 for d in tree.depth])
                break
            except FloatingPointError:
                # A draft that overflows spoils its neighbours: once more, with the root alone.
                if len(tree) == 1:
                    raise
                tree = tree.cut(0)
        # The noise of a position is as long as the vocabulary, and can be drawn again: no session keeps it.
        sampler.forget(math.inf)
        path, out = walk(tree.tokens, tree.parent, choice)
        cache.keep(path)
        session.text = session.text + [tree.tokens[i] for i in path]
        return session, {"path": path, "bonus": out[-1]}, S, hidden[:, path]
