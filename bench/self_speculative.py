r"""
Self-speculative decoding: the target drafts by itself, some of its sub-layers skipped. A baseline; nothing
is trained.

Paper    Zhang et al. 2024 (ACL), arXiv:2309.08168 (Draft & Verify)
         leaving after a layer: arXiv:2404.16710 (LayerSkip)
Idea     1. A draft pass is the target's own forward without some attention and MLP sub-layers: x goes by.
         2. It drafts a chain, token by token, until it has K tokens or one it was less than gamma sure of.
         3. One full forward verifies the chain.
         4. gamma moves so that a share alpha of the drafts is accepted.
         5. Which sub-layers are skipped is searched once for a target.

            layer 0     1     2     3                      full target, T = k + 1 rows
            attn  mlp  attn  mlp   . . .                     root  d1   d2   d3
             x--> x --> | -> x --> | ------> lm_head --> d1 --'
                     skipped      skipped                     x     x    x     (d3 was unsure: the chain ends)

Maths    AR <- beta1 AR + (1 - beta1) accepted / drafted
         g' = gamma + eps if AR < alpha;  gamma if K were drafted;  gamma - eps otherwise
         gamma <- beta2 gamma + (1 - beta2) g'
         search: least time per token = (1 + c * drafted) / (1 + accepted), means over anchors of a text;
         c = the share of the target's weights that a draft pass reads

Shapes   B batch, T tokens, V vocabulary, L layers, K longest chain, M anchors, S verified tokens
Differs  search     random skip sets and all exit layers, then flips of single sub-layers, against the time
                    above, on training text; theirs: Bayesian optimisation of measured tokens/s over up to
                    1000 runs
         gamma      starts where the search found it best; theirs: 0.8 (greedy) or 0.5 (sampling)
         cache      drafts are written behind the text in the target's own cache, cut off before the
                    verification; the keys of skipped sub-layers do not exist and are never read, the
                    text's are the full target's
         T > 0      drafts are ranked with the target's own noise, and the walk verifies
Run      python bench/run.py --methods medusa,self_speculative --train-minutes 2
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
    """Self-speculative decoding: the target without some sub-layers drafts."""
    depth: int = arg(8, "K, longest chain", low=1, high=1000)
    alpha: float = arg(0.9, "share of the drafts that should be accepted")
    eps: float = arg(0.01, "step of gamma")
    beta1: float = arg(0.5, "how long the acceptance rate remembers")
    beta2: float = arg(0.9, "how slowly gamma moves")
    steps: int = arg(100, "skip sets that the search tries", low=1)
    batch_size: int = arg(2, "sequences of the text that it tries them on", low=1, high=2**20)

    @property
    def min_tokens(self):
        """A training sequence has so many, or more."""
        return self.depth + 2


# --------------------------------------------------------------------------------------------------
# Modules

class Net(nn.Module):
    """
    What the search finds: a skip set (2, L), True = attention (row 0) or MLP (row 1) is skipped; a
    first gamma.
    """

    def __init__(self, cfg, target):
        super().__init__()
        self.cfg, self.K = cfg, cfg.depth
        self.register_buffer("skip", torch.zeros(2, target.cfg.n_layer, dtype=torch.bool))
        self.register_buffer("gamma", torch.tensor(0.8))


def draft_pass(target, skip, idx, pos, mask, cache):
    """The target's forward without the sub-layers in skip (two lists). (B, T) tokens -> logits (B, T, V)"""
    x, rope = target.embed(idx, pos), target.rope(pos)
    mask, causal = target.attention_mask(idx.size(1), mask, cache, x.dtype)
    for i, block in enumerate(target.blocks):
        if not skip[0][i]:
            x = x + block.attn(block.norm1(x), rope, mask, causal, cache, i)
        if not skip[1][i]:
            x = x + block.mlp(block.norm2(x))
    return target.lm_head(target.norm(x))


def cost(target, skip):
    """The share of the target's weights that a draft pass reads; embeddings are looked up, not read."""
    size = lambda module: sum(v.numel() for v in module.state_dict().values())
    parts = torch.tensor([[size(block.attn) for block in target.blocks],
                          [size(block.mlp) for block in target.blocks]])
    head = target.wte.weight.numel()
    return ((parts * ~skip.cpu()).sum().item() + head) / (parts.sum().item() + head)


