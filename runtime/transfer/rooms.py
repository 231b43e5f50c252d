"""What a server that computes prompts knows of their pages. Pure but for the event that says "look again".

A room is the id under which a router sent the two halves of a request. Its pages are in the prefix tree like
those of any other prompt: computed, copied to host memory behind the step that computed them, and evicted
when they are the least recently used. So nothing is given back, and a second decode server may ask again.
"""

from collections import OrderedDict
from time import monotonic

import anyio
from msgspec import Struct

from runtime.cache.host_states import is_saving
from runtime.cache.node import Node
from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import KEY_BYTES, Pin, StatePin, StorageConnector
from runtime.transfer.layout import RankPages

MOST = 4096
KEPT_S = 120.0  # for which a room can be asked for when its prompt is computed


class Room(Struct, frozen=True):
    """A prompt whose pages may be asked for."""

    sequence: Sequence
    connector: StorageConnector
    pages: RankPages
    opened_s: float

    def ready(self, first: int, keys: bytes, most: int) -> list[Pin]:
        """Pins for pages `first`, `first` + 1, ... of the prompt that are complete in host memory and have
        these keys, up to `most` of them and to the first that is missing."""
        wanted = [keys[at : at + KEY_BYTES] for at in range(0, min(len(keys), most * KEY_BYTES), KEY_BYTES)]
        path = self._path(first + len(wanted))[first:]
        pins = list[Pin]()
        for node, key in zip(path, wanted, strict=False):
            if not node.host or node.save_step or self.connector.key(node) != key:
                break
            pins.append(self.connector.pin(node))
        return pins

    def is_coming(self, depth: int) -> bool:
        """Whether the last of the first `depth` pages, which is not ready, may yet be."""
        path = self._path(depth)
        if len(path) < depth:
            return not self.sequence.is_finished
        node = path[-1]
        return node.is_due or node.save_step != 0

    def state(self, first: int, keys: bytes) -> tuple[int, StatePin] | None:
        """The last state behind one of these pages, `first` and those after it, and how many pages of the
        prompt stand before it; pinned. None: there is none."""
        states = self.connector.cache.host.states
        path = self._path(first + len(keys) // KEY_BYTES)
        for node in reversed(path[first:] if states is not None else []):
            assert states is not None
            at = (node.depth - 1 - first) * KEY_BYTES
            key = keys[at : at + KEY_BYTES]
            if node.host_state and not is_saving(states, node) and self.connector.key(node) == key:
                states.places.pin([node.host_state])
                return node.depth, StatePin(key, node.host_state, states)
        return None

    def is_state_coming(self, first: int, depth: int) -> bool:
        """Whether another state behind one of the pages from `first` to `depth` may yet be there."""
        states = self.connector.cache.host.states
        if states is None:
            return False
        path = self._path(depth)[first:]
        return not self.sequence.is_finished or any(is_saving(states, node) for node in path)

    def _path(self, depth: int) -> list[Node]:
        """The nodes of the first `depth` pages, as far as the tree has them."""
        tree, tokens = self.connector.cache.tree, self.sequence.tokens
        last = min(depth, len(tokens) // tree.page_size)
        node = tree.probe(None, self.sequence.request.namespace, tokens, last)
        path = list[Node]()
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


class Rooms:
    """The rooms of all replicas."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[int, Room] = OrderedDict()  # in the order of opening
        self._refused: OrderedDict[int, None] = OrderedDict()
        self._changed = anyio.Event()

    def open(self, number: int, sequence: Sequence, connector: StorageConnector, pages: RankPages) -> None:
        """A request of this room has come. Rooms that ended long ago are forgotten."""
        now = monotonic()
        self._rooms.pop(number, None)
        self._rooms[number] = Room(sequence, connector, pages, now)
        while self._rooms:
            first = next(iter(self._rooms.values()))
            is_old = first.sequence.is_finished and now - first.opened_s > KEPT_S
            if not is_old and len(self._rooms) <= MOST:
                break
            self._rooms.popitem(last=False)
        self.look()

    def refuse(self, number: int) -> None:
        """The request of this room was refused here: it need not be waited for."""
        self._refused[number] = None
        if len(self._refused) > MOST:
            self._refused.popitem(last=False)
        self.look()

    def is_refused(self, number: int) -> bool:
        """Whether the request of this room was refused."""
        return number in self._refused

    def find(self, number: int) -> Room | None:
        """The room of this number."""
        return self._rooms.get(number)

    def look(self) -> None:
        """Something may have changed: a room was opened, pages came to host memory, a prompt was computed."""
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = anyio.Event()

    async def changed(self, within_s: float) -> bool:
        """Waits for `look`. False: it was not called in this time."""
        event = self._changed
        with anyio.move_on_after(within_s):
            await event.wait()
        return event.is_set()
