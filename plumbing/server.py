r"""
Mixture of Attentions across a network: the target on a server, the drafter on a device that lives on when the line is cut.

    python moa.py serve --port 8765                                            # the target and layer self-attention
    python sample.py --method moa --server http://127.0.0.1:8765               # SA, CA, embeddings, lm_head, the last N layers
    python moa.py split --to out/client                                        # a folder with just what a client needs

Paper    Zimmer et al. 2025, arXiv:2410.03804, has this setting; its protocol is not public, this one is ours.
Idea     Two calls, JSON up, safetensors down:

         /open    the text so far, how many of its states the client has   -> the next token; the states of the others
         /verify  the length of the text, the tree behind it               -> accepted nodes, bonus token; their states

         The server chooses with the session's Sampler, so the text is plain decoding's. A text only grows, so its length
         says whether both sides mean the same one. Whatever went wrong (evicted, restarted, cut off), the client opens again
         with the text that it has shown by then, and the server goes on behind it with the cache rows that still hold.
"""
import hmac
import http.server
import ipaddress
import json
import math
import os
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import torch

from model import arg
from tree import Sampler, Tree, tree_mask, walk
from plumbing.checkpoint import load, model_tensors, save
from plumbing.client import keep_last
from plumbing.drafters import load_net, load_target
from plumbing.options import DTYPES, OUT, command, fail, parse
from plumbing.wire import WIRES, Refused, check, pack, whole


@dataclass
class Serve:
    """Verify the drafts of clients: python sample.py --method moa --server URL."""
    host: str = arg("127.0.0.1", "address to listen on; any but a loopback address needs a token")
    port: int = arg(8765, "port; 0 takes a free one")
    token: str = arg("", "what clients must know; empty = $NANOSPEC_TOKEN, if that is set")
    sessions: int = arg(16, "texts in work at a time; one more throws out the one that was idle longest", low=1)
    memory_mb: int = arg(1024, "memory for their caches, likewise", low=1)
    idle: float = arg(600.0, "seconds until an idle session is dropped")
    nodes: int = arg(128, "most nodes of a tree, root included", low=1, high=4096)
    connections: int = arg(64, "connections at a time", low=1)
    timeout: float = arg(20.0, "seconds for a request to come in, or for an answer to be taken", low=0.05)
    out: str = arg(OUT, "folder of checkpoints, as train.py wrote it")
    checkpoint: str = arg("", "another training of the drafter: a folder or a .safetensors file")
    device: str = arg("auto", "cpu, cuda, cuda:1, mps")
    dtype: str = arg("auto", "of the weights; auto = float32 on a CPU, bfloat16 on a GPU", choices=DTYPES)
    method, backbone, compile = "moa", "", False                      # no options: this is MoA's server


