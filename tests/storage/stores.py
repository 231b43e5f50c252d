"""Stores in temporary directories, and pages that differ from each other."""

import hashlib
from pathlib import Path
from typing import Any

from runtime.storage.store import Store, open_store

PAGE = 4096
IDENTITY = b"i" * 16


def key_of(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def page_of(key: bytes) -> bytes:
    """The one right content of the page under this key."""
    return hashlib.shake_128(key).digest(PAGE)


def open_at(folder: Path, *, identity: bytes = IDENTITY, page_bytes: int = PAGE, **settings: Any) -> Store:
    return open_store("file", {"dir": str(folder), **settings}, identity, page_bytes)


def save(store: Store, *keys: bytes) -> None:
    for key in keys:
        page = page_of(key)
        store.save(key, [memoryview(page[:100]), memoryview(page[100:])])


def load(store: Store, key: bytes) -> bytes | None:
    page = bytearray(PAGE)
    whole = memoryview(page)
    return bytes(page) if store.load(key, [whole[:7], whole[7:7], whole[7:]]) else None
