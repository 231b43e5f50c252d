"""The order in which waiting sequences are taken: the policies, as a table.

A policy has a `key`, known when a sequence comes and never changed: the queue stays sorted by it, whatever
its length. Where the best order depends on what runs or is cached now, `rank` reorders the first few (WINDOW)
of that queue once a step. So a policy costs the same with ten waiting sequences and with ten thousand.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping

from msgspec import Struct

from runtime.cache.node import Node
from runtime.cache.prefix import PrefixTree
from runtime.cache.sequence import Sequence

WINDOW = 64  # sequences that `rank` looks at
_MASK64 = (1 << 64) - 1


class Now(Struct):
    """What a policy may look at: the prefix cache, and the running sequences by routing key."""

    tree: PrefixTree
    running_keys: Mapping[str, int]


class Policy(Struct, frozen=True):
    """A row of the table. The smallest `key` goes first; equal keys go in order of arrival."""

    key: Callable[[Sequence], int]
    rank: Callable[[list[Sequence], Now], list[Sequence]] | None = None


def arrival(sequence: Sequence) -> int:
    """First come, first served."""
    return sequence.id


def longest_output(sequence: Sequence) -> int:
    """The sequence that may generate most goes first."""
    return sequence.prompt_len - sequence.max_len


def shuffled(sequence: Sequence) -> int:
    """splitmix64 of the id: no order that a client could guess at, and the same one in every run."""
    x = (sequence.id + 1) * 0x9E3779B97F4A7C15 & _MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31


def longest_prefix(window: list[Sequence], now: Now) -> list[Sequence]:
    """The sequence that finds most of its prompt in the cache goes first."""
    matches: list[Node] = []
    for sequence in window:
        longest = (len(sequence.tokens) - 1) // now.tree.page_size
        match = now.tree.probe(sequence.match, sequence.request.namespace, sequence.tokens, longest)
        sequence.match = match
        matches.append(match)
    return [window[i] for i in sorted(range(len(window)), key=lambda i: -matches[i].depth)]


def heaviest_prefix(window: list[Sequence], now: Now) -> list[Sequence]:
    """Depth first through the tree of waiting prompts, at each fork into the branch that most of them take:
    those that share follow each other, and what they share is cached while it is used. Where branches weigh
    the same, the one that is cached goes first."""
    width = 4 * now.tree.page_size
    ordered: list[Sequence] = []
    stack = [(0, [(s.tokens.tobytes(), s) for s in longest_prefix(window, now)])]
    while stack:
        start, group = stack.pop()
        if len(group) == 1:
            ordered.append(group[0][1])
            continue
        texts = [text for text, _ in group]
        start = _common(min(texts), max(texts), start, width)
        branches: dict[bytes, list[tuple[bytes, Sequence]]] = defaultdict(list)
        for text, sequence in group:
            branches[text[start : start + width]].append((text, sequence))
        if len(branches) == 1:  # all the same
            ordered += [sequence for _, sequence in group]
        else:
            stack += [
                (start, branch) for branch in reversed(sorted(branches.values(), key=lambda b: -len(b)))
            ]
    return ordered


def _common(first: bytes, last: bytes, start: int, width: int) -> int:
    """Bytes of the full pages that both have in common; `start` are known to be."""
    low, high = start // width, min(len(first), len(last)) // width
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if first[low * width : middle * width] == last[low * width : middle * width]
            else (low, middle - 1)
        )
    return low * width


def busiest_key(window: list[Sequence], now: Now) -> list[Sequence]:
    """Whose routing key most running sequences have goes first; those with none go last."""
    return sorted(
        window, key=lambda s: -now.running_keys.get(s.request.routing_key, 0) if s.request.routing_key else 1
    )


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(arrival),
    "lpm": Policy(arrival, longest_prefix),
    "dfs-weight": Policy(arrival, heaviest_prefix),
    "lof": Policy(longest_output),
    "random": Policy(shuffled),
    "priority": Policy(arrival),  # its levels come before any policy: see waiting.py
    "routing-key": Policy(arrival, busiest_key),
}
