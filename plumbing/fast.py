"""
What makes the same arithmetic fast: packed matrices and short norms on a CPU, compilation, kept states of a
frozen target.
"""
import statistics
import time

import torch
import torch.nn as nn

from model import DraftLMHead
from plumbing.options import fail, first_line


# --------------------------------------------------------------------------------------------------
# Packed matrices

def packed_product(x: torch.Tensor, packed: torch.Tensor, like: torch.Tensor,
                   bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (.., in) times a packed matrix of like's shape (out, in) -> (.., out)"""
    if x.dtype == torch.float32:
        return torch.ops.mkl._mkl_linear.default(x, packed, like, bias, x.numel() // x.size(-1))
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


# as torch.compile wants it
opaque_product = torch.library.custom_op("nanospec::packed_product", packed_product, mutates_args=())
opaque_product.register_fake(lambda x, packed, like, bias=None: x.new_empty(*x.shape[:-1], like.size(0)))


class PackedLinear(nn.Module):
    """
    A Linear for decoding on a CPU: its matrix lies in the order in which MKL (float32) or oneDNN
    (bfloat16) reads it, and the 8 rows of a tree cost 1.5 times what one costs, not twice as much.
    weight is a copy, unpacked anew each time it is asked for.
    """

    def __init__(self, weight, bias=None):  # (out, in), (out,)
        super().__init__()
        weight = weight.detach().contiguous()
        # like: MKL looks at its shape only
        self.bias, self.like = bias, weight.new_ones(1).expand(weight.shape)
        if weight.dtype == torch.float32:
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 256)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x):  # (.., in) -> (.., out)
        product = opaque_product if torch.compiler.is_compiling() else packed_product
        return product(x, self.packed, self.like, self.bias)

    @property
    def weight(self):
        # 1 w + 0 + .. is w
        return packed_product(torch.eye(self.like.size(1), dtype=self.like.dtype), self.packed, self.like).t()

    def _save_to_state_dict(self, out, prefix, keep_vars):
        out |= {prefix + "weight": self.weight} | ({} if self.bias is None else {prefix + "bias": self.bias})

    @staticmethod
    def pays(weight):
        """MKL's packed matrices lie so far apart in memory that small ones lose more than they gain."""
        if weight.device.type != "cpu" or weight.dim() != 2:
            return False
        if weight.dtype == torch.float32:
            return torch.backends.mkl.is_available() and min(weight.shape) >= 384
        return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


# --------------------------------------------------------------------------------------------------
# Ready to decode

class ShortRMSNorm(nn.RMSNorm):
    """RMSNorm for decoding in float32 on a CPU, where torch has no kernel for it: half as many operations."""

    def __init__(self, norm):
        super().__init__(norm.normalized_shape, eps=norm.eps)
        self.weight, self.tiny = norm.weight, torch.tensor(norm.eps)

    def forward(self, x):  # x / sqrt(|x|^2 / C + eps), row by row
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.tiny, length, length, value=1 / x.size(-1)).rsqrt_() * self.weight

    @staticmethod
    def pays(weight):
        return weight.device.type == "cpu" and weight.dtype == torch.float32


def for_decoding(module, compile=False):
    """
    Ready to decode, and no longer to be trained: eval mode, no gradients. On a CPU norms are short, large
    matrices are packed, the others stored column by column, which MKL multiplies with the 4 to 16 rows of
    a tree about 1.2 times as fast. compile: see compile_steps.
    """
    module.eval().requires_grad_(False)
    for m in list(module.modules()):
        for name, child in m.named_children():
            if isinstance(child, nn.Linear) and PackedLinear.pays(child.weight):
                setattr(m, name, PackedLinear(child.weight, child.bias))
            if isinstance(child, nn.RMSNorm) and ShortRMSNorm.pays(child.weight) and not compile:
                setattr(m, name, ShortRMSNorm(child))
        if isinstance(m, DraftLMHead) and m.lm_rows is not None and PackedLinear.pays(m.lm_rows):
            m.lm_rows = PackedLinear(m.lm_rows)
    for p in module.parameters():
        if p.dim() == 2 and p.device.type == "cpu":
            p.data = p.data.t().contiguous().t()
    if compile:
        compile_steps(module)
    return module


def compile_steps(module):
    """
    --compile: what a decoding step runs, the methods that module names in compiled, through
    torch.compile, in place. One graph serves all lengths of text, one all trees, and one single tokens;
    all are made when they are first needed. Ends with a message where nothing can be compiled.
    """
    names = getattr(module, "compiled", ())
    if not names:
        return
    torch._dynamo.config.recompile_limit = 64       # ranges of layers, with and without mask, one row or many
    try:
        torch.compile(torch.neg)(next(module.parameters()).new_zeros(2))
    except Exception as e:                            # no C++ compiler, no Triton, no support for this Python
        fail(f"--compile does not work here ({first_line(e)}): leave it out")
    for name in names:
        setattr(module, name, torch.compile(getattr(module, name), dynamic=True))


@torch.inference_mode()
def step_seconds(target, nodes, rounds=7, prepare=lambda: None):
    """A target's speed: the median time of two layers and lm_head over so many nodes behind a page."""
    S = min(128, target.cfg.block_size // 2)
    cache, device = target.new_cache(S + nodes), target.wte.weight.device
    cache.length = S                                                   # rows of zeros will do
    pos = torch.full((nodes,), S, device=device)
    mask = torch.ones(nodes, S + nodes, dtype=torch.bool, device=device).tril(S)
    x, seconds = target.embed(torch.zeros(1, nodes, dtype=torch.long, device=device), pos), []
    for _ in range(rounds):
        prepare()
        start = time.perf_counter()
        target.logits(target.run(x, pos, mask, cache, 0, min(2, target.cfg.n_layer))[0]).max().item()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def pick_threads(target, wanted=0):
    """
    As many threads as pay: one where all of them bring less than a fifth, since beside other busy
    processes two threads wait for each other. wanted: --threads, 0 = by measurement.
    """
    most = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(wanted)
    elif most > 1 and target.wte.weight.device.type == "cpu":
        all_of_them = step_seconds(target, 8)
        torch.set_num_threads(1)
        if step_seconds(target, 8) > 1.2 * all_of_them:
            torch.set_num_threads(most)


# --------------------------------------------------------------------------------------------------
# Training: states that come again

class HiddenStateCache:
    """
    Stands in for a frozen target's hidden(x) while drafters are trained: the states (T, C) of every
    sequence are kept, in bfloat16, as long as they fit into room bytes, and a sequence that comes again
    costs no forward. New ones are rounded as well, so what is in memory changes nothing. What decodes,
    with a KV cache, goes to the target.
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
                self.kept[key] = h.clone()                           # a view would keep its whole batch alive
                self.room -= h.nbytes
        return torch.stack([fresh[key] if key in fresh else self.kept[key] for key in keys]).to(self.like)
