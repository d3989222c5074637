"""
--graphs: one decoding forward, captured once and replayed. A small model at batch 1 waits for the launch
of its kernels more than for the kernels; with a fixed number of rows and a fixed cache they can be
launched as one (CUDA graphs). Not measured on a GPU yet, so it is off by default; on a CPU the same
forward runs without a graph, which is how it is tested.
"""
import torch

from model import KVCache, additive, per_query
from plumbing.options import fail


class Graphs:
    """
    Stands in for a target's hidden and new_cache: trees of at most rows nodes go through one forward of
    just that many rows over one cache of the whole context, so there is one text at a time. Prompts are
    read as before.
    """

    def __init__(self, target, rows):
        c, w = target.cfg, target.wte.weight
        self.target, self.rows, self.graph = target, rows, None
        self.cache = KVCache(c, c.block_size + rows, 1, w.device, w.dtype)
        target.reserve(c.block_size)
        integers = dict(dtype=torch.long, device=w.device)
        self.idx, self.pos, self.at = (torch.zeros(n, **integers) for n in ((1, rows), (rows,), (rows,)))
        self.mask = torch.zeros(rows, self.cache.max_len, dtype=torch.bool, device=w.device)
        self.plain = target.hidden
        target.hidden, target.new_cache = self.hidden, self.new_cache

    def new_cache(self, max_len, B=1):
        self.cache.length = 0
        if B == 1:
            return self.cache
        return KVCache(self.target.cfg, max_len, B, self.idx.device, self.cache.k[0].dtype)

    def hidden(self, idx, pos=None, mask=None, cache=None):
        """target.hidden, for a tree by replaying the graph."""
        T, S = idx.size(1), cache.length if cache is not None else 0
        if mask is None or T > self.rows or cache is not self.cache:
            return self.plain(idx, pos, mask, cache)
        self.idx.zero_()[:, :T] = idx
        self.pos.fill_(S)[:T] = pos
        self.at.copy_(torch.arange(S, S + self.rows))                  # the rows behind the text
        self.mask.fill_(False)[:, 0] = True                # a row that fills up looks at something, unread
        self.mask[:T, :S + T] = mask
        if self.idx.device.type != "cuda":
            return self.forward()[:, :T]
        if self.graph is None:
            self.forward()                                     # warm-up: kernels are chosen, memory is taken
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.forward()
        self.graph.replay()
        return self.out[:, :T].clone()

    def write(self, layer, k, v):
        """As KVCache.write, at a fixed place in memory: where is read from self.at."""
        self.cache.k[layer].index_copy_(2, self.at, k)
        self.cache.v[layer].index_copy_(2, self.at, v)
        return self.cache.k[layer], self.cache.v[layer]

    def forward(self):
        """The target over all rows, the cache seen whole: what lies behind the text is hidden by the mask."""
        t, c = self.target, self.target.cfg
        x, rope = t.embed(self.idx, self.pos), t.rope(self.pos)
        mask = per_query(additive(self.mask, x.dtype), c.n_head // c.n_kv_head)
        for i, block in enumerate(t.blocks):
            x = block(x, rope, mask, False, self, i)
        return t.norm(x)


def use_graphs(target, rows):
    """--graphs, on a GPU. Ends with a message elsewhere."""
    if target.wte.weight.device.type != "cuda":
        fail("--graphs needs a CUDA GPU: leave it out")
    return Graphs(target, rows)