# --------------------------------------------------------------------------------------------------
# Loss

@torch.no_grad()
def predictions(net, target, x, full=None):
    """
    What the drafter says on the text x (B, T) if x[..t] is verified and x[t+1..t+k] are root and drafts, for
    every anchor t at once. Yields for k = 1..K: logits (M, V), the tokens x[t+1+k] (M,) it should have
    guessed, and the target's own logits (M, V) for them, with M = B * (T - k - 1). full: what full_pass said
    of x, if known.
    """
    T, skip = x.size(1), net.skip.tolist()
    own, cache = full_pass(net, target, x) if full is None else full
    cache.crop(T)
    alone = torch.eye(T, dtype=torch.bool, device=x.device)
    look = alone.new_ones(T, T).tril()                                 # verified j <= t, and own drafts
    for k in range(1, net.K + 1):
        n = max(0, T - k - 1)                                          # anchors t = 0 .. n-1, rows at t + k
        if n:
            look = torch.cat((look[:n], alone[:n, :n]), -1)
            pos = torch.arange(k, T - 1, device=x.device)
            logits = draft_pass(target, skip, x[:, k:T - 1], pos, look, cache)
            cache.keep(range(n))                                       # the deeper drafts will look at these
        yield logits[:, :n].flatten(0, 1), x[:, k + 1:].flatten(), own[:, k:-1].flatten(0, 1)


@torch.no_grad()
def full_pass(net, target, x):
    """x (B, T) -> the target's logits (B, T, V), and its cache, with room for the drafts of every anchor."""
    cache = target.new_cache((net.K + 1) * x.size(1), x.size(0))
    own, _ = target(x, cache=cache)
    cache.keep(range(x.size(1)))
    return own, cache


@torch.no_grad()
def loss(net, target, x, full=None):
    """
    x (B, T) -> the time per token against plain decoding's at T = 0 and the best of some gammas, how often
    the best guess is right (K,), and that gamma. A chain follows the text, not the drafts: longer than one
    wrong guess it is not counted.
    """
    B, T = x.shape
    n, hit, sure, top1 = T - net.K - 1, [], [], []                     # anchors that have all K positions
    assert n > 0, f"{T} tokens are too few for chains of {net.K}"
    for k, (guess, truth, own) in enumerate(predictions(net, target, x, full), 1):
        q, best = guess.softmax(-1).max(-1)
        cut = lambda row: row.view(B, T - k - 1)[:, :n].flatten()      # (M,)
        hit.append(cut(best == own.argmax(-1)))
        sure.append(cut(q))
        top1.append((best == truth).float().mean())
    hit, sure = torch.stack(hit).cumprod(0), torch.stack(sure)         # (K, M): accepted so far
    gammas, c = [g / 10 for g in range(10)], cost(target, net.skip)
    times = []
    for gamma in gammas:                                               # drafted: all before it were sure
        drafted = torch.cat((torch.ones_like(hit[:1]), (sure[:-1] >= gamma).cumprod(0)))
        times.append((1 + c * drafted.sum(0).float().mean()) / (1 + (hit * drafted).sum(0).float().mean()))
    times = torch.stack(times)
    return times.min(), torch.stack(top1), gammas[times.argmin()]


# --------------------------------------------------------------------------------------------------
# Draft

