"""The LoRA adapters of one runtime: their names, the requests that use them, loading and unloading while it
runs.

    load     the folder is read and checked here, then by every rank, between steps; then requests may name it
    unload   the name is gone at once; the ranks drop it when the last request that has it has ended

A request keeps the adapter that had the name when it came; a later adapter of that name has an id and a
digest of its own.

Adapters of --lora-paths, and those that the administrator loads, are for all tenants. One that another tenant
loads belongs to it: for others it does not exist. Names are unique in the server.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from time import time

import anyio
import msgspec
from anyio.to_thread import run_sync
from msgspec import Struct

from runtime import log
from runtime.errors import InvalidRequest, ModelError, OptionsError, RequestError, Unavailable
from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.requests import AdapterRef
from runtime.messages.tenants import DEFAULT_TENANT, Tenant
from runtime.models.config.lora_targets import lora_modules, lora_names, lora_renames
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.peft import Adapter, read_adapter, stamp
from runtime.options.plan import Plan
from runtime.service import AdapterCard, adapters_for


class AdapterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter of --lora-paths."""

    name: str
    path: str
    pinned: bool = False


class JsonAdapterSpec(Struct, frozen=True):
    """An adapter of --lora-paths as JSON, with the field names of SGLang or of vLLM."""

    lora_name: str = ""
    lora_path: str = ""
    pinned: bool | None = None
    name: str = ""
    path: str = ""


class LoraLimits(Struct, frozen=True, kw_only=True):
    """Limits from the options. `targets` and `max_rank` are taken from the adapters where they are not
    given."""

    num_lora_slots: int
    max_rank: int | None = None
    targets: tuple[str, ...] | None = None
    max_loaded: int | None = None


class Entry:
    """A loaded adapter."""

    def __init__(self, ref: AdapterRef, read_from: object) -> None:
        self.ref = ref
        self.stamp = read_from  # of its files when it was loaded
        self.num_open = 0  # open requests that use it
        self.is_unloading = False  # its name is gone
        self.is_unused = anyio.Event()  # set when it is unloading and its last request has ended


