r"""
Mixture of Attentions across a network: the target on a server,
the drafter on a device that lives on when the line is cut.

    python moa.py serve --port 8765                               # the target and layer self-attention
    python sample.py --method moa --server http://127.0.0.1:8765  # SA, CA, embeddings, lm_head, N layers
    python moa.py split --to out/client                           # a folder with just what a client needs

Paper    Zimmer et al. 2025, arXiv:2410.03804, has this setting;
         its protocol is not public, this one is ours. wire.py has it field by field.
Idea     Two calls, JSON up, safetensors down:

         /open    the text so far, how many of its states are known  -> the next token; the states of the rest
         /verify  the length of the text, the tree behind it         -> accepted nodes, bonus; their states

         The server chooses with the session's Sampler, so the text is plain decoding's. A text only
         grows, so its length says whether both sides mean the same one. Whatever went wrong (evicted,
         restarted, cut off), the client opens again with the text that it has shown by then, and the
         server goes on behind it with the cache rows that still hold.
"""
import hmac
import http.server
import ipaddress
import json
import math
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from model import arg
from plumbing.checkpoint import load, model_tensors, save
from plumbing.client import keep_last_layers
from plumbing.drafters import load_net, load_target
from plumbing.options import DTYPES, OUT, command, fail, parse
from plumbing.sessions import Sessions
from plumbing.wire import Refused, refuse_unless


@dataclass
class Serve:
    """Verify the drafts of clients: python sample.py --method moa --server URL."""
    host: str = arg("127.0.0.1", "address to listen on; any but a loopback address needs a token")
    port: int = arg(8765, "port; 0 takes a free one")
    token: str = arg("", "what clients must know; empty = $NANOSPEC_TOKEN, if that is set")
    sessions: int = arg(16, "texts in work at a time; one more throws out the one that was idle longest",
                        low=1)
    memory_mb: int = arg(1024, "memory for their caches, likewise", low=1)
    idle: float = arg(600.0, "seconds until an idle session is dropped")
    nodes: int = arg(128, "most nodes of a tree, root included", low=1, high=4096)
    connections: int = arg(64, "connections at a time", low=1)
    timeout: float = arg(20.0, "seconds for a request to come in, or for an answer to be taken", low=0.05)
    out: str = arg(OUT, "folder of checkpoints, as train.py wrote it")
    checkpoint: str = arg("", "another training of the drafter: a folder or a .safetensors file")
    device: str = arg("auto", "cpu, cuda, cuda:1, mps")
    dtype: str = arg("auto", "of the weights; auto = bfloat16 on a GPU and where the processor "
                     "multiplies it, else float32", choices=DTYPES)
    threads: int = arg(0, "processor threads; 0 = as many as pay", high=1024)
    exact: bool = arg(True, "verify bit for bit as plain decoding does; off = as fast as can be")
    method, backbone, compile, graphs = "moa", "", False, False        # no options: this is MoA's server


