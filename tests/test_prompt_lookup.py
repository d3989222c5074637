"""bench/prompt_lookup.py: the index finds what a scan finds."""
import random

import prompt_lookup
from conftest import tiny
from tree import Sampler


def test_prompt_lookup_is_a_scan():
    """An index that finds another place than a scan of the text does, or the tail itself."""
    target, rng = tiny(), random.Random(0)
    for case in range(200):
        text, root = [rng.randrange(4) for _ in range(rng.randint(1, 30))], rng.randrange(4)
        net = prompt_lookup.Net(prompt_lookup.Config(depth=5, ngram=rng.randint(1, 4)), target)
        drafter = prompt_lookup.Drafter(net, target)
        drafter.start(target, max_len := len(text) + rng.randint(1, 12))
        cut = rng.randint(0, len(text))
        drafter.observe(text[:cut], None, None)
        drafter.observe(text[cut:], None, None)
        expect, full, depth = [], text + [root], min(5, max_len - len(text) - 2)
        for n in range(min(net.cfg.ngram, len(full)), 0, -1):
            at = next((i for i in range(len(full) - n) if full[i:i + n] == full[-n:]), None)
            if at is not None:
                expect = full[at + n:at + n + max(0, depth)]
                break
        tree = drafter.draft(root, Sampler())
        assert tree.tokens == [root] + expect and tree.parent == list(range(-1, len(expect)))