class Server(http.server.ThreadingHTTPServer):
    """
    A thread for each connection reads and writes; one worker owns the model and all sessions, so there is nothing to lock.
    What is refused gets a 4xx and {"error": ...}. A request has opt.timeout seconds and self.most bytes.
    """
    daemon_threads, request_queue_size = True, 128

    def __init__(self, target, net, opt):
        self.target, self.net, self.opt, self.sessions = target, net, opt, {}      # sessions: longest idle first
        self.most = 4096 + 12 * (target.cfg.block_size + 2 * opt.nodes)
        self.since = {}                                                # connection -> when its request began to come in
        self.worker = ThreadPoolExecutor(1)
        self.sweep = self.worker.submit(self.make_room)
        self.address_family = socket.AF_INET6 if ":" in opt.host else socket.AF_INET
        super().__init__((opt.host, opt.port), Handler)

    def verify_request(self, request, address):                        # may this connection stay?
        free = len(self.since) < self.opt.connections
        if free:
            self.since[request] = time.monotonic()
        else:
            request.sendall(b'HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n\r\n{"error": "too many connections"}')
        return free

    def shutdown_request(self, request):
        self.since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self):                                         # twice a second
        for connection, since in list(self.since.items()):
            if since < time.monotonic() - self.opt.timeout:
                try:
                    connection.shutdown(socket.SHUT_RD)                # its thread reads an end, however slowly bytes came
                except OSError:
                    pass
        if self.sweep.done():
            self.sweep = self.worker.submit(self.make_room)

    def handle_error(self, request, address):
        if not isinstance(sys.exc_info()[1], OSError):                 # those are clients that went away
            super().handle_error(request, address)

    def make_room(self, sessions=0, size=0):
        """Drop sessions that were idle too long, then the longest idle ones until so many more, of so many bytes, fit."""
        for name, s in list(self.sessions.items()):
            if (s.used < time.monotonic() - self.opt.idle or len(self.sessions) + sessions > self.opt.sessions
                    or sum(s.size for s in self.sessions.values()) + size > self.opt.memory_mb * 2**20):
                del self.sessions[name]

    @torch.inference_mode()
    def answer(self, path, body):
        """A call -> bytes of the answer. Raises Refused. Runs on the worker."""
        check(path in ("/open", "/verify"), "there are /open and /verify, nothing else", 404)
        try:
            m = json.loads(body)
        except (ValueError, RecursionError):
            m = None
        check(type(m) is dict, "the body must be a JSON object")
        name = m.get("session")
        check(type(name) is str and re.fullmatch("[0-9a-f]{32}", name), "session must be 32 hex digits")
        s = self.sessions.get(name)
        if not s or s.request != (path, body):                         # else the answer was lost: the same once more
            s, answer, start, hidden = (self.open if path == "/open" else self.verify)(s, m)
            states, N = {}, self.net.cfg.tli
            if s.drafts:
                k, v = s.cache.read(slice(start, s.cache.length))      # (L, 1, G, T, D)
                states = dict(s=self.net.read(k, v, hidden), k=k[len(k) - N:], v=v[len(v) - N:])
            s.request, s.reply = (path, body), pack(answer, states, s.wire)
        s.size, s.used = sum(x.nbytes for x in s.cache.k + s.cache.v) + len(s.reply), time.monotonic()
        self.sessions.pop(name, None)
        self.make_room(1, s.size)
        self.sessions[name] = s                                        # the last one to be thrown out
        return s.reply

    def open(self, s, m):
        """Bring session s, or a new one, to the text of m -> session, answer, first row whose state is sent, hidden states."""
        c, w, text, max_len = self.target.cfg, self.target.wte.weight, m.get("text"), m.get("max_len")
        check(m.get("backbone") == self.target.fingerprint, f"this server has the backbone {self.target.fingerprint}, not yours",
              412)
        check(m.get("drafter") in (None, self.net.fingerprint), f"this server has the drafter {self.net.fingerprint}, not yours",
              412)
        check(m.get("wire") in list(WIRES), f"wire must be one of {', '.join(WIRES)}")
        check(text and whole(text, 0, c.vocab_size), f"text must be a list of tokens below {c.vocab_size}")
        check(whole([max_len], len(text) + 1, c.block_size + 1), f"max_len must lie above the {len(text)} tokens of the text, and "
              f"not above {c.block_size}")
        check(whole([m.get("have")], 0, len(text)), f"have must lie between 0 and {len(text) - 1}")
        numbers = {k: m.get(k) for k in ("temperature", "top_k", "top_p", "seed")}
        check(all(type(x) is int or type(x) is float and k in ("temperature", "top_p") for k, x in numbers.items()),
              "temperature and top_p must be numbers, top_k and seed whole ones")
        try:
            sampler = Sampler(**numbers)
        except ValueError as e:
            raise Refused(400, str(e)) from None
        rows = max_len + self.opt.nodes
        size = 2 * c.n_layer * c.n_kv_head * c.head_dim * rows * w.element_size()
        check(size <= self.opt.memory_mb * 2**20, f"{max_len} tokens need more memory than this server gives", 413)
        if not s or s.cache.max_len != rows:
            self.sessions.pop(m["session"], None)
            self.make_room(1, size)                                    # before the memory is taken
            s = SimpleNamespace(cache=self.target.new_cache(rows), text=[])
        same = next((i for i, (a, b) in enumerate(zip(s.text, text)) if a != b), min(len(s.text), len(text)))
        start = min(same, m["have"], len(text) - 1)                    # rows that hold and whose states are not asked for
        s.cache.crop(start)
        s.text, s.request, s.max_len, s.sampler = text[:start], None, max_len, sampler
        s.wire, s.drafts = m["wire"], m.get("drafter") is not None
        hidden = self.target.hidden(torch.tensor([text[start:]], device=w.device), cache=s.cache)
        choice, = sampler.choose(self.target.lm_head(hidden[:, -1]), [len(text)])
        s.cache.keep(range(len(text) - start))
        s.text = text
        return s, {"path": [], "bonus": choice}, m["have"], hidden[:, m["have"] - start:]

    def verify(self, s, m):
        """One target forward over the tree of m, and the walk -> as open."""
        check(s, "there is no such session, or no longer", 404)
        S, V, tokens, parent = len(s.text), self.target.cfg.vocab_size, m.get("tokens"), m.get("parent")
        check(whole([m.get("length")], S, S + 1), f"the text has {S} tokens here", 409)
        check(whole(tokens, 0, V) and 0 < len(tokens) <= self.opt.nodes, f"tokens must be 1 to {self.opt.nodes} tokens below {V}")
        check(type(parent) is list and len(parent) == len(tokens) and all(whole([up], min(i - 1, 0), max(i, 0)) for i, up in
              enumerate(parent)), "parent must be -1, then an earlier node for every token")
        tree, device = Tree(tokens, parent), s.cache.k[0].device
        check(S + max(tree.depth) < s.max_len, f"the tree reaches beyond the {s.max_len} tokens of this session")
        while True:
            pos = torch.tensor(tree.depth, device=device) + S
            mask = tree_mask(tree.parent, S).to(device)
            hidden = self.target.hidden(torch.tensor([tree.tokens], device=device), pos, mask, s.cache)
            try:
                choice = s.sampler.choose(self.target.lm_head(hidden[0]), [S + d + 1 for d in tree.depth])
                break
            except FloatingPointError:                                 # as in generate
                if len(tree) == 1:
                    raise
                tree = tree.cut(0)
        s.sampler.rows.clear()                                         # V numbers a position, and they can be drawn again
        path, out = walk(tree.tokens, tree.parent, choice)
        s.cache.keep(path)
        s.text = s.text + [tokens[i] for i in path]
        return s, {"path": path, "bonus": out[-1]}, S, hidden[:, path]


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of the server."""
    protocol_version = default_request_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        self.timeout = self.server.opt.timeout
        super().setup()

    def handle_one_request(self):
        self.server.since[self.connection] = time.monotonic()
        super().handle_one_request()

    def reply(self, status, body):
        self.send_response_only(status)
        self.send_header("Content-Type", "application/octet-stream" if status == 200 else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, message):
        self.reply(status, json.dumps({"error": message}).encode())

    def send_error(self, code, message=None, explain=None):            # http.server's own complaints
        self.close_connection = True
        self.refuse(405 if code == 501 else code if code < 500 else 400, (message or "bad request")[:200])

    def log_message(self, *args):
        pass

    def body(self):
        """First who asks, then how much comes, and only then what it is."""
        given, token = self.headers.get("Authorization", ""), f"Bearer {self.server.opt.token}"
        check(not self.server.opt.token or hmac.compare_digest(given.encode("latin-1", "replace"), token.encode()),
              "the bearer token is missing or wrong", 401)
        if self.command == "GET":
            return b"{}"
        n = self.headers.get("Content-Length", "")
        check(n and "Transfer-Encoding" not in self.headers, "a Content-Length is needed", 411)
        check(n.isascii() and n.isdigit(), "Content-Length must be a number")
        check(len(n) < 12 and int(n) <= self.server.most, f"a body may have {self.server.most} bytes", 413)
        try:
            data = self.rfile.read(int(n))
        except TimeoutError:
            data = b""
        check(len(data) == int(n), f"the body of {n} bytes was cut short, or came too slowly", 408)
        return data

    def do_POST(self):
        keep, self.close_connection = self.close_connection, True      # until the whole body is read
        try:
            data = self.body()
            self.close_connection, self.server.since[self.connection] = keep, math.inf     # now it is we who take time
            if self.command == "GET":                                  # a client that looks whether we are there
                return self.reply(200, data)
            self.reply(200, self.server.worker.submit(self.server.answer, self.path, data).result())
        except Refused as e:
            self.refuse(e.status, str(e))
        except OSError:                                                # the client went away
            raise
        except Exception as e:                                         # our own fault: say so and live on
            print(f"error: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            self.refuse(500, f"the server failed: {type(e).__name__}")

    do_GET = do_POST


def serve(argv, method):
    """python moa.py serve"""
    opt, = parse(Serve, argv=argv)
    opt.token = opt.token or os.environ.get("NANOSPEC_TOKEN", "")
    try:
        local = opt.host == "localhost" or ipaddress.ip_address(opt.host).is_loopback
    except ValueError:
        local = False
    if not local and not opt.token:
        fail(f"--host {opt.host} may be reached by others: give --token (or NANOSPEC_TOKEN), or leave --host out")
    target, _ = load_target(opt)
    net = load_net(opt, target, method)
    try:
        server = Server(target, net, opt)
    except (OSError, OverflowError) as e:
        fail(f"cannot listen on {opt.host} port {opt.port} ({getattr(e, 'strerror', 0) or e}): name another --port or --host")
    print(f"serving {opt.out} at http://{server.server_address[0]}:{server.server_port}", flush=True)
    server.serve_forever()


@dataclass
class Split:
    """Write what a client needs of --out and no more: embeddings, lm_head, the target's last N layers, and the drafter."""
    to: str = arg("out/client", "folder for it; give it to sample.py as --out")
    out: str = arg(OUT, "folder of checkpoints, as train.py wrote it")
    method, backbone, checkpoint, compile, device, dtype = "moa", "", "", False, "cpu", "float32"      # no options


def split(argv, method):
    """python moa.py split"""
    opt, = parse(Split, argv=argv)
    target, tokenizer = load_target(opt)
    net, to = load_net(opt, target, method), opt.to
    keep_last(target, net.cfg.tli)
    save(os.path.join(to, "backbone", "model.safetensors"), model_tensors(target),
         {"kind": "client", "config": asdict(replace(target.cfg, n_layer=len(target.blocks))), "tokenizer": tokenizer.to_dict(),
          "fingerprint": target.fingerprint})
    save(os.path.join(to, "moa", "model.safetensors"), *load(net.path, "", ""))
    print(f"{sum(map(torch.numel, model_tensors(target).values())):,} of the target's parameters and the drafter -> {to}")


def main(argv, method):
    """What follows python moa.py, whose module method is."""
    commands = {"serve": serve, "split": split}
    if argv[0] not in commands:
        fail(f"python moa.py takes nothing (a self-check), serve or split, not {argv[0]}")
    return command(commands[argv[0]], argv[1:], method)
