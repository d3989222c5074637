"""
MoA across a network: wire format, server, client, lost lines, hostile input. Real sockets on
loopback, tiny random targets.

The faults are real ones: answers dropped after the work was done, cut in the middle or late, a port
where nobody listens.
"""
import concurrent.futures
import copy
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
import types
from contextlib import contextmanager

import pytest
import torch

import plumbing.client
import plumbing.server
import sample
from conftest import tiny
from plumbing.checkpoint import fingerprint, load, load_model, model_tensors
from plumbing.client import Client, Remote, keep_last_layers
from plumbing.server import Serve, Server
from plumbing.wire import WIRE_DTYPES, Refused, Unreachable, pack, unpack
import moa
from moa import Drafter
from test_moa import from_scratch, make_net, random_text
from tree import Sampler, chain, complete

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROMPT = [3, 1, 4, 1, 5]
SETTINGS = {"greedy": dict(temperature=0.0), "T = 1": dict(temperature=1.0, seed=7),
            "filtered": dict(temperature=0.9, top_k=9, top_p=0.9, seed=2**64 - 1)}


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
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:len(body) // 2])
        else:
            super().reply(status, body)


def start(target, net, **options):
    """A server on a free port (or a given one) in a thread of its own."""
    server = Server(target, net, Serve(**{"port": 0, **options}))
    server.RequestHandlerClass, server.faults, server.deaf = Faulty, [], False
    server.thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.05), daemon=True)
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
    return finish(client.generate(part, prompt, n, net and Drafter(net, part, **drafting), Sampler(**sampling), eos))


def plain(target, n, sampling, prompt=PROMPT, eos=()):
    return complete(target, prompt, n, sampler=Sampler(**sampling), eos=eos)[0]


@pytest.fixture
def impatient(monkeypatch):
    """
    A client whose pauses between its tries are a tenth as long.
    -> their lengths as they would have been.
    """
    pauses = []
    shorter = lambda seconds: pauses.append(seconds) or time.sleep(seconds / 10)
    monkeypatch.setattr(plumbing.client, "time", types.SimpleNamespace(**{**vars(time), "sleep": shorter}))
    return pauses


# --------------------------------------------------------------------------------------------------
# Wire

@pytest.mark.parametrize("wire, bound", [("float32", 1e-6), ("float16", 1e-3), ("int8", 1 / 250)])
def test_what_is_packed_comes_back(wire, bound):
    """Catches a scale that belongs to another vector, and a wire that is no smaller than it says."""
    torch.manual_seed(0)
    s = torch.randn(1, 5, 16).double() * torch.logspace(-3, 3, 5).double()[:, None]  # vectors of all sizes
    sent = dict(s=s, k=torch.randn(2, 1, 2, 5, 4).double(), v=torch.zeros(0, 1, 2, 5, 4).double())
    data = pack({"path": [0, 2], "bonus": 7}, sent, wire)
    answer, got = unpack(data, s)
    assert answer == {"path": [0, 2], "bonus": 7} and got.keys() == sent.keys()
    for name, x in sent.items():
        assert got[name].shape == x.shape and got[name].dtype == x.dtype
        if x.numel():
            assert ((got[name] - x).abs() / x.abs().amax(-1, keepdim=True)).max() < bound, name
    assert len(data) < 900 + (s.numel() + 80) * {"float32": 4, "float16": 2, "int8": 1.6}[wire]


def test_extreme_states_stay_finite():
    """Catches an overflow of fp16 and a division by an all-zero vector."""
    x = torch.tensor([[[1e9, -1e9], [0.0, 0.0]]])
    for wire in WIRE_DTYPES:
        got = unpack(pack({}, dict(s=x), wire), x)[1]["s"]
        assert got.isfinite().all() and (got[0, 1] == 0).all() and got[0, 0, 0] > 6e4


# --------------------------------------------------------------------------------------------------
# The same text

@pytest.mark.parametrize("tli, wire, setting", [(tli, wire, list(SETTINGS)[(tli + i) % 3])
                                                for tli in range(3) for i, wire in enumerate(WIRE_DTYPES)])
