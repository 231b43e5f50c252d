"""The adapters of one runtime: what they are called, who uses them, and how they come and go while it runs.

    load     the folder is read and checked here, then by every rank, beside the steps; after that its name is known
    unload   the name is gone at once; when the last request that has it has ended, the scheduler tells the ranks to forget it

A request holds the adapter that had the name when it came; a later one of that name has a number and a digest
of its own.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import time
from typing import Any, Protocol

import anyio
import msgspec
from anyio.to_thread import run_sync
from msgspec import Struct

from runtime.errors import InvalidRequest, ModelError, OptionsError
from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.requests import AdapterRef
from runtime.models.config import ModelConfig
from runtime.models.lora_targets import lora_modules
from runtime.models.peft import Adapter, read_adapter
from runtime.service import AdapterCard


class AdapterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One of --lora-paths."""

    name: str
    path: str
    pinned: bool = False


class JsonAdapterSpec(Struct, frozen=True):
    """The same in SGLang's words or in vLLM's."""

    lora_name: str = ""
    lora_path: str = ""
    pinned: bool | None = None
    name: str = ""
    path: str = ""


class Limits(Struct, frozen=True, kw_only=True):
    """What the options say. `targets` and `max_rank` are known from the adapters where they are not given."""

    num_lora_slots: int
    max_rank: int | None = None
    targets: tuple[str, ...] | None = None
    max_loaded: int | None = None


class Ranks(Protocol):
    """What is asked of them; actors/supervisor.py is this."""

    async def load_adapter(self, load: LoadAdapter) -> None:
        """On all of them. Raises InvalidRequest, Unavailable."""
        ...


class Entry:
    """A loaded adapter."""

    def __init__(self, ref: AdapterRef) -> None:
        self.ref = ref
        self.num_open = 0  # requests
        # set when it has left: its name is gone, and its last request has ended
        self.is_unused = anyio.Event()
        self.is_leaving = False


