"""
A client and its server: the same text as with the target at hand, whatever becomes of the line.

The faults are real ones: answers dropped after the work was done, cut in the middle or late, a port
where nobody listens.
"""
import os
import socket
import sys
import threading
import time

import pytest
import torch

import plumbing.client
import sample
from moa import Drafter
from plumbing.checkpoint import fingerprint, load_model
from plumbing.shapes import chain
from plumbing.wire import WIRE_DTYPES, Unreachable
from remote import (PROMPT, SETTINGS, finish, make_client, make_pair, plain, refused, remote, serving,
                    start, stop)
from test_moa import from_scratch, make_net, random_text
from tree import Sampler, complete


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
        client = make_client(server.server_port, wire=wire)
        tokens, stats = remote(client, part, net, 24, SETTINGS[setting], max_nodes=12)
    assert tokens == plain(target, 24, SETTINGS[setting])
    assert sum(stats.accepted) == 24 and not stats.offline and stats.calls == len(stats.accepted)


@pytest.mark.parametrize("setting", ["greedy", "T = 1"])
def test_the_client_drafts_what_it_drafts_with_the_target_beside_it(setting):
    """Catches states, keys or values that arrive in another order, or rows of rejected drafts among them."""
    for tli, lsa in ((0, True), (2, True), (1, False)):
        target, net, part = make_pair(tli, lsa=lsa)
        with serving(target, net) as server:
            _, there = remote(make_client(server.server_port), part, net, 24, SETTINGS[setting], max_nodes=12)
        drafter, sampler = Drafter(net, target, max_nodes=12), Sampler(**SETTINGS[setting])
        _, here = complete(target, PROMPT, 24, drafter, sampler)
        assert there.accepted == here.accepted and max(here.accepted) > 1


def test_a_good_drafter_needs_few_calls():
    """Catches a server that accepts nothing. Untrained with N = L the drafter is the target itself."""
    target, _, _ = make_pair()
    net = make_net(target, shaken=False, tli=3)
    net.fingerprint = fingerprint(net.state_dict())
    with serving(target, net) as server:
        client = make_client(server.server_port)
        tokens, stats = remote(client, target, net, 60, SETTINGS["T = 1"], shape=chain(8))
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
# The line fails

def check_text(target, tokens, offline, sampling):
    """
    Every token not written alone is the target's choice after the text before it;
    so pieces between are plain decoding's.
    """
    text, first = PROMPT + tokens, len(PROMPT)
    logits, _ = target(torch.tensor([text]))
    choices = Sampler(**sampling).choose(logits[0, first - 1:-1], range(first, len(text)))
    for i, (token, choice) in enumerate(zip(tokens, choices, strict=True)):
        assert token == choice or i in offline, f"token {i} is not the target's"


@pytest.mark.parametrize("fault", ["drop", "cut", "late", "reset"])
def test_lost_answers_are_asked_for_again(fault, impatient):
    """Catches work that is done twice, tokens that come twice or never, and a retry that is not tried."""
    target, net, part = make_pair()
    with serving(target, net) as server:
        server.faults = ["ok", fault, "ok", "ok", fault, fault, "ok", "ok"]
        if fault == "late":
            server.faults = [fault, "ok", "ok", fault]
        client = make_client(server.server_port, timeout=0.2, retries=5)
        tokens, stats = remote(client, part, net, 30, SETTINGS["T = 1"], max_nodes=8)
    assert tokens == plain(target, 30, SETTINGS["T = 1"]) and not stats.offline and not server.faults
    assert stats.calls >= len(stats.accepted) + (2 if fault == "late" else 3)


def test_a_restarted_server_goes_on_with_the_text(impatient):
    """Catches a session that is lost for good, and a text that changes when it is opened anew."""
    target, net, part = make_pair()
    for setting in ("greedy", "T = 1"):
        server = start(target, net)
        port, got = server.server_port, []
        drafter, sampler = Drafter(net, part, max_nodes=8), Sampler(**SETTINGS[setting])
        steps = make_client(port).generate(part, PROMPT, 30, drafter, sampler)
        for _ in range(3):
            got += next(steps)
            stop(server)
            server = start(target, net, port=port)
        tokens, stats = finish(steps)
        stop(server)
        assert got + tokens == plain(target, 30, SETTINGS[setting])
        assert not stats.offline and stats.calls > len(stats.accepted)


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
    steps = client.generate(part, PROMPT, 80, Drafter(net, part, max_nodes=8), Sampler(**sampling))
    for outage in (1, 9):
        for _ in range(3):
            out = next(steps)
            tokens += out
            assert not client.offline
        stop(server)
        for _ in range(outage):
            alone.append(len(tokens))
            tokens += next(steps)
            assert client.offline and len(tokens) == alone[-1] + 1
        server = start(target, net, port=port)
        while client.offline:                                            # until the probe has found it
            time.sleep(0.05)
            before = len(tokens)
            tokens += next(steps)
            alone += [before] if client.offline else []
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
        drafter, sampler = Drafter(net, part, max_nodes=8), Sampler(**SETTINGS["T = 1"])
        steps = client.generate(part, PROMPT, 80, drafter, sampler)
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
        assert not client.offline and len(server.sessions.by_name) == 1
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
        assert time.perf_counter() - begin < 4 and client.offline        # 20 time-outs would be 10 s
        steps.close()


# --------------------------------------------------------------------------------------------------
# Simulated network, command line

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


def test_tokens_written_alone_are_dim_on_a_terminal(trained, capsys, monkeypatch):
    """Catches marks in a pipe, and none where somebody looks."""
    class Client:
        offline = False
        def generate(self, *args):
            yield [65]
            self.offline = True
            yield [66]
            return plumbing.client.RemoteStats(accepted=[1], offline=[1])
    _, tokenizer, _ = load_model(os.path.join(trained, "backbone", "model.safetensors"))
    a, b = (tokenizer.decode([i]) for i in (65, 66))
    for terminal, want in ((True, f"{a}\033[2m{b}\033[0m\n"), (False, f"{a}{b}\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        sample.stream(sample.Options(), None, tokenizer, [0], None, client=Client())
        assert capsys.readouterr().out == want


@pytest.mark.parametrize("argv, says", [
    (["--server", "localhost:8765", "--method", "moa"], "http://"),
    (["--server", "http://x:99999", "--method", "moa"], "99999"),
    (["--server", "http://127.0.0.1:1", "--method", "medusa"], "--method moa"),
    (["--wire", "int4"], "wire"),
    (["--server", "http://127.0.0.1:1", "--method", "moa", "--compare"], "--compare"),
    (["--server", "http://127.0.0.1:1", "--method", "moa", "--show", "tree"], "--show tree"),
    (["--server", "http://127.0.0.1:1", "--method", "all"], "--method moa or plain"),
])
def test_mistakes_about_a_client_get_one_line(argv, says, trained, capsys, monkeypatch):
    """Catches tracebacks for what a user typed."""
    monkeypatch.delenv("NANOSPEC_TOKEN", raising=False)
    assert says in refused(capsys, sample.main, "--out", trained, *argv).replace("0-65535", "99999")
