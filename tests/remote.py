"""
What the tests of a server and its clients share: real sockets on loopback, tiny random targets, and a
server that treats its answers as a bad line would.
"""
import copy
import socket
import threading
import time
from contextlib import contextmanager

import pytest

import plumbing.server
from conftest import tiny
from moa import Drafter
from plumbing.checkpoint import fingerprint, model_tensors
from plumbing.client import Client, Remote, keep_last_layers
from plumbing.server import Serve, Server
from test_moa import make_net
from tree import Sampler, complete

PROMPT = [3, 1, 4, 1, 5]
SETTINGS = {
    "greedy": dict(temperature=0.0),
    "T = 1": dict(temperature=1.0, seed=7),
    "filtered": dict(temperature=0.9, top_k=9, top_p=0.9, seed=2**64 - 1),
}


def make_pair(tli=1, **options):
    """The target of a server, its drafter's net, and what a client has of the target."""
    target = tiny(n_layer=3, block_size=96)
    target.fingerprint = fingerprint(model_tensors(target))
    net = make_net(target, tli=tli, **options)
    net.fingerprint = fingerprint(net.state_dict())
    part = copy.deepcopy(target)
    keep_last_layers(part, tli)
    part.fingerprint = target.fingerprint
    return target, net, part


class Faulty(plumbing.server.Handler):
    """Does the work, then treats the answer as the next fault says: drop, cut, late, reset, or ok."""

    def reply(self, status, body):
        fault = self.server.faults.pop(0) if self.server.faults and self.command == "POST" else "ok"
        if self.server.deaf and self.command == "GET":                 # no sign of life for those who look
            fault = "drop"
        if fault == "late":
            time.sleep(0.4)                                            # longer than the clients below wait
        if fault in ("drop", "reset"):
            self.close_connection = True
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self.connection.close()
        elif fault == "cut":
            self.close_connection = True
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
            self.wfile.write(head + body[:len(body) // 2])
        else:
            super().reply(status, body)


def start(target, net, **options):
    """A server on a free port (or a given one) in a thread of its own."""
    server = Server(target, net, Serve(**{"port": 0, **options}))
    server.RequestHandlerClass, server.faults, server.deaf = Faulty, [], False
    how = dict(poll_interval=0.05)
    server.thread = threading.Thread(target=server.serve_forever, kwargs=how, daemon=True)
    server.thread.start()
    return server


def stop(server):
    """As if the process were killed: the port is closed and so is every connection."""
    server.shutdown()
    server.server_close()
    for connection in list(server.connections):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    server.thread.join()


@contextmanager
def serving(target, net, **options):
    server = start(target, net, **options)
    try:
        yield server
    finally:
        stop(server)


def make_client(port, **options):
    return Client(Remote(server=f"http://127.0.0.1:{port}", **{"wire": "float32", "probe": 0.02, **options}))


def finish(steps):
    """A generator of lists of tokens -> all of them, Stats."""
    tokens = []
    while True:
        try:
            tokens += next(steps)
        except StopIteration as end:
            return tokens, end.value


def remote(client, part, net, n, sampling, prompt=PROMPT, eos=(), **drafting):
    drafter = net and Drafter(net, part, **drafting)
    return finish(client.generate(part, prompt, n, drafter, Sampler(**sampling), eos))


def plain(target, n, sampling, prompt=PROMPT, eos=()):
    return complete(target, prompt, n, sampler=Sampler(**sampling), eos=eos)[0]


def some_jobs(n):
    """Prompts and samplings, all of them different, of n clients."""
    jobs = []
    for i in range(n):
        sampling = dict(temperature=i % 2 * 1.0, seed=i)
        jobs.append(dict(prompt=[i, 2, i + 3][:1 + i % 3], sampling=sampling))
    return jobs


def an_open(target, net):
    """A right message of /open."""
    return dict(session="0" * 32, backbone=target.fingerprint, drafter=net.fingerprint, text=PROMPT, have=0,
                max_len=60, wire="int8", temperature=1.0, top_k=0, top_p=1.0, seed=3)


def refused(capsys, main, *argv):
    """A command that ends with status 2 and one line on stderr -> that line."""
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err