class Server(http.server.ThreadingHTTPServer):
    """
    A thread for each connection reads and writes; one worker owns the model and all sessions.
    What is refused gets a 4xx and {"error": ...}.
    A request has opt.timeout seconds to come in, and max_body bytes.
    """
    daemon_threads, request_queue_size = True, 128

    def __init__(self, target, net, opt):
        self.opt, self.sessions = opt, Sessions(target, net, opt)
        self.connections = {}                                          # -> when its request began to come in
        self.max_body = 4096 + 12 * (target.cfg.block_size + 2 * opt.nodes)
        self.worker = ThreadPoolExecutor(1)
        self.cleanup = self.worker.submit(self.sessions.make_room)
        self.address_family = socket.AF_INET6 if ":" in opt.host else socket.AF_INET
        super().__init__((opt.host, opt.port), Handler)

    def verify_request(self, request, address):
        """http.server asks: may this connection stay?"""
        free = len(self.connections) < self.opt.connections
        if free:
            self.connections[request] = time.monotonic()
        else:
            request.sendall(b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\n\r\n"
                            b'{"error": "too many connections"}')
        return free

    def shutdown_request(self, request):
        self.connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self):
        """http.server calls this twice a second."""
        for connection, began in list(self.connections.items()):
            if began < time.monotonic() - self.opt.timeout:
                # However slowly bytes came so far: the thread that waits for them now reads an end.
                try:
                    connection.shutdown(socket.SHUT_RD)
                except OSError:
                    pass
        if self.cleanup.done():
            self.cleanup = self.worker.submit(self.sessions.make_room)

    def handle_error(self, request, address):
        if not isinstance(sys.exc_info()[1], OSError):                 # those are clients that went away
            super().handle_error(request, address)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of the server."""
    protocol_version = default_request_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        self.timeout = self.server.opt.timeout
        super().setup()

    def handle_one_request(self):
        self.server.connections[self.connection] = time.monotonic()
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

    def send_error(self, code, message=None, explain=None):
        """http.server's own complaints, as answers that a client of ours can read."""
        self.close_connection = True
        if code == 501:                                                # neither GET nor POST
            code = 405
        elif code >= 500:
            code = 400
        self.refuse(code, (message or "bad request")[:200])

    def log_message(self, *args):
        pass

    def read_body(self):
        """First who asks, then how much comes, and only then what it is."""
        opt, headers, max_body = self.server.opt, self.headers, self.server.max_body
        given = headers.get("Authorization", "").encode("latin-1", "replace")
        refuse_unless(not opt.token or hmac.compare_digest(given, f"Bearer {opt.token}".encode()),
                      "the bearer token is missing or wrong", 401)
        if self.command == "GET":
            return b"{}"
        n = headers.get("Content-Length", "")
        refuse_unless(n and "Transfer-Encoding" not in headers, "a Content-Length is needed", 411)
        refuse_unless(n.isascii() and n.isdigit(), "Content-Length must be a number")
        refuse_unless(len(n) < 12 and int(n) <= max_body, f"a body may have {max_body} bytes", 413)
        try:
            body = self.rfile.read(int(n))
        except TimeoutError:
            body = b""
        refuse_unless(len(body) == int(n), f"the body of {n} bytes was cut short, or came too slowly", 408)
        return body

    def do_POST(self):
        server, keep = self.server, self.close_connection
        self.close_connection = True                                   # until the whole body is read
        try:
            body = self.read_body()
            self.close_connection = keep
            server.connections[self.connection] = math.inf             # from now on it is we who take time
            if self.command == "GET":
                # A client that was cut off looks whether we are back.
                return self.reply(200, body)
            self.reply(200, server.worker.submit(server.sessions.answer, self.path, body).result())
        except Refused as e:
            self.refuse(e.status, str(e))
        except OSError:                                                # the client went away
            raise
        except Exception as e:                                         # our own fault: say so and live on
            print(f"error: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            self.refuse(500, f"the server failed: {type(e).__name__}")

    do_GET = do_POST


# --------------------------------------------------------------------------------------------------
# Commands

def serve(argv, method):
    """python moa.py serve"""
    opt, = parse(Serve, argv=argv)
    opt.token = opt.token or os.environ.get("NANOSPEC_TOKEN", "")
    try:
        local = opt.host == "localhost" or ipaddress.ip_address(opt.host).is_loopback
    except ValueError:
        local = False
    if not local and not opt.token:
        fail(f"--host {opt.host} may be reached by others: give --token (or NANOSPEC_TOKEN), "
             "or leave --host out")
    target, _ = load_target(opt)
    net = load_net(opt, target, method)
    try:
        server = Server(target, net, opt)
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", 0) or e
        fail(f"cannot listen on {opt.host} port {opt.port} ({reason}): name another --port or --host")
    print(f"serving {opt.out} at http://{server.server_address[0]}:{server.server_port}", flush=True)
    server.serve_forever()


@dataclass
class Split:
    """
    Write what a client needs of --out and no more:
    embeddings, lm_head, the target's last N layers, and the drafter.
    """
    to: str = arg("out/client", "folder for it; give it to sample.py as --out")
    out: str = arg(OUT, "folder of checkpoints, as train.py wrote it")
    # no options: all that loading asks for besides
    method, backbone, checkpoint, compile, device, dtype = "moa", "", "", False, "cpu", "float32"
    exact, threads, graphs = False, 0, False


def split(argv, method):
    """python moa.py split"""
    opt, = parse(Split, argv=argv)
    target, tokenizer = load_target(opt)
    net = load_net(opt, target, method)
    keep_last_layers(target, net.cfg.tli)
    tensors = model_tensors(target)
    meta = {"kind": "client", "config": asdict(replace(target.cfg, n_layer=len(target.blocks))),
            "tokenizer": tokenizer.to_dict(), "fingerprint": target.fingerprint}
    save(os.path.join(opt.to, "backbone", "model.safetensors"), tensors, meta)
    save(os.path.join(opt.to, "moa", "model.safetensors"), *load(net.path, "", ""))
    n = sum(x.numel() for x in tensors.values())
    print(f"{n:,} of the target's parameters and the drafter -> {opt.to}")


def main(argv, method):
    """What follows python moa.py, whose module method is."""
    commands = {"serve": serve, "split": split}
    if argv[0] not in commands:
        fail(f"python moa.py takes nothing (a self-check), serve or split, not {argv[0]}")
    return command(commands[argv[0]], argv[1:], method)
