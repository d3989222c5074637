"""
Bit for bit: what a target needs on this machine, so that the logits of a node are those of decoding its
path token by token.

Products    run over a multiple of Exact.product rows, filled up in GPT.run and GPT.logits: so a row does
            not depend on its neighbours. How many it takes is tried at load, on the target's matrices.
Attention   model.attend_exactly: whole pages of text in the target's dtype, alike for every row behind them;
            the page at hand in float64, where the order of a sum does not show after rounding.
Trees       end in the page of their root: GPT.reach.
Cost        bfloat16 and float64: whatever it costs, if rows up to 16 will do. float32 on a CPU: not where
            the rows cost a step more than a quarter (ties of 1e-5 may flip then). float16 on a CPU: never.
            GPU: one number of rows for all forwards. Without it, also by --no-exact, --compile or
            --graphs, target.exactness says so.
"""
from contextlib import contextmanager
from functools import partial

import torch

from model import PAGE, Exact
from plumbing.fast import step_seconds


INEXACT = "inexact"                                            # in a table: plain decoding as fast as can be


@torch.inference_mode()
def find_exact_rows(target):
    """
    How many rows the target's products and its attention need, so that a row's result does not depend on
    the rows beside it -> Exact; None where no number up to 16 does. Tried on the target's own matrices,
    bit by bit.
    """
    w, cfg = target.wte.weight, target.cfg
    if w.device.type != "cpu" or w.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        return None
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(w.dtype)
    C, G, H, D = cfg.n_embd, cfg.n_kv_head, cfg.n_head, cfg.head_dim
    x, y = normal(PAGE, C), normal(PAGE, H * D)
    products = [(target.lm_head, x[:16])]                              # of a prompt it reads one row
    for block in target.blocks[:1]:
        products += [(block.attn.qkv, x), (block.attn.out, y), (block.mlp, x)]
    rows = fewest([partial(at_a_time, layer, x) for layer, x in products])
    if not rows:                                            # some widths end inside a vector of the processor
        for block in target.blocks:
            block.mlp.wide = True
        rows = fewest([partial(at_a_time, layer, x) for layer, x in products])
    if not rows:
        return None
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    k, v, queries = normal(1, G, 5 * PAGE, D), normal(1, G, 5 * PAGE, D), normal(4 * PAGE, G, D)

    def over_pages(pages, x):                              # (R, G, D) -> (R, G, D + 1): attention, its weight
        y, weight = flash(x.transpose(0, 1)[None], k[:, :, :pages * PAGE], v[:, :, :pages * PAGE])
        return torch.cat((y.float(), weight[..., None].float()), -1)[0].transpose(0, 1)
    computations = [partial(at_a_time, partial(over_pages, pages), queries) for pages in (1, 2, 5)]
    return Exact(rows, fewest(computations))


def at_a_time(layer, x, n):
    """The first 32 of x's rows through a layer, n rows at a time; n = 0: all rows at once."""
    if n == 0:
        return layer(x)[:32]
    return torch.cat([layer(part) for part in x[:32].split(n)]) if n <= 32 else layer(x[:n])[:32]


def fewest(computations, most=16):
    """
    The fewest rows n of 1, 2, 4, .. most for which batches of n, 2 n, 3 n, .. give the same bits for every
    row; 0 if there are none. computation(n) -> the same rows, n at a time.
    """
    n = 1
    while n <= most:
        some = [m // n * n for m in (2 * n, 3 * n, 5 * n, 32, 50, 250)] + [0]
        if all(torch.equal(f(n), f(m)) for f in computations for m in some):
            return n
        n *= 2
    return 0


def same_shape(rows):
    """For a GPU: every decoding forward has the same number of rows, all attention is summed in float64."""
    return Exact(rows)


def same_rows_anywhere(layer, x):
    """Does each row of x (R, C) come out the same, bit for bit, wherever among the others it stands?"""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    return torch.equal(layer(x[order]), layer(x)[order])


@torch.inference_mode()
def one_shape(target, rows):
    """On a GPU -> Exact with one number of rows for all forwards; None if a row's place changes it."""
    w, cfg = target.wte.weight, target.cfg
    normal = lambda C: torch.randn(rows, C, generator=torch.Generator().manual_seed(0)).to(w)
    products = [(target.lm_head, cfg.n_embd)]
    for block in target.blocks[:1]:
        products += [(block.attn.qkv, cfg.n_embd),
                     (block.attn.out, cfg.n_head * cfg.head_dim),
                     (block.mlp, cfg.n_embd)]
    return same_shape(rows) if all(same_rows_anywhere(layer, normal(C)) for layer, C in products) else None


def make_exact(target, rows, instead=""):
    """
    Sets target.exact as it can be had here, and target.exactness: in words, what holds. rows: most rows
    of a forward, for a GPU; instead: the option that forbids it, if one does. In float32 it is left out
    where it would cost a step more than a quarter: there only ties of 1e-5 are at stake.
    """
    target.exact, w = None, target.wte.weight
    if instead:
        target.exactness = f"not exact: {instead}"
        return
    target.exact = find_exact_rows(target) if w.device.type == "cpu" else one_shape(target, rows)
    if not target.exact:
        target.exactness = f"not exact: no number of rows makes {w.dtype} products independent here"
        return
    n = target.exact.product
    target.exactness = f"exact, rows in {n}s" if n > 1 else "exact"
    if w.dtype == torch.float32 and n > 1 and w.device.type == "cpu":
        cost = step_seconds(target, n) / one_row_seconds(target)
        if cost > 1.25:
            target.exact = None
            target.exactness = (f"exact but for ties of 1e-5: in float32 {n} rows cost "
                                f"{cost:.1f} times one here")


def one_row_seconds(target):
    with inexact(target):
        return step_seconds(target, 1)


@contextmanager
def inexact(target, wanted=True):
    """The target as fast as it can be, for as long as it takes to measure that; not wanted: as it is."""
    exact, target.exact = target.exact, None if wanted else target.exact
    try:
        yield
    finally:
        target.exact = exact