class AdapterRegistry:
    """The adapters that are loaded. `cards` is what clients may know, and always up to date."""

    def __init__(
        self,
        model: ModelConfig,
        served_name: str,
        specs: list[AdapterSpec],
        limits: LoraLimits,
        *,
        load_on_ranks: Callable[[LoadAdapter], Awaitable[None]],
        forget: Callable[[int], None],
        fail_request: Callable[[str, RequestError], None],
    ) -> None:
        """Reads the folders of `specs`. `load_on_ranks` loads an adapter on all ranks, and raises
        InvalidRequest or Unavailable; `forget` is called with the id of an adapter that no request has any
        more; `fail_request` ends a request by its id. Raises ModelError, OptionsError."""
        self.cards: dict[str, AdapterCard] = {}
        self.limits = limits
        self._served_name = served_name
        self._load_on_ranks = load_on_ranks
        self._forget_on_ranks = forget
        self._fail_request = fail_request
        self._entries: dict[str, Entry] = {}  # by name; the one that was requested last stands last
        self._users: dict[str, Entry] = {}  # by request id
        self._ids = count(1)
        self._folders: dict[int, str] = {}  # of all adapters that ranks have or are to have, by id
        self._busy: set[str] = set()  # names that are being loaded
        self._modules, self._renames = lora_modules(model), lora_renames(model)
        if not self._modules:
            raise OptionsError(
                [f"--enable-lora: adapters of {model.architecture} are not supported; leave it out"]
            )
        adapters = {spec.name: (spec, self._read(spec)) for spec in specs}
        if len(adapters) < len(specs):
            raise OptionsError(["--lora-paths gives two adapters one name; choose another"])
        ranks = [adapter.rank for _, adapter in adapters.values()]
        self._max_rank = limits.max_rank or max(ranks, default=0)
        known = {module.rpartition(".")[2] for module in self._modules}
        names = {name: lora_names(name, model) for name in {*(limits.targets or ())} - {"all", "all-linear"}}
        if unknown := sorted(name for name, modules in names.items() if not modules):
            raise OptionsError(
                [
                    f"--lora-target-modules names {', '.join(unknown)}; this model has "
                    f"{', '.join(sorted(known))}"
                ]
            )
        given = set().union(*names.values())
        used = set().union(*(adapter.targets for _, adapter in adapters.values()))
        self._targets = known if limits.targets and not given else given or used
        for spec, adapter in adapters.values():
            self._check(adapter)
            self._add(spec.name, adapter, is_pinned=spec.pinned)
        if sum(spec.pinned for spec in specs) >= limits.num_lora_slots:
            raise OptionsError(
                [
                    "--lora-paths pins so many adapters that no slot is left for others; raise "
                    "--max-loras-per-batch"
                ]
            )

    def _read(self, spec: AdapterSpec) -> Adapter:
        try:
            return read_adapter(spec.path, self._modules, self._renames)
        except ModelError as error:
            raise ModelError(f"--lora-paths {spec.name}: {error}") from None

    def setup(self) -> AdapterSetup:
        """The adapters that ranks must load when they start. Those whose files are gone or others than when
        they were loaded are dropped, and their requests fail: other ranks would die of them, or answer with
        other weights than those before."""
        for name, entry in list(self._entries.items()):
            if stamp(self._folders[entry.ref.id]) != entry.stamp:
                self._drop(name, entry)
        return AdapterSetup(
            num_lora_slots=self.limits.num_lora_slots,
            max_rank=self._max_rank,
            targets=tuple(sorted(self._targets)),
            loaded=[LoadAdapter(id, folder) for id, folder in self._folders.items()],
        )

    def _drop(self, name: str, entry: Entry) -> None:
        log.get("adapters").error(
            "the files of an adapter are gone or have changed since it was loaded; it is unloaded",
            adapter=name,
            requests=entry.num_open,
        )
        del self._entries[name], self.cards[name]
        entry.is_unloading = True
        for request_id in [key for key, used in self._users.items() if used is entry]:
            self._fail_request(
                request_id,
                Unavailable(f"the files of the adapter {name} are gone from the server; load it again"),
            )
        self._finish_unload(entry)

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    def public_names(self, ids: Iterable[int]) -> list[str]:
        """The names of those of these adapters that all tenants may use."""
        return [
            name
            for id in ids
            for name, entry in self._entries.items()
            if entry.ref.id == id and not self.cards[name].owner
        ]

    def find(self, name: str, tenant: Tenant = DEFAULT_TENANT) -> AdapterRef:
        """The adapter that has this name now. Raises InvalidRequest for a name that is unknown, or of another
        tenant's adapter."""
        cards = adapters_for(tenant, self.cards)
        if name not in cards:
            raise InvalidRequest(f"no adapter {name} is loaded; {listed(cards)}", param="lora_path")
        self._entries[name] = self._entries.pop(name)
        return self._entries[name].ref

    def opened(self, request_id: str, name: str) -> None:
        """A request uses the adapter of this name, until `ended`."""
        self._users[request_id] = entry = self._entries[name]
        entry.num_open += 1

    def ended(self, request_id: str) -> None:
        """A request has ended, with or without an adapter."""
        if (entry := self._users.pop(request_id, None)) is not None:
            entry.num_open -= 1
            self._finish_unload(entry)

    def _finish_unload(self, entry: Entry) -> None:
        if entry.is_unloading and not entry.num_open and not entry.is_unused.is_set():
            self._forget(entry.ref.id)
            entry.is_unused.set()

    # ── operators ───────────────────────────────────────────────────────────────────────────────────────────

    async def load(
        self, name: str, folder: str, *, is_pinned: bool = False, tenant: Tenant = DEFAULT_TENANT
    ) -> None:
        """Loads the adapter in `folder` for `tenant`; returns when requests may name it. Raises
        InvalidRequest for one that cannot be used, Unavailable."""
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
            raise InvalidRequest(
                "with this adapter all slots would be pinned (--max-loras-per-batch)", param="pinned"
            )
        self._busy.add(name)
        try:
            adapter = await run_sync(read_adapter, folder, self._modules, self._renames)
            self._check(adapter)
            self._make_room(tenant)
            load = LoadAdapter(next(self._ids), folder)
            self._folders[load.id] = folder
            try:
                await self._load_on_ranks(load)
            except BaseException:
                del self._folders[load.id]
                self._forget_on_ranks(load.id)  # some ranks may have loaded it
                raise
            owner = "" if tenant.sees_all else tenant.name
            self._add(name, adapter, id=load.id, is_pinned=is_pinned, owner=owner)
        except ModelError as error:
            raise InvalidRequest(str(error), param="lora_path") from None
        finally:
            self._busy.discard(name)

    async def unload(self, name: str, tenant: Tenant = DEFAULT_TENANT) -> None:
        """No new request gets the adapter; returns when those that have it have ended. Raises InvalidRequest
        for a name that is unknown, or of an adapter that is not the tenant's own."""
        own = {key: card for key, card in self.cards.items() if tenant.sees(card.owner)}
        if name not in own:
            raise InvalidRequest(f"no adapter {name} is loaded; {listed(own)}", param="lora_name")
        entry = self._entries.pop(name)
        del self.cards[name]
        entry.is_unloading = True
        self._finish_unload(entry)
        await entry.is_unused.wait()

    def _forget(self, adapter: int) -> None:
        del self._folders[adapter]
        self._forget_on_ranks(adapter)

    def _make_room(self, tenant: Tenant) -> None:
        """Unloads the tenant's adapter that was requested least recently, if --max-loaded-loras are loaded,
        or its part of them. Raises InvalidRequest when all are pinned, in use or another tenant's."""
        max_loaded = self.limits.max_loaded
        if max_loaded is None:
            return
        own = [name for name in self._entries if tenant.sees(self.cards[name].owner)]
        if len(self._entries) + len(self._busy) <= max_loaded and len(own) < tenant.most(max_loaded):
            return
        for name in own:
            entry = self._entries[name]
            if not entry.num_open and not entry.ref.is_pinned:
                del self._entries[name], self.cards[name]
                self._forget(entry.ref.id)
                return
        raise InvalidRequest(
            f"{tenant.most(max_loaded)} adapters may be loaded (--max-loaded-loras), and none that could go "
            "is unused; unload one",
            param="lora_name",
        )

    def _add(
        self, name: str, adapter: Adapter, *, id: int | None = None, is_pinned: bool, owner: str = ""
    ) -> None:
        ref = AdapterRef(next(self._ids) if id is None else id, adapter.digest, is_pinned)
        self._entries[name] = Entry(ref, adapter.stamp)
        self._folders[ref.id] = adapter.folder
        self.cards[name] = AdapterCard(name, adapter.folder, adapter.rank, int(time()), is_pinned, owner)

    def _check(self, adapter: Adapter) -> None:
        if adapter.rank > self._max_rank:
            raise ModelError(
                f"the adapter has rank {adapter.rank}, and the ranks have room for {self._max_rank}; raise "
                "--max-lora-rank"
            )
        if others := adapter.targets - self._targets:
            raise ModelError(
                f"the adapter changes {', '.join(sorted(others))}, and the ranks have room for "
                f"{', '.join(sorted(self._targets))}; give --lora-target-modules"
            )


