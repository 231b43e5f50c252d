"""What a prefix tree holds, found by walking it."""

from array import array
from hashlib import blake2b

import msgspec

from runtime.cache.prefix import PrefixTree
from tests.cache.router import Router


def held(tree: PrefixTree, medium: str = "GPU") -> set[tuple[str, tuple[int, ...]]]:
    """(digest of the namespace, tokens) of every page there."""
    found = set()
    stack = [
        (name and blake2b(name.encode(), digest_size=8).hexdigest(), (), root)
        for name, root in tree.roots.items()
    ]
    while stack:
        namespace, tokens, node = stack.pop()
        for child in node.children.values():
            path = (*tokens, *array("i", child.key))
            if child.page if medium == "GPU" else child.host:
                found.add((namespace, path))
            stack.append((namespace, path, child))
    return found


def listen(router: Router, tree: PrefixTree) -> bool:
    """Sends the new events to the router. Returns whether it then knows what each medium holds."""
    assert tree.journal is not None
    router.take(msgspec.msgpack.decode(msgspec.msgpack.encode(tree.journal.take().events)))
    return all(router.prefixes(medium) == held(tree, medium) for medium in ("GPU", "CPU"))
