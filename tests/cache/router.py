"""A KV-aware router, written from the public schema alone: it knows lists of numbers and words, not our
types."""

from typing import Any

# what is told of its namespace, and all tokens from the beginning of the prompt
PATH = tuple[str, tuple[int, ...]]


class Router:
    """`prefixes(medium)` is what the server is believed to hold there. Raises where events contradict each
    other."""

    def __init__(self) -> None:
        self._paths: dict[int, PATH] = {}
        self._held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        self.num_removed = 0
        self.num_cleared = 0

    def prefixes(self, medium: str = "GPU") -> set[PATH]:
        assert len(set(self._paths.values())) == len(self._paths), "two hashes for the same prefix"
        return {self._paths[block] for block in self._held[medium]}

    def take(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case [
                    "BlockStored",
                    list(hashes),
                    parent,
                    list(tokens),
                    int(size),
                    None,
                    str(medium),
                    None,
                    extra,
                ]:
                    self._store(hashes, parent, tokens, size, medium, extra)
                case ["BlockRemoved", list(hashes), str(medium)]:
                    self._remove(hashes, medium)
                case ["AllBlocksCleared"]:
                    self._paths.clear()
                    for held in self._held.values():
                        held.clear()
                    self.num_cleared += 1
                case _:
                    raise ValueError(event)

    def _store(
        self, hashes: list[int], parent: int | None, tokens: list[int], size: int, medium: str, extra: Any
    ) -> None:
        assert len(tokens) == len(hashes) * size
        namespace, path = (extra[0][0] if extra else "", ()) if parent is None else self._paths[parent]
        for i, block in enumerate(hashes):
            path += tuple(tokens[i * size : (i + 1) * size])
            assert block not in self._held[medium] and self._paths.get(block, (namespace, path)) == (
                namespace,
                path,
            )
            self._paths[block] = (namespace, path)
            self._held[medium].add(block)

    def _remove(self, hashes: list[int], medium: str) -> None:
        for block in hashes:
            self._held[medium].remove(block)
            self.num_removed += 1
            if not any(block in held for held in self._held.values()):
                del self._paths[block]
