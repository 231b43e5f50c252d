"""A KV-aware router, written from the public schema alone: it knows lists of numbers and words, not our types."""

from typing import Any

PATH = tuple[bool, tuple[int, ...]]  # whether it has a namespace, and all tokens from the beginning of the prompt


class Router:
    """`prefixes` is what the server is believed to hold. Raises where events contradict each other."""

    def __init__(self) -> None:
        self._paths: dict[int, PATH] = {}
        self.num_removed = 0
        self.num_cleared = 0

    @property
    def prefixes(self) -> set[PATH]:
        assert len(set(self._paths.values())) == len(self._paths), "two hashes for the same prefix"
        return set(self._paths.values())

    def take(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case ["BlockStored", list(hashes), parent, list(tokens), int(size), None, "GPU", None, extra]:
                    self._store(hashes, parent, tokens, size, extra is not None)
                case ["BlockRemoved", list(hashes), "GPU"]:
                    for block in hashes:
                        del self._paths[block]
                        self.num_removed += 1
                case ["AllBlocksCleared"]:
                    self._paths.clear()
                    self.num_cleared += 1
                case _:
                    raise ValueError(event)

    def _store(self, hashes: list[int], parent: int | None, tokens: list[int], size: int, is_salted: bool) -> None:
        assert len(tokens) == len(hashes) * size
        salted, path = (is_salted, ()) if parent is None else self._paths[parent]
        for i, block in enumerate(hashes):
            path += tuple(tokens[i * size:(i + 1) * size])
            assert block not in self._paths
            self._paths[block] = (salted, path)
