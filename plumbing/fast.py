"""
What makes the same arithmetic fast: matrices packed for a CPU, compilation, states of a frozen target that are kept.
"""
from functools import partial

import torch
import torch.nn as nn

from model import GPT, PAGE, DraftHead, Exact
from plumbing.options import fail, first_line


# --------------------------------------------------------------------------------------------------
# Packed matrices

def packed_product(x: torch.Tensor, packed: torch.Tensor, like: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (.., in) times a packed matrix of like's shape (out, in) -> (.., out)"""
    if x.dtype == torch.float32:
        return torch.ops.mkl._mkl_linear.default(x, packed, like, bias, x.numel() // x.size(-1))
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


opaque_product = torch.library.custom_op("nanospec::packed_product", packed_product, mutates_args=())    # as torch.compile wants it
opaque_product.register_fake(lambda x, packed, like, bias=None: x.new_empty(*x.shape[:-1], like.size(0)))


class PackedLinear(nn.Module):
    """
    A Linear for decoding on a CPU: its matrix lies in the order in which MKL (float32) or oneDNN (bfloat16) reads it, and the 8
    rows of a tree cost 1.5 times what one costs, not twice as much. weight is a copy, unpacked anew each time it is asked for.
    """

    def __init__(self, weight, bias=None):  # (out, in), (out,)
        super().__init__()
        weight = weight.detach().contiguous()
        self.bias, self.like = bias, weight.new_ones(1).expand(weight.shape)             # like: MKL looks at its shape only
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 256) if weight.dtype == torch.float32 else \
            torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x):  # (.., in) -> (.., out)
        product = opaque_product if torch.compiler.is_compiling() else packed_product
        return product(x, self.packed, self.like, self.bias)

    @property
    def weight(self):
        return packed_product(torch.eye(self.like.size(1), dtype=self.like.dtype), self.packed, self.like).t()   # 1 w + 0 + .. is w

    def _save_to_state_dict(self, out, prefix, keep_vars):
        out |= {prefix + "weight": self.weight} | ({} if self.bias is None else {prefix + "bias": self.bias})

    @staticmethod
    def pays(weight):
        """MKL's packed matrices lie so far apart in memory that small ones lose more than they gain."""
        if weight.device.type != "cpu" or weight.dim() != 2:
            return False
        return weight.dtype == torch.float32 and torch.backends.mkl.is_available() and min(weight.shape) >= 384 or \
            weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


# --------------------------------------------------------------------------------------------------
# Exact rows

@torch.inference_mode()
def exact_rows(target):
    """
    How many rows the target's products and its attention need on this machine, so that a row's result does not depend on the
    rows beside it -> Exact; None where no number up to 16 does. Tried on the target's own matrices, bit by bit.
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
    if not rows:                                                       # some widths end between two vectors of the processor
        for block in target.blocks:
            block.mlp.wide = True
        rows = fewest([partial(at_a_time, layer, x) for layer, x in products])
    if not rows:
        return None
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = normal(1, G, 4 * PAGE, D), normal(1, G, 5 * PAGE, D), normal(1, G, 5 * PAGE, D)

    def over_pages(pages, x):                                          # (R, G, D) -> (R, G, D + 1): attention and its weight
        y, weight = flash(x.transpose(0, 1)[None], k[:, :, :pages * PAGE], v[:, :, :pages * PAGE])
        return torch.cat((y.float(), weight[..., None].float()), -1)[0].transpose(0, 1)
    queries = q[0].transpose(0, 1)
    return Exact(rows, fewest([partial(at_a_time, partial(over_pages, pages), queries) for pages in (1, 2, 5)]))


def at_a_time(layer, x, n):
    """The first 32 of x's rows through a layer, n rows at a time; n = 0: all rows at once."""
    if n == 0:
        return layer(x)[:32]
    return torch.cat([layer(part) for part in x[:32].split(n)]) if n <= 32 else layer(x[:n])[:32]


def fewest(computations, most=16):
    """
    The fewest rows at a time, 1, 2, 4, .. most, at which a row comes out as at multiples of them; 0 if there are none.
    computation(n) -> the same rows, n at a time.
    """
    n = 1
    while n <= most:
        some = [m // n * n for m in (2 * n, 3 * n, 5 * n, 32, 50, 250)] + [0]
        if all(torch.equal(f(n), f(m)) for f in computations for m in some):
            return n
        n *= 2
    return 0


# --------------------------------------------------------------------------------------------------
# Ready to decode

def for_decoding(module, compile=False, exact=True):
    """
    Ready to decode, and no longer to be trained: eval mode, no gradients. On a CPU large matrices are packed, the others
    stored column by column, which MKL multiplies with the 4 to 16 rows of a tree about 1.2 times as fast. compile: see
    compile_steps. exact: a target gets its Exact.
    """
    module.eval().requires_grad_(False)
    for m in list(module.modules()):
        for name, child in m.named_children():
            if isinstance(child, nn.Linear) and PackedLinear.pays(child.weight):
                setattr(m, name, PackedLinear(child.weight, child.bias))
        if isinstance(m, DraftHead) and m.lm_rows is not None and PackedLinear.pays(m.lm_rows):
            m.lm_rows = PackedLinear(m.lm_rows)
    for p in module.parameters():
        if p.dim() == 2 and p.device.type == "cpu":
            p.data = p.data.t().contiguous().t()
    if isinstance(module, GPT) and exact and not compile:
        module.exact = exact_rows(module)
    if compile:
        compile_steps(module)
    return module


def compile_steps(module):
    """
    --compile: what a decoding step runs, the methods that module names in compiled, through torch.compile, in place. One graph
    serves all lengths of text, one all trees, and one single tokens; all are made when they are first needed. Ends with a
    message where nothing can be compiled.
    """
    names = getattr(module, "compiled", ())
    if not names:
        return
    torch._dynamo.config.recompile_limit = 64                          # ranges of layers, with and without mask, one row or many
    try:
        torch.compile(torch.neg)(next(module.parameters()).new_zeros(2))
    except Exception as e:                                             # no C++ compiler, no Triton, no support for this Python
        fail(f"--compile does not work here ({first_line(e)}): leave it out")
    for name in names:
        setattr(module, name, torch.compile(getattr(module, name), dynamic=True))


# --------------------------------------------------------------------------------------------------
# Training: states that come again

class StateCache:
    """
    Stands in for a frozen target's hidden(x) while drafters are trained: the states (T, C) of every sequence are kept, in
    bfloat16, as long as they fit into room bytes, and a sequence that comes again costs no forward. New ones are rounded as
    well, so what is in memory changes nothing. What decodes, with a KV cache, goes to the target.
    """

    def __init__(self, target, room):
        self.hidden, self.like, self.room, self.kept = target.hidden, target.wte.weight, room, {}

    def __call__(self, x, pos=None, mask=None, cache=None):  # (B, T) -> (B, T, C)
        if cache is not None or pos is not None or mask is not None:
            return self.hidden(x, pos, mask, cache)
        keys = [row.numpy().tobytes() for row in x.cpu()]
        new = {key: i for i, key in enumerate(keys) if key not in self.kept}
        fresh = dict(zip(new, self.hidden(x[[*new.values()]]).bfloat16().cpu())) if new else {}
        for key, h in fresh.items():
            if h.nbytes <= self.room:
                self.kept[key] = h.clone()                             # a view would keep its whole batch alive
                self.room -= h.nbytes
        return torch.stack([fresh[key] if key in fresh else self.kept[key] for key in keys]).to(self.like)
