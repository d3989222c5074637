"""A server: hostile and broken requests, many clients on a bad line, its commands."""
import concurrent.futures
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import moa
import plumbing.server
import sample
from conftest import ROOT
from moa import Drafter
from plumbing.checkpoint import load
from plumbing.wire import Refused, Unreachable
from remote import (PROMPT, SETTINGS, Faulty, an_open, finish, make_client, make_pair, plain, refused,
                    remote, serving, some_jobs)
from tree import Sampler


# --------------------------------------------------------------------------------------------------
# Hostile input

def raw(port, data, wait=5.0, close=False):
    """
    Send bytes as they are; -> everything that comes back until the server hangs up,
    or b'' where it just did that.
    """
    with socket.create_connection(("127.0.0.1", port), wait) as s:
        answer = b""
        try:
            s.sendall(data)
            if close:
                s.shutdown(socket.SHUT_WR)
            while part := s.recv(65536):
                answer += part
        except ConnectionError:
            pass
        return answer


def status(answer):
    """The status of an HTTP answer whose body is one line of JSON with an error in it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert list(json.loads(body)) == ["error"] and b"\n" not in body, answer
    return int(head.split()[1])


def post(line, path, body, **headers):
    line.request("POST", path, body, headers)
    r = line.getresponse()
    return r.status, r.read()


def broken_requests(rng, opened, tree, n):
    """
    n times a path and a body, wrong in one way or another;
    opened and tree are right messages of /open and /verify.
    """
    junk = [None, True, -1, 1.5, 10**30, float("nan"), float("inf"), "", "x" * 300, [], {}, [[]], [None],
            [True], [-1], [10**9], [0.5], ["1"], {"0": 1}]
    for i in range(n):
        message, path = (dict(opened), "/open") if rng.random() < 0.5 else (dict(tree), "/verify")
        kind = rng.randrange(5)
        if kind == 0:                                                  # not the JSON of an object
            text = json.dumps(message)
            body = rng.choice([text[:rng.randrange(len(text))], text.encode()[::-1],
                               rng.randbytes(rng.randrange(200)), "[" * 3000, "1" * 3000, '"' + "\\" * 99,
                               "null", "[]", "3", "{}",
                               '{"session": "\ud800"}'.encode("utf-8", "surrogatepass")])
        elif kind == 1:                                                # a field is missing
            del message[rng.choice([k for k in message if k != "drafter"])]
            body = json.dumps(message)
        elif kind == 2:                                                # a field is something else
            key = rng.choice(list(message))
            right = dict(drafter=[None], temperature=[1.5], top_k=[10**30]).get(key, [])
            message[key] = rng.choice([x for x in junk if x not in right])
            body = json.dumps(message)
        elif kind == 3:                                                # parents that make no tree
            message, path, N = dict(tree), "/verify", rng.randrange(1, 9)
            parent = [-1] + [rng.randrange(i) for i in range(1, N)]
            at = rng.randrange(N)
            # itself, a later one, none
            parent[at] = rng.randrange(at, N + 2) if at else rng.choice([0, 1, -2])
            message |= dict(tokens=[1] * (N + rng.choice([0, 0, 1])), parent=parent)
            body = json.dumps(message)
        else:  # another path, session, length or shape
            deep = dict(tokens=[1] * 70, parent=list(range(-1, 69)))
            many = dict(tokens=[1] * 129, parent=list(range(-1, 128)))
            path, change = rng.choice([
                ("/verify", dict(session="f" * 32)), ("/verify", dict(length=4)),
                ("/verify", dict(length=6)), ("/verify", many), ("/verify", deep),
                ("/verify", dict(tokens=[23], parent=[-1])), ("/open", dict(text=[1] * 60)),
                ("/open", dict(max_len=97)), ("/open", dict(have=5)), ("/open", dict(backbone="0" * 16)),
                ("/open", dict(drafter="0" * 16)), ("/open", dict(temperature=-1.0)),
                ("/open", dict(seed=2**64)), ("/open", dict(top_p=2)), ("/open", dict(wire="pickle")),
                ("/", {}), ("/close", {}), ("/../verify", {}), ("//verify?x=1", {})])
            body = json.dumps((dict(opened) if path == "/open" else dict(tree)) | change)
        yield path, body if isinstance(body, bytes) else body.encode()


def test_two_thousand_broken_requests():
    """
    Catches a request that is taken, ends the server, or harms another session;
    each gets a 4xx and one line of JSON.
    """
    target, net, part = make_pair()
    opened = an_open(target, net)
    tree = dict(session="0" * 32, length=5, tokens=[1, 2, 3], parent=[-1, 0, 0])
    sampling = SETTINGS["T = 1"]
    with serving(target, net) as server:
        client, drafter = make_client(server.server_port), Drafter(net, part, max_nodes=8)
        steps = client.generate(part, PROMPT, 50, drafter, Sampler(**sampling))
        got = next(steps) + next(steps)
        line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        assert post(line, "/open", json.dumps(opened))[0] == 200
        for path, body in broken_requests(random.Random(0), opened, tree, 2000):
            code, answer = post(line, path, body)
            seen = path, body, code, answer
            assert 400 <= code < 500 and list(json.loads(answer)) == ["error"] and b"\n" not in answer, seen
        # the session that they were aimed at still works
        assert post(line, "/verify", json.dumps(tree))[0] == 200
        assert len(server.sessions.by_name) == 2 and len(server.connections) <= 2
        line.close()
        assert got + finish(steps)[0] == plain(target, 50, sampling)


def test_broken_http():
    """
    Catches bodies that are read before their length is known to be bearable,
    and answers that are not one line of JSON.
    """
    target, net, part = make_pair()
    with serving(target, net, timeout=0.5) as server:
        port, most = server.server_port, server.max_body
        head = b"POST /open HTTP/1.1\r\nHost: x\r\n"
        for want, data in [
                (411, head + b"\r\n"),
                (411, head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
                (411, head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"),
                (413, head + b"Content-Length: %d\r\n\r\n" % (most + 1)),
                (413, head + b"Content-Length: 1%s\r\n\r\n" % (b"0" * 3000)),
                (400, head + b"Content-Length: -5\r\n\r\n"), (400, head + b"Content-Length: 0x10\r\n\r\n"),
                (400, head + b"Content-Length: \xb2\r\n\r\n"), (400, head + b"Content-Length: 1e3\r\n\r\n"),
                (408, head + b"Content-Length: 50\r\n\r\n{half"), (400, b"\x16\x03\x01\x02\r\n\r\n"),
                (400, b"HELLO\r\n\r\n"),
                (405, b"BREW /open HTTP/1.1\r\n\r\n"), (405, b"DELETE / HTTP/1.1\r\n\r\n"),
                (400, b"POST /open HTTP/9.9\r\n\r\n"), (414, b"POST /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n"),
                (431, head + b"A: b\r\n" * 200 + b"\r\n"), (431, head + b"A: " + b"b" * 70000 + b"\r\n\r\n")]:
            answer = raw(port, data)
            assert status(answer) == want and len(answer) < 500, data[:80]
        for cut in (b"", b"P", b"POST /open HT", head, head + b"Content-Length: 50\r\n\r\n{"):
            assert raw(port, cut, close=True) == b"" or status(raw(port, cut, close=True)) < 500
        for seed in range(60):                                         # noise, with a line end here and there
            raw(port, random.Random(seed).randbytes(200).replace(b"\x80", b"\r\n"), close=True)
        assert remote(make_client(port), part, net, 20, {})[0] == plain(target, 20, {})
    until = time.monotonic() + 5
    while server.connections and time.monotonic() < until:
        time.sleep(0.01)
    assert not server.connections  # no thread and no socket is left behind


def test_slow_clients_and_too_many_of_them():
    """
    Catches a thread that is held for ever by bytes that come one by one,
    and a number of threads without a bound.
    """
    target, net, part = make_pair()
    with serving(target, net, timeout=0.6, connections=5) as server:
        port = server.server_port
        lines = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(5)]
        time.sleep(0.2)
        assert status(raw(port, b"")) == 429
        begin, answers = time.perf_counter(), {}
        for i, s in enumerate(lines):
            s.settimeout(0.02)
            s.sendall(b"POST /open HTTP/1.1\r\n")                      # some never come to an end of headers
            if i % 2 == 0:
                s.sendall(b"Content-Length: 500\r\n\r\n")
        while len(answers) < 5 and time.perf_counter() - begin < 4:
            for i, s in enumerate(lines):
                if i not in answers:
                    try:
                        s.sendall(b"x")  # keeps coming, faster than any time-out
                        answers[i] = s.recv(65536)
                    except TimeoutError:
                        pass
                    except ConnectionError:
                        answers[i] = b""
        assert len(answers) == 5  # all were ended; an answer can be lost in that
        assert all(status(answers[i]) == 408 for i in (0, 2, 4) if answers[i].endswith(b"}"))
        assert remote(make_client(port), part, net, 20, {})[0] == plain(target, 20, {})
        for s in lines:
            s.close()


def test_a_client_that_does_not_take_its_answer():
    """Catches a model that waits for one client's line while others want it."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        real, stuck = Faulty.reply, threading.Event()
        Faulty.reply = lambda self, *a: (stuck.wait(5) if "stuck" in self.headers else None, real(self, *a))
        try:
            line = http.client.HTTPConnection("127.0.0.1", server.server_port)
            line.request("POST", "/open", b"{}", {"stuck": "1"})
            begin = time.perf_counter()
            assert remote(make_client(server.server_port), part, net, 20, {})[0] == plain(target, 20, {})
            assert time.perf_counter() - begin < 4
        finally:
            stuck.set()
            Faulty.reply = real
            line.close()