def find_adapter(registry: AdapterRegistry | None, name: str, tenant: Tenant = DEFAULT_TENANT) -> AdapterRef:
    """The adapter of this name that exists for `tenant`; `registry` is None on a server without adapters.
    Raises InvalidRequest."""
    if registry is None:
        raise InvalidRequest(
            f"no adapter {name} is loaded: this server has none (--enable-lora, --lora-paths)",
            param="lora_path",
        )
    return registry.find(name, tenant)


def listed(cards: Mapping[str, AdapterCard]) -> str:
    """The names of loaded adapters, in words."""
    return f"loaded are {', '.join(cards)}" if cards else "none is loaded"


def adapter_specs_of(paths: tuple[str, ...] | None) -> list[AdapterSpec]:
    """Parses --lora-paths: each PATH, NAME=PATH, or JSON. Raises OptionsError."""
    return [_parse_spec(path) for path in paths or ()]


def _parse_spec(text: str) -> AdapterSpec:
    if text.lstrip().startswith("{"):
        try:
            spec = msgspec.json.decode(text, type=JsonAdapterSpec)
        except msgspec.MsgspecError as error:
            raise OptionsError(
                [f'--lora-paths: {error}; give PATH, NAME=PATH or {{"lora_name", "lora_path", "pinned"}}']
            ) from None
        name, path, pinned = spec.lora_name or spec.name, spec.lora_path or spec.path, bool(spec.pinned)
    else:
        name, is_named, path = text.partition("=")
        path, pinned = path if is_named else name, False
    if not name or not path or (":" in name and name != path):
        raise OptionsError(
            [f"--lora-paths {text}: give PATH, NAME=PATH without a colon in the name, or JSON"]
        )
    return AdapterSpec(name, str(Path(path).expanduser()), pinned)


async def no_ranks(load: LoadAdapter) -> None:
    """Loads nothing: there are no ranks yet, or never will be."""


def open_adapters(
    plan: Plan,
    model: ModelConfig,
    load_on_ranks: Callable[[LoadAdapter], Awaitable[None]] = no_ranks,
    forget: Callable[[int], None] = lambda adapter: None,
    fail_request: Callable[[str, RequestError], None] = lambda request_id, error: None,
) -> AdapterRegistry | None:
    """Reads the adapters of --lora-paths; None without --enable-lora. The functions are those of
    AdapterRegistry. Raises OptionsError, ModelError."""
    if not plan.lora.enable_lora:
        return None
    return AdapterRegistry(
        model,
        plan.api.served_model_name,
        adapter_specs_of(plan.lora.lora_paths),
        LoraLimits(
            num_lora_slots=plan.lora.max_loras_per_batch,
            max_rank=plan.lora.max_lora_rank,
            targets=plan.lora.lora_target_modules,
            max_loaded=plan.lora.max_loaded_loras,
        ),
        load_on_ranks=load_on_ranks,
        forget=forget,
        fail_request=fail_request,
    )
