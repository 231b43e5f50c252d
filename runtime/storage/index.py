"""The index of a directory of records: their sizes, in order of use."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One record: its length, the time of its last use as far as known here, and the time that its file
    records."""

    num_bytes: int
    used_s: float
    noted_s: float


class Index:
    """Records by file name (relative to the root), least recently used first. Not thread-safe: the owner
    locks."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> Entry | None:
        """The entry of a record; None when it is not known."""
        return self._entries.get(name)

    def put(self, name: str, entry: Entry) -> None:
        """Adds a record, or moves it to the end: it is the most recently used one."""
        self.drop(name)
        self._entries[name] = entry
        self.num_bytes += entry.num_bytes

    def drop(self, name: str) -> None:
        """Removes a record, if it is known."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def oldest(self) -> tuple[str, Entry]:
        """The least recently used record."""
        return next(iter(self._entries.items()))

    def replace(self, entries: list[tuple[str, Entry]]) -> None:
        """Replaces the index by the result of a scan, and keeps later times of use that are known here."""
        for number, (name, entry) in enumerate(entries):
            known = self._entries.get(name)
            if known is not None and known.used_s > entry.used_s:
                entries[number] = (name, entry._replace(used_s=known.used_s))
        self._entries = OrderedDict(sorted(entries, key=lambda item: item[1].used_s))
        self.num_bytes = sum(entry.num_bytes for entry in self._entries.values())


def scan(root: Path, suffix: str) -> list[tuple[str, Entry]]:
    """Every record below root/*/*/. Files that are deleted meanwhile are left out."""
    records = []
    for entry in (file for folder in _folders(root) for part in _folders(folder) for file in _entries(part)):
        if entry.name.endswith(suffix):
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            records.append(
                (os.path.relpath(entry.path, root), Entry(stat.st_size, stat.st_mtime, stat.st_mtime))
            )
    return records


def _folders(path: str | Path) -> Iterator[str]:
    return (entry.path for entry in _entries(path) if entry.is_dir(follow_symlinks=False))


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