def test_the_token():
    """Catches calls that are served without it, and a body that is read before it is known who sends it."""
    target, net, part = make_pair()
    secret = "geheim-é"
    with serving(target, net, token=secret) as server:
        port = server.server_port
        for header in (b"", b"Authorization: Bearer wrong\r\n", b"Authorization: geheim\r\n",
                       b"Authorization: Bearer \xff\xfe\r\n", "Authorization: Bearer geheim-\r\n".encode()):
            for start_line in (b"GET / HTTP/1.1\r\n", b"POST /open HTTP/1.1\r\nContent-Length: 99\r\n"):
                assert status(raw(port, start_line + header + b"\r\n")) == 401
        with pytest.raises(Refused, match="token"):
            remote(make_client(port), part, net, 9, {})
        with pytest.raises(Refused, match="token"):
            remote(make_client(port, token="x"), part, net, 9, {})
        assert remote(make_client(port, token=secret), part, net, 20, {})[0] == plain(target, 20, {})


def test_a_fault_of_the_server_does_not_end_it(capsys):
    """Catches NaN logits that take the session or the server with them."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        client = make_client(server.server_port, retries=0, offline_limit=0)
        steps = client.generate(part, PROMPT, 30, Drafter(net, part), Sampler())
        got = next(steps)
        weight = target.lm_head.weight.data
        target.lm_head.weight = torch.nn.Parameter(weight * float("nan"), requires_grad=False)
        with pytest.raises(Unreachable, match="FloatingPointError"):
            next(steps)
        target.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
        assert remote(make_client(server.server_port), part, net, 20, {})[0] == plain(target, 20, {}) and got
    assert "FloatingPointError" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Load

def under_load(seconds, tokens, clients=16, **options):
    """
    So many clients, a third of whose answers are dropped, cut, reset or late, write texts for so
    long; some go away in the middle. Every text must be the target's. -> texts, and how far the
    process grew in the second half, in bytes.
    """
    target, net, part = make_pair()
    statm = "/proc/self/statm"

    def resident():
        if not os.path.exists(statm):
            return 0
        with open(statm) as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    jobs = some_jobs(clients)
    truth = [plain(target, tokens, **job) for job in jobs]
    with serving(target, net, **options) as server:
        rng = random.Random(0)

        class Faults(list):                                            # never empty; a third of the answers
            def __bool__(self):
                return True

            def pop(self, at):
                return rng.choice(["drop", "cut", "reset", "late"]) if rng.random() < 1 / 3 else "ok"
        server.faults = Faults()
        texts, sizes, until = 0, [], time.monotonic() + seconds

        def write(i):
            nonlocal texts
            mine, n = random.Random(i), 0
            while time.monotonic() < until or not n:
                client = make_client(server.server_port, timeout=0.3, retries=30)
                prompt, sampler = jobs[i]["prompt"], Sampler(**jobs[i]["sampling"])
                steps = client.generate(part, prompt, tokens, Drafter(net, part, max_nodes=8), sampler)
                if n and mine.random() < 0.2:                          # goes away, without a word
                    got = next(steps) + next(steps)
                    steps.close()
                    assert got == truth[i][:len(got)]
                else:
                    got, stats = finish(steps)
                    assert got == truth[i] and not stats.offline, (i, got, truth[i])
                n += 1
                texts += 1
                assert len(server.sessions.by_name) <= server.opt.sessions
                assert len(server.connections) <= server.opt.connections
                sizes.append((time.monotonic(), resident()))

        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            for run in [pool.submit(write, i) for i in range(clients)]:
                run.result()
        assert sum(s.size for s in server.sessions.by_name.values()) <= server.opt.memory_mb * 2**20
        server.opt.idle = 0.05
        left = time.monotonic() + 10
        while (server.sessions.by_name or server.connections) and time.monotonic() < left:
            time.sleep(0.05)
        assert not server.sessions.by_name and not server.connections, "something is left behind"
    half = [size for at, size in sizes if at > until - seconds / 2] or [0]
    return texts, max(half) - half[0]


def test_sixteen_clients_on_a_bad_line(impatient):
    """
    Catches sessions that mix, tokens that come twice or never,
    and sessions, threads or sockets that stay.
    """
    texts, _ = under_load(0.2, 4, sessions=8)
    assert texts >= 16


@pytest.mark.long
def test_sixteen_clients_for_minutes():
    """Catches memory that grows with the number of texts."""
    texts, growth = under_load(180, 40, sessions=8)
    assert texts > 200 and growth < 32 * 2**20, (texts, growth)


# --------------------------------------------------------------------------------------------------
# Commands

def run(capsys, *argv):
    sample.main([str(a) for a in argv])
    return capsys.readouterr()


def serve(argv):
    return plumbing.server.serve(argv, moa)


def split(argv):
    return plumbing.server.split(argv, moa)


def test_the_two_commands(trained, tmp_path, capsys, monkeypatch):
    """Catches commands that do not find each other, and a client that needs more than split gives it."""
    part = str(tmp_path / "client")
    split(["--out", trained, "--to", part])
    assert "the target's parameters" in capsys.readouterr().out
    tensors, meta = load(os.path.join(part, "backbone", "model.safetensors"), "", "")
    full, _ = load(os.path.join(trained, "backbone", "model.safetensors"), "", "")
    assert {k.split(".")[1] for k in tensors if k.startswith("blocks")} == {"0"}
    assert "blocks.1.norm1.weight" in full and meta["config"]["n_layer"] == 1
    assert torch.equal(tensors["blocks.0.attn.qkv.weight"], full["blocks.1.attn.qkv.weight"])
    assert "holds client" in refused(capsys, sample.main, "--out", part, "--method", "plain")
    monkeypatch.setenv("NANOSPEC_TOKEN", "s3cret")
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    command = [sys.executable, "moa.py", "serve", "--port", "0", "--out", trained]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        args = ["--max-new-tokens", 40, "--prompt", "the cat ", "--temperature", 1]
        want = run(capsys, "--out", trained, "--method", "plain", *args).out
        for out, method, *more in ((trained, "moa"), (trained, "moa", "--compile"),
                                   (part, "moa", "--wire", "int8", "--tree", "chain"), (part, "plain")):
            got = run(capsys, "--out", out, "--method", method, "--server", url, *args, *more)
            assert got.out == want
            figures = r"server: \d+ calls, [\d.]+ tokens each, [\d,]+ bytes up and [\d,]+ down"
            assert re.search(figures, got.err), got.err
        port = url.rsplit(":", 1)[1]
        assert "port " + port in refused(capsys, serve, "--port", port, "--out", trained)
        monkeypatch.setenv("NANOSPEC_TOKEN", "")
        args = ["--out", part, "--method", "moa", "--server", url, *args]
        assert "bearer token" in refused(capsys, sample.main, *args)
    finally:
        process.kill()
        process.wait()
    assert "no answer" in refused(capsys, sample.main, *args, "--retries", 0)


@pytest.mark.parametrize("argv, says", [
    (["--host", "0.0.0.0"], "--token"), (["--host", "example.org"], "--token"),
    (["--port", "99999"], "99999"), (["--sessions", "0"], "sessions"),
    (["--checkpoint", "/nonexistent"], "no moa checkpoint"),
])
def test_mistakes_about_a_server_get_one_line(argv, says, trained, capsys, monkeypatch):
    """Catches tracebacks for what a user typed, and a server that everybody can reach."""
    monkeypatch.delenv("NANOSPEC_TOKEN", raising=False)
    assert says in refused(capsys, serve, "--out", trained, *argv).replace("0-65535", "99999")