def test_text_is_plain_decodings(tli, wire, setting):
    """
    Catches whatever makes the server's choice, its cache,
    or a position depend on the draft or on the wire.
    """
    target, net, part = make_pair(tli)
    with serving(target, net) as server:
        tokens, stats = remote(make_client(server.server_port, wire=wire), part, net, 40, SETTINGS[setting], nodes=12)
    assert tokens == plain(target, 40, SETTINGS[setting])
    assert sum(stats.accepted) == 40 and not stats.offline and stats.calls == len(stats.accepted)


@pytest.mark.parametrize("setting", ["greedy", "T = 1"])
def test_the_client_drafts_what_it_drafts_with_the_target_beside_it(setting):
    """Catches states, keys or values that arrive in another order, or rows of rejected drafts among them."""
    for tli, lsa in ((0, True), (2, True), (1, False)):
        target, net, part = make_pair(tli, lsa=lsa)
        with serving(target, net) as server:
            _, there = remote(make_client(server.server_port), part, net, 40, SETTINGS[setting], nodes=12)
        _, here = complete(target, PROMPT, 40, Drafter(net, target, nodes=12), Sampler(**SETTINGS[setting]))
        assert there.accepted == here.accepted and max(here.accepted) > 1


def test_a_good_drafter_needs_few_calls():
    """Catches a server that accepts nothing. Untrained with N = L the drafter is the target itself."""
    target, _, _ = make_pair()
    net = make_net(target, shaken=False, tli=3)
    net.fingerprint = fingerprint(net.state_dict())
    with serving(target, net) as server:
        tokens, stats = remote(make_client(server.server_port), target, net, 60, SETTINGS["T = 1"], shape=chain(8))
    assert tokens == plain(target, 60, SETTINGS["T = 1"]) and stats.calls == 1 + -(-59 // 9), stats.accepted


def test_without_a_drafter_every_token_is_a_call_and_no_states_come():
    """Catches states that are sent to a client which has no use for them."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        tokens, stats = remote(make_client(server.server_port), part, None, 30, SETTINGS["T = 1"])
        _, other = remote(make_client(server.server_port), part, net, 30, SETTINGS["T = 1"])
    assert tokens == plain(target, 30, SETTINGS["T = 1"]) and stats.accepted == [1] * 30 and stats.calls == 30
    assert stats.down / stats.calls < 330 < other.down / other.calls


@pytest.mark.parametrize("n", [0, 1, 2, 500])
def test_budget_end_of_context_and_end_of_text(n):
    """
    Catches a tree that reaches beyond the last position, tokens after the end,
    and a budget that is not kept.
    """
    target, net, part = make_pair()
    sampling = SETTINGS["T = 1"]
    with serving(target, net) as server:
        client = make_client(server.server_port)
        tokens, stats = remote(client, part, net, n, sampling)
        want = plain(target, n, sampling)
        assert tokens == want and stats.stop == ("budget" if n < 91 else "context")
        if n > 2:
            eos = {want[10]}
            assert remote(client, part, net, n, sampling, eos=eos)[0] == plain(target, n, sampling, eos=eos)
            long = random_text(target, 1, 95)[0].tolist()
            assert remote(client, part, net, n, sampling, long)[0] == plain(target, n, sampling, long)
            for prompt in ([], [0] * 96):
                with pytest.raises(ValueError):
                    remote(client, part, net, n, sampling, prompt)


# --------------------------------------------------------------------------------------------------
# Sessions

@pytest.mark.parametrize("sessions", [16, 2])
def test_many_clients_at_once(sessions):
    """
    Catches sessions that share a cache, a sampler or an answer;
    with room for two of six, all the time evicted ones.
    """
    target, net, part = make_pair()
    jobs = [dict(prompt=[i, 2, i + 3][:1 + i % 3], sampling=dict(temperature=i % 2 * 1.0, seed=i)) for i in range(6)]
    with serving(target, net, sessions=sessions) as server:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            clients = [make_client(server.server_port, timeout=60) for _ in jobs]
            runs = [pool.submit(remote, client, part, net, 24, nodes=8, **job) for client, job in zip(clients, jobs)]
            texts = [run.result()[0] for run in runs]
        assert len(server.sessions.by_name) == min(6, sessions)
    assert texts == [plain(target, 24, **job) for job in jobs]


def test_the_longest_idle_session_goes_first_and_idle_ones_go_alone():
    """Catches eviction of a session in use, a bound that is not kept, and memory that is never given back."""
    target, net, part = make_pair()
    with serving(target, net, sessions=3) as server:
        steps = [make_client(server.server_port).generate(part, PROMPT, 40, Drafter(net, part), Sampler()) for _ in range(4)]
        for i in (0, 1, 2):
            next(steps[i])
        before = list(server.sessions.by_name)
        next(steps[0])
        next(steps[3])                                                 # now 1 was idle longest
        assert [name in server.sessions.by_name for name in before] == [True, False, True] and len(server.sessions.by_name) == 3
        size = max(s.size for s in server.sessions.by_name.values())
        server.opt.memory_mb = 2 * size / 2**20
        next(steps[3])
        assert len(server.sessions.by_name) <= 2 and sum(s.size for s in server.sessions.by_name.values()) <= 2 * size
        server.opt.idle = 0.1
        time.sleep(0.5)
        assert not server.sessions.by_name
        for s in steps:                                                # and nobody noticed
            next(s)
        server.opt.memory_mb = size / 4 / 2**20
        with pytest.raises(Refused, match="more memory") as e:
            remote(make_client(server.server_port), part, net, 9, {})
        assert e.value.status == 413


def test_a_repeated_call_gets_the_same_answer_and_a_stale_one_is_refused():
    """
    Catches a server that does the work twice when an answer was lost,
    or takes a call about a text that it no longer has.
    """
    target, net, _ = make_pair()
    server = Server(target, net, Serve(port=0))
    ask = lambda path, message, server=server: server.sessions.answer(path, json.dumps(message).encode())
    call = dict(session="0" * 32, backbone=target.fingerprint, drafter=net.fingerprint, text=PROMPT, have=0, max_len=60,
                wire="int8", temperature=1.0, top_k=0, top_p=1.0, seed=3)
    first = ask("/open", call)
    assert ask("/open", dict(call)) is first
    truth = plain(target, 12, dict(temperature=1.0, seed=3))
    tree = dict(session="0" * 32, length=5, tokens=[*truth[:3], 0], parent=[-1, 0, 1, 0])
    answer = ask("/verify", tree)
    assert unpack(answer, target.wte.weight)[0] == {"path": [0, 1, 2], "bonus": truth[3]}
    assert ask("/verify", dict(tree)) is answer
    with pytest.raises(Refused) as e:
        ask("/verify", tree | dict(tokens=[*truth[:3], 1]))
    assert e.value.status == 409 and len(server.sessions.by_name["0" * 32].text) == 8
    # a client that wrote something else meanwhile
    back = ask("/open", call | dict(text=PROMPT + [9, 9], have=5))
    want = plain(target, 1, dict(temperature=1.0, seed=3), PROMPT + [9, 9])
    answer, states = unpack(back, target.wte.weight)
    assert answer["bonus"] == want[0] and states["s"].shape[1] == 2
    fresh = Server(target, net, Serve(port=0))
    other = unpack(ask("/open", call | dict(text=PROMPT + [9, 9]), fresh), target.wte.weight)[1]
    # the rows that it kept are those of a fresh cache
    assert (states["s"] - other["s"][:, 5:]).abs().max() < 1e-3
    # another text altogether
    answer, states = unpack(ask("/open", call | dict(text=[9] * 7, have=6)), target.wte.weight)
    fresh.sessions.by_name.clear()
    want, other = unpack(ask("/open", call | dict(text=[9] * 7, have=6), fresh), target.wte.weight)
    assert answer == want and (states["s"] - other["s"]).abs().max() < 1e-3
    server.server_close(), fresh.server_close()


def test_a_restarted_server_goes_on_with_the_text(impatient):
    """Catches a session that is lost for good, and a text that changes when it is opened anew."""
    target, net, part = make_pair()
    for setting in ("greedy", "T = 1"):
        server = start(target, net)
        port, got = server.server_port, []
        steps = make_client(port).generate(part, PROMPT, 60, Drafter(net, part, nodes=8), Sampler(**SETTINGS[setting]))
        for _ in range(3):
            got += next(steps)
            stop(server)
            server = start(target, net, port=port)
        tokens, stats = finish(steps)
        stop(server)
        assert got + tokens == plain(target, 60, SETTINGS[setting]) and not stats.offline and stats.calls > len(stats.accepted)


def test_a_call_that_comes_late():
    """
    Catches a client that cannot go on when an old call of its own,
    long given up, takes its session back.
    """
    target, net, part = make_pair()
    with serving(target, net) as server:
        drafter, sampler = Drafter(net, part, nodes=8), Sampler(**SETTINGS["T = 1"])
        steps = make_client(server.server_port).generate(part, PROMPT, 60, drafter, sampler)
        got = next(steps)
        (session,) = server.sessions.by_name.values()
        old = session.request
        got += next(steps) + next(steps)
        server.worker.submit(server.sessions.answer, *old).result()
        assert session.text == PROMPT
        tokens, stats = finish(steps)
    assert got + tokens == plain(target, 60, SETTINGS["T = 1"]) and not stats.offline


# --------------------------------------------------------------------------------------------------
# The line fails

def check_text(target, tokens, offline, sampling):
    """
    Every token not written alone is the target's choice after the text before it;
    so pieces between are plain decoding's.
    """
    for i, token in enumerate(tokens):
        if i not in offline:
            assert [token] == plain(target, 1, sampling, PROMPT + tokens[:i]), f"token {i} is not the target's"


@pytest.mark.parametrize("fault", ["drop", "cut", "late", "reset"])
def test_lost_answers_are_asked_for_again(fault, impatient):
    """Catches work that is done twice, tokens that come twice or never, and a retry that is not tried."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        server.faults = ["ok", fault, "ok", "ok", fault, fault, "ok", "ok"] if fault != "late" else [fault, "ok", "ok", fault]
        tokens, stats = remote(make_client(server.server_port, timeout=0.2, retries=5), part, net, 30, SETTINGS["T = 1"], nodes=8)
    assert tokens == plain(target, 30, SETTINGS["T = 1"]) and not stats.offline and not server.faults
    assert stats.calls >= len(stats.accepted) + (2 if fault == "late" else 3)


@pytest.mark.parametrize("setting", ["greedy", "T = 1"])
@pytest.mark.parametrize("tli", [0, 2])
def test_alone_and_back(tli, setting):
    """
    Catches tokens that are lost, shown twice or changed when the line comes back, tokens written
    alone that are not marked, and a session that does not go on as the target would.
    """
    target, net, part = make_pair(tli)
    sampling, tokens, alone = SETTINGS[setting], [], []
    server = start(target, net)
    port = server.server_port
    client = make_client(port, retries=0, offline_limit=40)
    steps = client.generate(part, PROMPT, 80, Drafter(net, part, nodes=8), Sampler(**sampling))
    for outage in (1, 9):
        for _ in range(3):
            out = next(steps)
            tokens += out
            assert not client.alone
        stop(server)
        for _ in range(outage):
            alone.append(len(tokens))
            tokens += next(steps)
            assert client.alone and len(tokens) == alone[-1] + 1
        server = start(target, net, port=port)
        while client.alone:                                            # until the probe has found it
            time.sleep(0.05)
            before = len(tokens)
            tokens += next(steps)
            alone += [before] if client.alone else []
    rest, stats = finish(steps)
    stop(server)
    tokens += rest
    assert len(tokens) == 80 and stats.offline == alone and sum(stats.accepted) + len(alone) == 80
    check_text(target, tokens, alone, sampling)


def test_back_at_a_server_that_still_has_the_session():
    """Catches a server that does not take tokens written meanwhile as text, or reads its kept rows twice."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        client, got, alone = make_client(server.server_port, retries=0), [], []
        steps = client.generate(part, PROMPT, 80, Drafter(net, part, nodes=8), Sampler(**SETTINGS["T = 1"]))
        got += next(steps)
        server.faults, server.deaf = ["drop"], True  # the work is done: the server is ahead of the client
        for _ in range(7):
            alone.append(len(got))
            # with the noise of its place, as the target would choose
            logits = from_scratch(net, target, PROMPT, got)
            got += next(steps)
            assert got[-1:] == Sampler(**SETTINGS["T = 1"]).choose(logits[None], [len(PROMPT + got) - 1])
        server.deaf = False
        time.sleep(0.5)
        down = client.stats.down
        got += next(steps)
        assert not client.alone and len(server.sessions.by_name) == 1
        assert client.stats.down - down < 1200 + 8 * (16 + 16) * 4     # states of eight tokens, not of all
        tokens, stats = finish(steps)
    assert stats.offline == alone
    check_text(target, got + tokens, alone, SETTINGS["T = 1"])


def test_the_limit_of_tokens_written_alone():
    """Catches a client that goes on for ever, or stops before it may; with 0 it says so at once."""
    target, net, part = make_pair()
    for limit in (0, 5):
        server = start(target, net)
        client = make_client(server.server_port, retries=0, offline_limit=limit)
        steps = client.generate(part, PROMPT, 80, Drafter(net, part), Sampler())
        next(steps)
        stop(server)
        for _ in range(limit):
            assert len(next(steps)) == 1
        with pytest.raises(Unreachable, match=f"no answer.*{limit} tokens were written without it"):
            next(steps)


def test_at_the_limit_the_client_asks_once_more():
    """Catches a text that is given up although the server is back, only because no probe has seen it yet."""
    target, net, part = make_pair()
    server = start(target, net)
    client = make_client(server.server_port, retries=0, offline_limit=3, probe=1000.0)
    steps, tokens = client.generate(part, PROMPT, 30, Drafter(net, part), Sampler()), []
    tokens += next(steps)
    stop(server)
    for _ in range(3):
        tokens += next(steps)
    with serving(target, net, port=server.server_port):
        rest, stats = finish(steps)
    assert stats.offline == [1, 2, 3] and len(tokens + rest) == 30
    check_text(target, tokens + rest, stats.offline, {})


def test_nobody_there_at_the_start(impatient):
    """
    Catches a client that waits for ever or drafts from nothing;
    it tries as often as it was told to, ever more slowly.
    """
    target, net, part = make_pair()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))                                       # bound, but not listening: refused
        client = make_client(s.getsockname()[1], retries=2)
        with pytest.raises(Unreachable, match="3 tries"):
            remote(client, part, net, 9, {})
    assert client.stats.calls == 3 and [p for p in impatient if p] == [0.2, 0.4]


def test_waiting_for_a_dead_server_does_not_slow_the_text():
    """Catches a probe that blocks tokens: a port that takes connections and never answers."""
    target, net, part = make_pair()
    server = start(target, net)
    port = server.server_port
    client = make_client(port, retries=0, timeout=0.5, probe=0.01)
    steps = client.generate(part, PROMPT, 60, Drafter(net, part), Sampler())
    next(steps)
    stop(server)
    with socket.socket() as hole:
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hole.bind(("127.0.0.1", port))
        hole.listen(50)
        next(steps)                                                    # this one waits for the time-out
        begin = time.perf_counter()
        for _ in range(20):
            next(steps)
        assert time.perf_counter() - begin < 4 and client.alone        # 20 time-outs would be 10 s
        steps.close()


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("tli, lsa", [(0, True), (1, True), (3, True), (1, False)])
def test_alone_is_the_drafters_own_distribution(style, tli, lsa):
    """
    Catches stale rows of SA or of the last layers, wrong positions,
    and an end at the depth of the tree (4).
    """
    target = tiny(style, n_layer=3, block_size=64)
    net = make_net(target, tli=tli, lsa=lsa)
    text, drafter = random_text(target, 1, 30)[0].tolist(), Drafter(net, target)
    with torch.inference_mode():
        cache = target.new_cache(64)
        drafter.start(target, 64)
        for S in (6, 11):  # a second time, after drafts and tokens written alone
            new = text[cache.length:S]
            hidden = target.hidden(torch.tensor([new]), cache=cache)
            cache.keep(range(len(new)))
            drafter.observe(new, hidden[0], cache)
            drafter.draft(text[S], Sampler())
            for end in range(S + 1, S + 8):
                logits = drafter.alone(text[S:end])
                assert (logits[0] - from_scratch(net, target, text[:S], text[S:end])).abs().max() < 1e-6


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
    junk = [None, True, -1, 1.5, 10**30, float("nan"), float("inf"), "", "x" * 300, [], {}, [[]], [None], [True], [-1], [10**9],
            [0.5], ["1"], {"0": 1}]
    for i in range(n):
        message, path = (dict(opened), "/open") if rng.random() < 0.5 else (dict(tree), "/verify")
        kind = rng.randrange(5)
        if kind == 0:                                                  # not the JSON of an object
            text = json.dumps(message)
            body = rng.choice([text[:rng.randrange(len(text))], text.encode()[::-1], rng.randbytes(rng.randrange(200)),
                               "[" * 3000, "1" * 3000, '"' + "\\" * 99, "null", "[]", "3", "{}",
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
                ("/verify", dict(session="f" * 32)), ("/verify", dict(length=4)), ("/verify", dict(length=6)), ("/verify", many),
                ("/verify", deep), ("/verify", dict(tokens=[23], parent=[-1])), ("/open", dict(text=[1] * 60)),
                ("/open", dict(max_len=97)), ("/open", dict(have=5)), ("/open", dict(backbone="0" * 16)),
                ("/open", dict(drafter="0" * 16)), ("/open", dict(temperature=-1.0)), ("/open", dict(seed=2**64)),
                ("/open", dict(top_p=2)), ("/open", dict(wire="pickle")), ("/", {}), ("/close", {}), ("/../verify", {}),
                ("//verify?x=1", {})])
            body = json.dumps((dict(opened) if path == "/open" else dict(tree)) | change)
        yield path, body if isinstance(body, bytes) else body.encode()


def test_two_thousand_broken_requests():
    """
    Catches a request that is taken, ends the server, or harms another session;
    each gets a 4xx and one line of JSON.
    """
    target, net, part = make_pair()
    opened = dict(session="0" * 32, backbone=target.fingerprint, drafter=net.fingerprint, text=PROMPT, have=0, max_len=60,
                  wire="int8", temperature=1.0, top_k=0, top_p=1.0, seed=3)
    tree = dict(session="0" * 32, length=5, tokens=[1, 2, 3], parent=[-1, 0, 0])
    sampling = SETTINGS["T = 1"]
    with serving(target, net) as server:
        steps = make_client(server.server_port).generate(part, PROMPT, 50, Drafter(net, part, nodes=8), Sampler(**sampling))
        got = next(steps) + next(steps)
        line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        assert post(line, "/open", json.dumps(opened))[0] == 200
        for path, body in broken_requests(random.Random(0), opened, tree, 2000):
            code, answer = post(line, path, body)
            assert 400 <= code < 500 and list(json.loads(answer)) == ["error"] and b"\n" not in answer, (path, body, code, answer)
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
                (411, head + b"\r\n"), (411, head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
                (411, head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"),
                (413, head + b"Content-Length: %d\r\n\r\n" % (most + 1)),
                (413, head + b"Content-Length: 1%s\r\n\r\n" % (b"0" * 3000)),
                (400, head + b"Content-Length: -5\r\n\r\n"), (400, head + b"Content-Length: 0x10\r\n\r\n"),
                (400, head + b"Content-Length: \xb2\r\n\r\n"), (400, head + b"Content-Length: 1e3\r\n\r\n"),
                (408, head + b"Content-Length: 50\r\n\r\n{half"), (400, b"\x16\x03\x01\x02\r\n\r\n"),
                (400, b"HELLO\r\n\r\n"), (405, b"BREW /open HTTP/1.1\r\n\r\n"), (405, b"DELETE / HTTP/1.1\r\n\r\n"),
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
            s.sendall(b"POST /open HTTP/1.1\r\n" if i % 2 else b"POST /open HTTP/1.1\r\nContent-Length: 500\r\n\r\n")
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


def test_another_training_is_refused():
    """Catches a client whose drafter or embeddings are not those of the server."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        other = make_net(target, seed=2, tli=1)
        other.fingerprint = fingerprint(other.state_dict())
        with pytest.raises(Refused, match="drafter") as e:
            remote(make_client(server.server_port), part, other, 9, {})
        assert e.value.status == 412
        part.fingerprint = "0" * 16
        with pytest.raises(Refused, match="backbone"):
            remote(make_client(server.server_port), part, net, 9, {})


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
    resident = lambda: int(open(statm).read().split()[1]) * os.sysconf("SC_PAGE_SIZE") if os.path.exists(statm) else 0
    jobs = [dict(prompt=[i, 2, i + 3][:1 + i % 3], sampling=dict(temperature=i % 2 * 1.0, seed=i)) for i in range(clients)]
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
                steps = client.generate(part, jobs[i]["prompt"], tokens, Drafter(net, part, nodes=8), Sampler(**jobs[i]["sampling"]))
                if n and mine.random() < 0.2:                          # goes away, without a word
                    got = next(steps) + next(steps)
                    steps.close()
                    assert got == truth[i][:len(got)]
                else:
                    got, stats = finish(steps)
                    assert got == truth[i] and not stats.offline, (i, got, truth[i])
                n += 1
                texts += 1
                assert len(server.sessions.by_name) <= server.opt.sessions and len(server.connections) <= server.opt.connections
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
# Simulated network, statistics, command line

def test_the_simulated_network_and_the_counts():
    """Catches a delay that is not slept, or not by the bytes, and bytes that are counted wrongly."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        _, free = remote(make_client(server.server_port), part, None, 3, {})
        _, slow = remote(make_client(server.server_port, rtt_ms=150), part, None, 3, {})
        _, thin = remote(make_client(server.server_port, mbit=0.05), part, None, 3, {})
        assert free.waiting < 4 * 0.15 <= slow.waiting                 # three calls and a handshake
        assert thin.waiting >= 8 * (thin.up + thin.down) / 50_000
        seen = dict(up=0, down=0)
        listener = socket.create_server(("127.0.0.1", 0))
        def proxy():
            a, _ = listener.accept()
            b = socket.create_connection(("127.0.0.1", server.server_port))
            def pump(x, y, name):
                while data := x.recv(65536):
                    seen[name] += len(data)
                    y.sendall(data)
                y.shutdown(socket.SHUT_WR)
            thread = threading.Thread(target=pump, args=(b, a, "down"), daemon=True)
            thread.start()
            pump(a, b, "up")
            thread.join()
            a.close(), b.close()
        thread = threading.Thread(target=proxy, daemon=True)
        thread.start()
        _, stats = remote(make_client(listener.getsockname()[1]), part, net, 30, {})
        thread.join(5)
        listener.close()
        assert (stats.up, stats.down) == (seen["up"], seen["down"]) and stats.up > 0


def run(capsys, *argv):
    sample.main([str(a) for a in argv])
    return capsys.readouterr()


def serve(argv):
    return plumbing.server.serve(argv, moa)


def split(argv):
    return plumbing.server.split(argv, moa)


def refused(capsys, main, *argv):
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_the_two_commands(trained, tmp_path, capsys, monkeypatch):
    """Catches commands that do not find each other, and a client that needs more than split gives it."""
    part = str(tmp_path / "client")
    split(["--out", trained, "--to", part])
    assert "the target's parameters" in capsys.readouterr().out
    tensors, meta = load(os.path.join(part, "backbone", "model.safetensors"), "", "")
    full, _ = load(os.path.join(trained, "backbone", "model.safetensors"), "", "")
    assert {k.split(".")[1] for k in tensors if k.startswith("blocks")} == {"0"} and "blocks.1.norm1.weight" in full
    assert torch.equal(tensors["blocks.0.attn.qkv.weight"], full["blocks.1.attn.qkv.weight"]) and meta["config"]["n_layer"] == 1
    assert "holds client" in refused(capsys, sample.main, "--out", part, "--method", "plain")
    monkeypatch.setenv("NANOSPEC_TOKEN", "s3cret")
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    command = [sys.executable, "moa.py", "serve", "--port", "0", "--out", trained]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        args = ["--max-new-tokens", 40, "--prompt", "the cat ", "--temperature", 1]
        want = run(capsys, "--out", trained, "--method", "plain", *args).out
        for out, method, *more in ((trained, "moa"), (trained, "moa", "--compile"), (part, "moa", "--wire", "int8", "--tree", "chain"), (part, "plain")):
            got = run(capsys, "--out", out, "--method", method, "--server", url, *args, *more)
            assert got.out == want
            assert re.search(r"server: \d+ calls, [\d.]+ tokens each, [\d,]+ bytes up and [\d,]+ down", got.err), got.err
        port = url.rsplit(":", 1)[1]
        assert "port " + port in refused(capsys, serve, "--port", port, "--out", trained)
        monkeypatch.setenv("NANOSPEC_TOKEN", "")
        assert "bearer token" in refused(capsys, sample.main, "--out", part, "--method", "moa", "--server", url, *args)
    finally:
        process.kill()
        process.wait()
    assert "no answer" in refused(capsys, sample.main, "--out", part, "--method", "moa", "--server", url, *args, "--retries", 0)


@pytest.mark.parametrize("main, argv, says", [
    (serve, ["--host", "0.0.0.0"], "--token"), (serve, ["--host", "example.org"], "--token"),
    (serve, ["--port", "99999"], "99999"),
    (serve, ["--sessions", "0"], "sessions"), (serve, ["--checkpoint", "/nonexistent"], "no moa checkpoint"),
    (sample.main, ["--server", "localhost:8765", "--method", "moa"], "http://"),
    (sample.main, ["--server", "http://x:99999", "--method", "moa"], "99999"),
    (sample.main, ["--server", "http://127.0.0.1:1", "--method", "medusa"], "--method moa"),
    (sample.main, ["--wire", "int4"], "wire"),
    (sample.main, ["--server", "http://127.0.0.1:1", "--method", "moa", "--compare"], "--compare"),
    (sample.main, ["--server", "http://127.0.0.1:1", "--method", "moa", "--show", "tree"], "--show tree"),
    (sample.main, ["--server", "http://127.0.0.1:1", "--method", "all"], "--method moa or plain"),
])
def test_mistakes_get_one_line(main, argv, says, trained, capsys, monkeypatch):
    """Catches tracebacks for what a user typed, and a server that everybody can reach."""
    monkeypatch.delenv("NANOSPEC_TOKEN", raising=False)
    assert says in refused(capsys, main, "--out", trained, *argv).replace("0-65535", "99999")


def test_tokens_written_alone_are_dim_on_a_terminal(trained, capsys, monkeypatch):
    """Catches marks in a pipe, and none where somebody looks."""
    class Client:
        alone = False
        def generate(self, *args):
            yield [65]
            self.alone = True
            yield [66]
            return plumbing.client.RemoteStats(accepted=[1], offline=[1])
    _, tokenizer, _ = load_model(os.path.join(trained, "backbone", "model.safetensors"))
    a, b = (tokenizer.decode([i]) for i in (65, 66))
    for terminal, want in ((True, f"{a}\033[2m{b}\033[0m\n"), (False, f"{a}{b}\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        sample.stream(sample.Options(), None, tokenizer, [0], None, client=Client())
        assert capsys.readouterr().out == want


def test_the_bench_runs_and_ends_with_json(trained, text_file, capsys):
    """
    Catches tables that cannot be made;
    a drafter that ends after K tokens has no figures beyond, MoA has.
    """
    import bench.network                                               # as a program it runs in test_readme
    argv = ["--out", trained, "--data", text_file, "--rtts", "1", "--prompts", "1",
            "--chains", "3", "--prompt-tokens", "8", "--new-tokens", "12", "--distances", "1,9", "--texts", "2", "--guessed", "10"]
    bench.network.main(argv)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    trips = {r["way"]: r for r in result["round_trips"]}
    assert list(trips) == ["plain API", "MoA trees", "MoA chain 3"] and trips["plain API"]["calls"] == 100
    assert trips["MoA trees"]["calls"] <= 100 and trips["MoA trees"]["down"] > trips["plain API"]["down"] > 50
    table = {r["drafter"]: r["distances"] for r in result["cut_off"]}
    assert table["medusa"]["9"] is None
    assert table["moa"]["9"]["tokens"] == table["medusa"]["1"]["tokens"] == 20
    assert table["target"]["1"] == table["target"]["9"]
    assert table["target"]["1"]["perplexity"] < table["medusa"]["1"]["perplexity"]
