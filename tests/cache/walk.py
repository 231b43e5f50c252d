"""What a prefix tree holds, found by walking it."""

from array import array

from runtime.cache.prefix import PrefixTree


def held(tree: PrefixTree) -> set[tuple[bool, tuple[int, ...]]]:
    """(whether it has a namespace, tokens) of every page."""
    found = set()
    stack = [(bool(name), (), root) for name, root in tree.roots.items()]
    while stack:
        is_salted, tokens, node = stack.pop()
        for child in node.children.values():
            path = (*tokens, *array("i", child.key))
            found.add((is_salted, path))
            stack.append((is_salted, path, child))
    return found
