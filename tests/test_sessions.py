"""The texts that a server has in work: shared, repeated, thrown out, opened anew."""
import concurrent.futures
import json
import time

import pytest

from moa import Drafter
from plumbing.checkpoint import fingerprint
from plumbing.server import Serve, Server
from plumbing.wire import Refused, unpack
from remote import (PROMPT, SETTINGS, an_open, finish, make_client, make_pair, plain, remote, serving,
                    some_jobs)
from test_moa import make_net
from tree import Sampler


@pytest.mark.parametrize("sessions", [16, 2])
def test_many_clients_at_once(sessions):
    """
    Catches sessions that share a cache, a sampler or an answer;
    with room for two of six, all the time evicted ones.
    """
    target, net, part = make_pair()
    jobs = some_jobs(6)
    with serving(target, net, sessions=sessions) as server:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            clients = [make_client(server.server_port, timeout=60) for _ in jobs]
            runs = []
            for client, job in zip(clients, jobs):
                runs.append(pool.submit(remote, client, part, net, 24, max_nodes=8, **job))
            texts = [run.result()[0] for run in runs]
        assert len(server.sessions.by_name) == min(6, sessions)
    assert texts == [plain(target, 24, **job) for job in jobs]


def test_the_longest_idle_session_goes_first_and_idle_ones_go_alone():
    """Catches eviction of a session in use, a bound that is not kept, and memory that is never given back."""
    target, net, part = make_pair()
    with serving(target, net, sessions=3) as server:
        steps = []
        for _ in range(4):
            client = make_client(server.server_port)
            steps.append(client.generate(part, PROMPT, 40, Drafter(net, part), Sampler()))
        for i in (0, 1, 2):
            next(steps[i])
        before = list(server.sessions.by_name)
        next(steps[0])
        next(steps[3])                                                 # now 1 was idle longest
        assert [name in server.sessions.by_name for name in before] == [True, False, True]
        assert len(server.sessions.by_name) == 3
        size = max(s.size for s in server.sessions.by_name.values())
        server.opt.memory_mb = 2 * size / 2**20
        next(steps[3])
        assert len(server.sessions.by_name) <= 2
        assert sum(s.size for s in server.sessions.by_name.values()) <= 2 * size
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
    call = an_open(target, net)
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


def test_a_call_that_comes_late():
    """
    Catches a client that cannot go on when an old call of its own,
    long given up, takes its session back.
    """
    target, net, part = make_pair()
    with serving(target, net) as server:
        drafter, sampler = Drafter(net, part, max_nodes=8), Sampler(**SETTINGS["T = 1"])
        steps = make_client(server.server_port).generate(part, PROMPT, 60, drafter, sampler)
        got = next(steps)
        (session,) = server.sessions.by_name.values()
        old = session.request
        got += next(steps) + next(steps)
        server.worker.submit(server.sessions.answer, *old).result()
        assert session.text == PROMPT
        tokens, stats = finish(steps)
    assert got + tokens == plain(target, 60, SETTINGS["T = 1"]) and not stats.offline


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