class Loras:
    """All of them. `cards` is what clients may know, and always up to date."""

    def __init__(
        self, model: ModelConfig, served_name: str, wishes: list[AdapterSpec], limits: Limits
    ) -> None:
        """Reads the folders of `wishes`. Raises ModelError, OptionsError."""
        self.cards: dict[str, AdapterCard] = {}
        self.limits = limits
        self._served_name = served_name
        self._entries: dict[str, Entry] = {}  # by name; who was asked for last stands last
        self._users: dict[str, Entry] = {}  # by request id
        self._ids = count(1)
        self._held: dict[int, str] = {}  # folders of all that ranks have or are to have, by number
        self._busy: set[str] = set()  # names that are being loaded
        self._modules = lora_modules(model)
        if not self._modules:
            raise OptionsError(
                [f"--enable-lora: adapters of {model.architecture} are not supported; leave it out"]
            )
        adapters = {wish.name: (wish, self._read_first(wish)) for wish in wishes}
        if len(adapters) < len(wishes):
            raise OptionsError(["--lora-paths gives two adapters one name; choose another"])
        ranks = [adapter.rank for _, adapter in adapters.values()]
        self._max_rank = limits.max_rank or max(ranks, default=0)
        known = {module.rpartition(".")[2] for module in self._modules}
        given = set(limits.targets or ()) - {"all", "all-linear"}
        if given - known:
            raise OptionsError(
                [
                    f"--lora-target-modules names {', '.join(sorted(given - known))}; "
                    f"this model has {', '.join(sorted(known))}"
                ]
            )
        found = set().union(*(adapter.targets for _, adapter in adapters.values()))
        self._targets = known if limits.targets and not given else given or found
        for wish, adapter in adapters.values():
            self._check(adapter)
            self._enter(wish.name, adapter, is_pinned=wish.pinned)
        if sum(wish.pinned for wish in wishes) >= limits.num_lora_slots:
            raise OptionsError(
                [
                    "--lora-paths pins so many adapters that no seat is left for others; raise --max-loras-per-batch"
                ]
            )

    def _read_first(self, wish: AdapterSpec) -> Adapter:
        try:
            return read_adapter(wish.path, self._modules)
        except ModelError as error:
            raise ModelError(f"--lora-paths {wish.name}: {error}") from None

    def setup(self) -> AdapterSetup:
        """For ranks that start now."""
        return AdapterSetup(
            num_lora_slots=self.limits.num_lora_slots,
            max_rank=self._max_rank,
            targets=tuple(sorted(self._targets)),
            loaded=[LoadAdapter(id, folder) for id, folder in self._held.items()],
        )

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────

    def find(self, name: str) -> AdapterRef:
        """Raises InvalidRequest."""
        if (entry := self._entries.get(name)) is None:
            raise InvalidRequest(f"no adapter {name} is loaded; {listed(self.cards)}", param="lora_path")
        self._entries[name] = self._entries.pop(name)
        return entry.ref

    def opened(self, request_id: str, name: str) -> None:
        """A request has it; `ended` follows."""
        self._users[request_id] = entry = self._entries[name]
        entry.num_open += 1

    def ended(self, request_id: str) -> None:
        """Requests without one, too."""
        if (entry := self._users.pop(request_id, None)) is not None:
            entry.num_open -= 1
            self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        if entry.is_leaving and not entry.num_open:
            self._forget(entry.ref.id)
            entry.is_unused.set()

    # ── operators ──────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, ranks: Ranks, forget: Callable[[int], None]) -> None:
        """`forget` tells the scheduler that no request has an adapter any more."""
        self._ranks, self._tell_scheduler = ranks, forget

    async def load(self, name: str, folder: str, *, is_pinned: bool = False) -> None:
        """See AdapterControls in service.py; so is `unload`."""
        if not name or ":" in name or name in (self._served_name, "default"):
            raise InvalidRequest(
                "an adapter's name is not empty, not the model's, and has no colon", param="lora_name"
            )
        if name in self._entries or name in self._busy:
            raise InvalidRequest(
                f"an adapter {name} is loaded already; unload it first, or choose another name",
                param="lora_name",
            )
        if (
            is_pinned
            and 1 + sum(entry.ref.is_pinned for entry in self._entries.values()) >= self.limits.num_lora_slots
        ):
            raise InvalidRequest("with it all seats would be pinned (--max-loras-per-batch)", param="pinned")
        self._busy.add(name)
        try:
            adapter = await run_sync(read_adapter, folder, self._modules)
            self._check(adapter)
            self._make_room()
            load = LoadAdapter(next(self._ids), folder)
            self._held[load.id] = folder
            try:
                await self._ranks.load_adapter(load)
            except BaseException:
                del self._held[load.id]
                self._tell_scheduler(load.id)  # some ranks may have it
                raise
            self._enter(name, adapter, id=load.id, is_pinned=is_pinned)
        except ModelError as error:
            raise InvalidRequest(str(error), param="lora_path") from None
        finally:
            self._busy.discard(name)

    async def unload(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is None:
            raise InvalidRequest(f"no adapter {name} is loaded; {listed(self.cards)}", param="lora_name")
        del self.cards[name]
        entry.is_leaving = True
        self._settle(entry)
        await entry.is_unused.wait()

    def _forget(self, adapter: int) -> None:
        del self._held[adapter]
        self._tell_scheduler(adapter)

    def _make_room(self) -> None:
        """The adapter that was not asked for longest leaves when there are as many as may be."""
        most = self.limits.max_loaded
        if most is None or len(self._entries) + len(self._busy) <= most:
            return
        for name, entry in self._entries.items():
            if not entry.num_open and not entry.ref.is_pinned:
                del self._entries[name], self.cards[name]
                self._forget(entry.ref.id)
                return
        raise InvalidRequest(
            f"{most} adapters are loaded (--max-loaded-loras), all pinned or in use; unload one",
            param="lora_name",
        )

    def _enter(self, name: str, adapter: Adapter, *, id: int | None = None, is_pinned: bool) -> None:
        ref = AdapterRef(next(self._ids) if id is None else id, adapter.digest, is_pinned)
        self._entries[name] = Entry(ref)
        self._held[ref.id] = adapter.folder
        self.cards[name] = AdapterCard(name, adapter.folder, adapter.rank, int(time()), is_pinned)

    def _check(self, adapter: Adapter) -> None:
        if adapter.rank > self._max_rank:
            raise ModelError(
                f"the adapter has rank {adapter.rank}, and the ranks have room for {self._max_rank}; raise --max-lora-rank"
            )
        if others := adapter.targets - self._targets:
            raise ModelError(
                f"the adapter changes {', '.join(sorted(others))}, and the ranks have room for "
                f"{', '.join(sorted(self._targets))}; give --lora-target-modules"
            )


def find_adapter(loras: Loras | None, name: str) -> AdapterRef:
    """Raises InvalidRequest."""
    if loras is None:
        raise InvalidRequest(
            f"no adapter {name} is loaded: this server has none (--enable-lora, --lora-paths)",
            param="lora_path",
        )
    return loras.find(name)


def listed(cards: dict[str, AdapterCard]) -> str:
    """Those loaded, in words."""
    return f"loaded are {', '.join(cards)}" if cards else "none is loaded"


def adapter_specs_of(paths: tuple[str, ...] | None) -> list[AdapterSpec]:
    """--lora-paths: PATH, NAME=PATH, or JSON. Raises OptionsError."""
    return [_wish(path) for path in paths or ()]


def _wish(text: str) -> AdapterSpec:
    if text.lstrip().startswith("{"):
        try:
            given: Any = msgspec.json.decode(text, type=JsonAdapterSpec)
        except msgspec.MsgspecError as error:
            raise OptionsError(
                [f'--lora-paths: {error}; give PATH, NAME=PATH or {{"lora_name", "lora_path", "pinned"}}']
            ) from None
        name, path, pinned = given.lora_name or given.name, given.lora_path or given.path, bool(given.pinned)
    else:
        name, is_named, path = text.partition("=")
        path, pinned = path if is_named else name, False
    if not name or not path or (":" in name and name != path):
        raise OptionsError(
            [f"--lora-paths {text}: give PATH, NAME=PATH without a colon in the name, or JSON"]
        )
    return AdapterSpec(name, str(Path(path).expanduser()), pinned)
