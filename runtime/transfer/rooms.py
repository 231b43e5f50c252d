"""What a server that computes prompts knows of their pages. Pure but for the event that says "look again".

A room is the id under which a router sent the two halves of a request. Its pages are in the prefix tree like
those of any other prompt: computed, copied to host memory behind the step that computed them, and evicted
when they are the least recently used. So nothing is given back, and a second decode server may ask again.
"""

from collections import OrderedDict
from itertools import takewhile
from time import monotonic

import anyio
from msgspec import Struct

from runtime.cache.host_states import is_saving
from runtime.cache.node import Node
from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import KEY_BYTES, Pin, StatePin, StorageConnector
from runtime.messages.requests import TokenLogprob
from runtime.messages.scheduler import StepTokens
from runtime.messages.transfer import First
from runtime.transfer.layout import RankPages

MOST = 4096
KEPT_S = 120.0  # for which a room can be asked for when its prompt is computed


class Room(Struct):
    """A prompt whose pages may be asked for."""

    sequence: Sequence
    connector: StorageConnector
    pages: RankPages
    opened_s: float
    first: First | None = None  # what was sampled behind it


class Saving(Struct, frozen=True):
    """Pages that a step in flight computes and saves, pinned."""

    pins: list[Pin]
    step: int
    pages: RankPages
    connector: StorageConnector

    def num_stored(self) -> list[int] | None:
        """For each stage, the parts of these pages that are in the host memory of its ranks. None: they will
        not be there, as the ranks have died."""
        nodes = [pin.node for pin in self.pins]
        if not all(pin.is_current and pin.node.host == pin.host for pin in self.pins):
            return None
        if not any(node.save_step for node in nodes):
            return self.pages.num_parts
        if any(node.save_step != self.step for node in nodes):
            return None
        return self.pages.num_stored(self.connector.cache.host.saved_parts.of(self.step))

    def release(self) -> None:
        """Unpins them."""
        for pin in self.pins:
            pin.release()


class Reader:
    """Reads the pages of a room in their order. Each look costs what is new, not the length of the prompt."""

    def __init__(self, room: Room, first: int, keys: bytes) -> None:
        """`keys`: of pages `first`, `first` + 1, ... of the prompt, as they were asked for."""
        self._room = room
        self._first = first
        self._keys = keys
        self._node: Node | None = None  # where the last look has ended

    def ready(self, position: int, most: int) -> list[Pin]:
        """Pins for the pages that were asked for from number `position` on that are complete in host memory,
        up to `most` of them and to the first that is missing."""
        connector, pins = self._room.connector, list[Pin]()
        for node in self._path(position, position + most):
            if not node.host or node.save_step or connector.key(node) != self._key(node):
                break
            pins.append(connector.pin(node))
        return pins

    def saving(self, position: int) -> Saving | None:
        """The pages from number `position` on that one step is saving, if parts of them are there already.
        None: there are none."""
        room = self._room
        path = self._path(position, len(self._keys) // KEY_BYTES)
        step = path[0].save_step if path else 0
        if step <= 0 or not any(room.pages.num_stored(room.connector.cache.host.saved_parts.of(step))):
            return None
        own = list(takewhile(lambda node: node.host and node.save_step == step, path))
        if any(room.connector.key(node) != self._key(node) for node in own):
            return None
        return Saving([room.connector.pin(node) for node in own], step, room.pages, room.connector)

    def is_coming(self, position: int) -> bool:
        """Whether the page of this number, which is not ready, may yet be."""
        path = self._path(position, position + 1)
        if not path:
            return not self._room.sequence.is_finished
        return path[0].is_due or (path[0].host != 0 and path[0].save_step != 0)

    def state(self, end: int) -> tuple[int, StatePin] | None:
        """The last state behind one of the first `end` pages that were asked for, and how many pages of the
        prompt stand before it; pinned. None: there is none."""
        states = self._room.connector.cache.host.states
        if states is None:
            return None
        for node in reversed(self._path(0, end)):
            if node.host_state and not is_saving(states, node):
                if (key := self._room.connector.key(node)) == self._key(node):
                    states.places.pin([node.host_state])
                    return node.depth, StatePin(key, node.host_state, states)
        return None

    def is_state_coming(self, end: int) -> bool:
        """Whether another state behind one of these pages may yet be there."""
        states = self._room.connector.cache.host.states
        if states is None:
            return False
        is_computed = self._room.sequence.is_finished
        return not is_computed or any(is_saving(states, node) for node in self._path(0, end))

    def _key(self, node: Node) -> bytes:
        """The key that was given for its page."""
        at = (node.depth - 1 - self._first) * KEY_BYTES
        return self._keys[at : at + KEY_BYTES]

    def _path(self, begin: int, end: int) -> list[Node]:
        """The nodes of pages `begin` to `end` of those that were asked for, as far as the tree has them."""
        tree, sequence = self._room.connector.cache.tree, self._room.sequence
        num_pages = min(end, len(self._keys) // KEY_BYTES)
        last = min(self._first + num_pages, len(sequence.tokens) // tree.page_size)
        node = self._node = tree.probe(self._node, sequence.request.namespace, sequence.tokens, last)
        path = list[Node]()
        while node.parent is not None and node.depth > self._first + begin:
            if node.depth <= last:
                path.append(node)
            node = node.parent
        return path[::-1]


class Rooms:
    """The rooms of all replicas."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[int, Room] = OrderedDict()  # in the order of opening
        self._numbers: dict[int, int] = {}  # of rooms, by the id of their sequence
        self._refused: OrderedDict[int, None] = OrderedDict()
        self._changed = anyio.Event()

    def open(self, number: int, sequence: Sequence, connector: StorageConnector, pages: RankPages) -> None:
        """A request of this room has come. Rooms that ended long ago are forgotten."""
        now = monotonic()
        if (old := self._rooms.pop(number, None)) is not None:
            self._numbers.pop(old.sequence.id, None)
        self._rooms[number] = Room(sequence, connector, pages, now)
        self._numbers[sequence.id] = number
        while self._rooms:
            first = next(iter(self._rooms.values()))
            is_old = first.sequence.is_finished and now - first.opened_s > KEPT_S
            if not is_old and len(self._rooms) <= MOST:
                break
            _, room = self._rooms.popitem(last=False)
            self._numbers.pop(room.sequence.id, None)
        self.look()

    def sampled(self, tokens: StepTokens) -> None:
        """A step has brought tokens, those of rooms among them. `look` is called next."""
        for sequence_id, token in zip(tokens.sequence_ids, tokens.token_ids, strict=True):
            if (number := self._numbers.pop(sequence_id, None)) is not None:
                found = tokens.logprobs.get(sequence_id)
                one = TokenLogprob(token, None, ()) if not found else found[0]
                self._rooms[number].first = First(token, one.logprob, list(one.top), list(one.picked))

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
