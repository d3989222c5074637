"""
What every program shares with its user: options, error lines, devices, and what is printed by which process.
"""
import argparse
import math
import os
import re
import sys
from dataclasses import fields

from tqdm import tqdm
import torch



OUT = "out"                                                            # the default of --out
DTYPES = ["auto", "float32", "bfloat16", "float16", "float64"]         # choices of --dtype


# --------------------------------------------------------------------------------------------------
# Errors

def first_line(error):
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


def fail(message):
    """End on an error the user can mend: one clear line, exit status 2."""
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


def command(main, *args):
    """Run a command line's main: Ctrl-C is no error, and what no option could have foreseen gets a line."""
    try:
        return main(*args)
    except KeyboardInterrupt:
        raise SystemExit(130)
    except BrokenPipeError:                                            # nobody reads us any more: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)
    except FloatingPointError as e:                                    # NaN, in a text that is being written
        fail(e)
    except (MemoryError, OverflowError, RuntimeError) as e:
        if "RANK" in os.environ and re.search("gloo|nccl", str(e), re.I):
            fail("another of the processes has ended: it says why")
        if not re.search("alloc|memory|overflow", f"{type(e).__name__} {e}", re.I):
            raise
        fail(f"these options are too large for this machine ({first_line(e)}): choose smaller ones")
    except BaseException as e:
        if type(e).__name__ != "PanicException":                       # Rust's, and no Exception of Python's
            raise
        fail(f"a library cannot cope with what it was given ({first_line(e)})")


# --------------------------------------------------------------------------------------------------
# Several processes: the first one speaks

def rank():
    return int(os.environ.get("RANK", 0))


def say(text):
    """Print on the first process only, above a progress bar."""
    if rank() == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


# --------------------------------------------------------------------------------------------------
# Command line

def parse(*configs, argv=None, defaults=None, epilog=None):
    """
    Fill config dataclasses from one command line; field n_heads becomes --n-heads. defaults override the
    classes' own. In -h a field stands in the group that its arg names, or in one for its class, titled by the
    docstring; epilog comes last. A field that was not made by arg is no option.
    """
    p = argparse.ArgumentParser(description=configs[0].__doc__, epilog=epilog, allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.error = fail
    try:
        "".join(sys.argv if argv is None else argv).encode()
    except UnicodeEncodeError:
        fail("an option is not valid UTF-8 text")
    groups, options = {}, {c: [f for f in fields(c) if f.metadata] for c in configs}
    for c in configs:
        for f in options[c]:
            own = "what most people need"
            if c is not configs[0]:
                own = c.__doc__.strip().splitlines()[0].rstrip(".")
            title = f.metadata["group"] or own
            group = groups[title] = groups.get(title) or p.add_argument_group(title)
            kind = dict(action=argparse.BooleanOptionalAction)
            if f.type is not bool:
                metavar = None if f.metadata["choices"] else f.type.__name__
                kind = dict(type=f.type, choices=f.metadata["choices"], metavar=metavar)
            default = (defaults or {}).get(f.name, f.default)
            group.add_argument("--" + f.name.replace("_", "-"), default=default,
                               help=f.metadata["help"].replace("%", "%%"), **kind)
    args = vars(p.parse_args(argv))
    for f in (f for c in configs for f in options[c]):
        low, high, value = f.metadata["low"], f.metadata["high"], args[f.name]
        if f.type in (int, float) and not low <= value <= high:
            bound = f"at most {high}" if value > high and not math.isinf(value) else f"{low} or more"
            fail(f"--{f.name.replace('_', '-')} must be {bound}, not {value}")
    try:
        return [c(**{f.name: args[f.name] for f in options[c]}) for c in configs]
    except ValueError as e:
        fail(str(e))


# --------------------------------------------------------------------------------------------------
# Device

def pick_dtype(name, device):
    """--dtype on a device -> (torch.dtype, why): bfloat16 where the processor multiplies it."""
    if name != "auto":
        return getattr(torch, name), "as asked for"
    if device.startswith("cuda"):
        return torch.bfloat16, "a GPU"
    if device == "cpu" and bf16_cpu():
        return torch.bfloat16, "this processor multiplies it"
    return torch.float32, "no bfloat16 instructions here" if device == "cpu" else "the safe choice there"


def bf16_cpu():
    """Does this processor multiply bfloat16 (AVX512_BF16 or AMX)?"""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def mixed(device, kind):
    """
    Does what trains, the backbone or a method, train under bf16 autocast? On a GPU; and on a processor that
    multiplies bfloat16 the backbone, for which it was measured (6,000 tokens/s, not 4,390).
    """
    return gpu(device) or device == "cpu" and kind == "backbone" and bf16_cpu()


def pick_device(name="auto"):
    """The only place that chooses a device: cuda, else mps, else cpu. A name that is none gets a message."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as e:
        fail(f"device {name} cannot be used: {str(e).splitlines()[0]}")
    return name


def gpu(device):
    return device.startswith("cuda")