class Drafter:
    """
    Drafts a chain in the target's own cache, behind the text; with a chain as shape its length is
    fixed.
    """

    def __init__(self, net, target, shape=None, max_nodes=16, floor=0.0):
        self.net, self.target, self.floor, self.fixed = net, target, floor, shape is not None
        if shape and shape.parent != chain(len(shape.parent) - 1).parent:
            raise ValueError("self_speculative drafts chains: --tree must be best or chain")
        self.depth = min(net.K, (len(shape.parent) if shape else max_nodes) - 1)
        self.max_nodes = self.cache_rows = self.depth + 1
        self.skip = net.skip.tolist()

    def start(self, target, max_len):
        """Forget the last text; at most max_len tokens follow."""
        self.max_len, self.drafted, self.rate, self.gamma = max_len, 0, 0.0, self.net.gamma.item()

    def observe(self, tokens, hidden, cache):
        """tokens (T,), the root and the accepted drafts, became text: gamma follows their number."""
        cfg, self.cache = self.net.cfg, cache
        if self.drafted:                                               # tokens: root and accepted drafts
            self.rate = cfg.beta1 * self.rate + (1 - cfg.beta1) * (len(tokens) - 1) / self.drafted
            step = cfg.eps if self.rate < cfg.alpha else 0.0 if self.drafted == self.depth else -cfg.eps
            self.gamma += (1 - cfg.beta2) * step
        self.drafted = 0

    def draft(self, root, sampler, limit=None):
        """-> a chain behind root, which stands at position S, in the target's own cache."""
        S, tokens, value = self.cache.length, [root], [1.0]            # the root stands at position S
        device = self.target.wte.weight.device
        room = self.max_len - S - 2                                    # a deeper node could never be emitted
        depth = min(self.depth, (limit or self.max_nodes) - 1, room)
        for at in range(S, S + depth):
            idx, pos = torch.tensor([tokens[-1:]], device=device), torch.tensor([at], device=device)
            logits = draft_pass(self.target, self.skip, idx, pos, None, self.cache)[0]               # (1, V)
            self.cache.length += 1
            scores = sampler.rank(logits, [at + 1])[0]
            q, token = scores.softmax(-1).max(-1)
            q, token = torch.stack((q, token)).tolist()                # the one wait for the device in a pass
            if value[-1] * q <= self.floor:
                break
            tokens.append(int(token))
            value.append(value[-1] * q)
            if q < self.gamma and not self.fixed:
                break
        self.cache.crop(S)                                             # the verification writes its own rows
        self.drafted = len(tokens) - 1
        return Tree(tokens, list(range(-1, self.drafted)), value)


# --------------------------------------------------------------------------------------------------
# Train

def train(cfg, target, run):
    """
    Search the skip set and return it as a net; the target stays as it is. run (train.py) says how long, logs
    and saves. A step tries one set: first the exit layers and random sets, from half-way on the best one with
    a flip or two.
    """
    net, L = Net(cfg, target).to(target.wte.weight.device), target.cfg.n_layer
    exits = [(torch.arange(L) >= e).expand(2, L) for e in range(1, L)]
    full, tried = None, set()
    glance = lambda x: loss(net, target, x[:1, :64])[:2]               # K passes over more would cost a lot
    for x in run.steps(net, [], glance):
        if full is None:                                               # every set is tried on the same text
            text, full = x, full_pass(net, target, x)
            best, _, gamma = loss(net, target, text, full)
            net.gamma.fill_(gamma)
        if exits:
            skip = exits.pop()
        elif run.progress() < 0.5:
            skip = torch.rand(2, L) < torch.rand(())
        else:
            skip = net.skip.cpu().flatten().clone()
            at = torch.randint(2 * L, (1 + int(torch.rand(()) < 0.5),))
            skip[at] = ~skip[at]
            skip = skip.view(2, L)
        key = tuple(skip.flatten().tolist())
        if key not in tried:
            tried.add(key)
            old = net.skip.clone(), best
            net.skip.copy_(skip)
            best, _, gamma = loss(net, target, text, full)
            if best < old[1]:
                net.gamma.fill_(gamma)
            else:
                net.skip.copy_(old[0])
                best = old[1]
        run.sync(net, best)
    return net


# --------------------------------------------------------------------------------------------------
# Self-check

if __name__ == "__main__":
    torch.manual_seed(0)
    target = GPT(GPTConfig(n_layer=4, n_embd=32, n_ffn=64, vocab_size=50, block_size=128)).double().eval()
    net = Net(Config(), target).double()
    net.skip[:, 1::2] = True
    for T in (0.0, 1.0):
        plain, _ = complete(target, [1, 2, 3], 100, sampler=Sampler(T))
        text, stats = complete(target, [1, 2, 3], 100, Drafter(net, target), Sampler(T))
        assert text == plain, "the drafter changed the text"
        print(f"self_speculative, half skipped, T = {T:.0f}: {len(text)} tokens in {len(stats.accepted)} "
              "target forwards, same text as plain decoding")
