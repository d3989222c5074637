r"""
One step's token tree as text: what sample.py --show tree prints.

    after '     lines.append(line)\n    return lines'
    '\n\n\n'              draft P(token)  P(path)             the root: the last token of the text
    ├─ ✓ 'def'                     0.694    0.694             ✓ drafted, and the target's own choice too: accepted
    │  ├─ ✓ ' read'                0.251    0.174
    │  │  └─ ✓ '_l'                0.712    0.124
    │  │     └─ ✓ 'ines'           0.892    0.110
    │  │        └─ + '('                                      + the target's choice after the last accepted node
    │  ├─   ' _'                   0.236    0.164
    │  └─   ' get'                 0.138    0.096
    └─   '#'                       0.084    0.084

P(path) is what the drafter thinks of the path (Tree.value), by which trees are grown; P(token) is its last factor. Above
temperature 0 they include the noise that is shared with the target.
"""
import itertools


def watch(drafter):
    """Let a drafter keep its trees -> the list that they go to, one for every target forward after the prompt's."""
    trees, draft = [], drafter.draft
    drafter.draft = lambda root, sampler: trees.append(draft(root, sampler)) or trees[-1]
    return trees


def verified(tokens, accepted, trees, room):
    """
    Each step of a generation with its tree: (tokens before it, its tokens, accepted nodes, root first, tree). trees: what
    watch has kept; room: the most tokens that could have been written.
    """
    n = accepted[0]
    for length, tree in zip(accepted[1:], trees):
        tree, new = tree.cut(room - n - 1), tokens[n:n + length]       # as generate has cut it
        child = {node: i for i, node in enumerate(zip(tree.parent, tree.tokens))}
        yield n, new, list(itertools.accumulate(new[:-1], lambda up, token: child[up, token], initial=0)), tree
        n += length


def draw(name, tokenizer, prompt, tokens, stats, trees, room, stream):
    """
    The step with the longest accepted path, and of several the one whose path the drafter thought least likely -> text. Unicode and
    colours (accepted green, other drafts dim) only where stream can show them.
    """
    try:
        "├└│─✓".encode(stream.encoding or "ascii")
        show, fork, last, down, yes = repr, "├─ ", "└─ ", "│  ", "✓ "
    except UnicodeEncodeError:
        show, fork, last, down, yes = ascii, "|- ", "`- ", "|  ", "* "

    def say(token):
        raw = tokenizer.decode_bytes([token])
        text = raw.decode("utf-8", "ignore")                           # a part of a character stays bytes
        return show(text if text.encode() == raw else raw) if raw else "<end>" if token in tokenizer.stops else f"<{token}>"

    steps = list(verified(tokens, stats.accepted, trees, room))
    if not steps:
        return f"{name}: no tree was drafted, the prompt's forward brought the whole text"
    best = max(range(len(steps)), key=lambda s: (len(steps[s][1]), -steps[s][3].value[steps[s][2][-1]]))
    n, new, path, tree = steps[best]
    nodes, own = list(zip(tree.parent, tree.tokens)), (path[-1], new[-1])
    nodes += [own] * (own not in nodes)                                # drafted too: the text ends there (or is typical)
    rows, todo = [], [(0, "", "")]
    while todo:                                                        # depth first
        i, stem, branch = todo.pop()
        (up, token), children = nodes[i], [c for c, (up, _) in enumerate(nodes) if up == i]
        below = stem + (down if branch == fork else " " * len(branch))
        todo += [(c, below, last if c == children[-1] else fork) for c in reversed(children)]
        mark = "" if i == 0 else "+ " if (up, token) == own else yes if i in path else "  "
        p = f"  {tree.value[i] / (tree.value[up] or 1):14.3f}  {tree.value[i]:7.3f}" if i < len(tree) else ""
        rows.append((f"{stem}{branch}{mark}{say(token)}", p if i else "  draft P(token)  P(path)", mark))
    width, colours = max(len(text) for text, _, _ in rows), {yes: "\033[32m", "  ": "\033[2m"} if stream.isatty() else {}
    lines = [f"{name}, forward {best + 2} of {len(stats.accepted)}, the longest accepted path: {len(tree)} nodes, {len(new) - 1} accepted "
             f"({yes[0]}), one token of the target's own (+)", f"after {show(tokenizer.decode(prompt + tokens[:n - 1])[-40:])}"]
    for text, p, mark in rows:
        line = f"{text:<{width}}{p}".rstrip()
        lines.append(f"{colours[mark]}{line}\033[0m" if mark in colours else line)
    return "\n".join(lines)
