r"""
Prompt lookup: what followed the last words the last time is the draft. A baseline without a model or
training.

Paper    none; Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; transformers has it as
         prompt_lookup_num_tokens
Idea     1. Take the last n tokens of prompt and text, the root included; n = ngram, then fewer.
         2. Find where they stood first, and draft the up to K tokens that followed there.

            text   the old man and the sea . the old           draft   man and the sea
                   |-----|                   |-----| n = 2

Shapes   K longest chain
Differs  ngram 3 (transformers: 2); an index of first places instead of a scan of the text; chains of at
         most --nodes - 1
Run      python bench/run.py --methods prompt_lookup --questions bench/questions.jsonl
"""
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from model import GPT, GPTConfig, arg
from tree import Sampler, Tree, complete
from plumbing.shapes import chain


# --------------------------------------------------------------------------------------------------
# Config

@dataclass
class Config:
    """Prompt lookup."""
    depth: int = arg(10, "K, longest chain", low=1)
    ngram: int = arg(3, "longest run of tokens that is looked up", low=1)


# --------------------------------------------------------------------------------------------------
# Modules

class Net(nn.Module):
    """Nothing to learn."""

    def __init__(self, cfg, target):
        super().__init__()
        self.cfg, self.K = cfg, cfg.depth


# --------------------------------------------------------------------------------------------------
# Draft

class Drafter:
    """Knows where every run of 1 to ngram tokens of the text ended first."""

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0):
        if shape and shape.parent != chain(len(shape.parent) - 1).parent:
            raise ValueError("prompt_lookup drafts chains: --tree must be best or chain")
        self.net = net
        self.depth = min(net.K, (len(shape.parent) if shape else max_nodes) - 1)
        self.max_nodes = self.cache_rows = self.depth + 1

    def start(self, target, max_len):
        """Forget the last text; at most max_len tokens follow."""
        self.text, self.ends, self.max_len = [], {}, max_len

    def observe(self, tokens, hidden, cache):
        """tokens (T,) became text: where did every run of them end?"""
        for token in tokens:
            self.text.append(token)
            for n in range(1, min(self.net.cfg.ngram, len(self.text)) + 1):
                self.ends.setdefault(tuple(self.text[-n:]), len(self.text))

    def draft(self, root, sampler, limit=None):
        """-> a chain of what followed the longest run of tokens that the text ends in, root included."""
        text = self.text + [root]                                      # the root is at len(text) - 1
        room = self.max_len - len(text) - 1                            # a deeper node could never be emitted
        depth = min(self.depth, (limit or self.max_nodes) - 1, room)
        for n in range(min(self.net.cfg.ngram, len(text)), 0, -1):
            end = self.ends.get(tuple(text[-n:]))
            if end is not None and depth > 0:
                tokens = [root] + text[end:end + depth]
                return Tree(tokens, list(range(-1, len(tokens) - 1)))
        return Tree([root], [-1])


# --------------------------------------------------------------------------------------------------
# Self-check

if __name__ == "__main__":
    torch.manual_seed(0)
    target = GPT(GPTConfig(n_layer=2, n_embd=32, n_ffn=64, vocab_size=50, block_size=128)).double().eval()
    drafter = Drafter(Net(Config(), target), target)
    for T in (0.0, 1.0):
        plain, _ = complete(target, [1, 2, 3], 100, sampler=Sampler(T))
        text, stats = complete(target, [1, 2, 3], 100, drafter, Sampler(T))
        assert text == plain, "the drafter changed the text"
        print(f"prompt_lookup, T = {T:.0f}: {len(text)} tokens in {len(stats.accepted)} target forwards, "
              "same text as plain decoding")
