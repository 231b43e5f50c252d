"""Loaded adapters and their owners, without ranks."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.admin.adapter_registry import AdapterRegistry, AdapterSpec, LoraLimits, no_ranks
from runtime.errors import InvalidRequest, RequestError
from runtime.messages.tenants import ADMINISTRATOR, Tenant
from runtime.models.config.model_config import read_config
from tests.models.make import make_checkpoint
from tests.models.make_adapter import make_adapter

pytestmark = pytest.mark.anyio

ALICE, BOB = (Tenant(name, sees_all=False, quota=0.5) for name in ("alice", "bob"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model and an adapter of it."""
    base = make_checkpoint("llama", tmp_path_factory.mktemp("base"))
    return str(base), str(make_adapter(base, tmp_path_factory.mktemp("adapter"), seed=0, rank=4))


@pytest.fixture
def registry(folders: tuple[str, str]) -> Callable[[int | None], AdapterRegistry]:
    def make(max_loaded: int | None) -> AdapterRegistry:
        return AdapterRegistry(
            read_config(folders[0]),
            "model",
            [AdapterSpec("shared", folders[1])],
            LoraLimits(num_lora_slots=8, max_loaded=max_loaded),
            load_on_ranks=no_ranks,
            forget=lambda adapter: None,
            fail_request=lambda request_id, error: None,
        )

    return make


async def test_an_adapter_exists_for_its_owner_only(
    registry: Callable[[int | None], AdapterRegistry], folders: tuple[str, str]
) -> None:
    adapters = registry(None)
    await adapters.load("a", folders[1], tenant=ALICE)
    await adapters.load("all", folders[1], tenant=ADMINISTRATOR)
    assert [card.owner for card in adapters.cards.values()] == ["", "alice", ""]
    ids = [adapters.find(name, ADMINISTRATOR).id for name in ("all", "a", "shared")]
    assert adapters.public_names(ids) == ["all", "shared"]  # for metrics, which everyone may read
    for tenant, names in ((ALICE, "shared a all"), (BOB, "shared all"), (ADMINISTRATOR, "shared a all")):
        for name in ("shared", "a", "all"):
            if name in names.split():
                assert adapters.find(name, tenant).id
            else:
                with pytest.raises(
                    InvalidRequest, match=f"no adapter {name} is loaded; loaded are shared, all"
                ):
                    adapters.find(name, tenant)
    for name in ("a", "shared", "all"):
        with pytest.raises(InvalidRequest, match="none is loaded"):
            await adapters.unload(name, BOB)
    await adapters.unload("a", ALICE)
    await adapters.unload("shared", ADMINISTRATOR)
    assert list(adapters.cards) == ["all"]


async def test_a_tenant_that_loads_many_unloads_its_own(
    registry: Callable[[int | None], AdapterRegistry], folders: tuple[str, str]
) -> None:
    adapters = registry(4)
    for name in ("b1", "b2", "b3"):  # two are its part
        await adapters.load(name, folders[1], tenant=BOB)
    assert list(adapters.cards) == ["shared", "b2", "b3"]
    await adapters.load("a1", folders[1], tenant=ALICE)
    await adapters.load("a2", folders[1], tenant=ALICE)  # four are loaded: one of its own goes
    assert list(adapters.cards) == ["shared", "b2", "b3", "a2"]
    carol = Tenant("carol", sees_all=False)
    with pytest.raises(InvalidRequest, match="none that could go"):
        await adapters.load("c", folders[1], tenant=carol)
    assert list(adapters.cards) == ["shared", "b2", "b3", "a2"]


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_an_adapter_whose_files_are_gone_is_dropped_when_ranks_start(
    how: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    """Its requests fail, and everything else goes on."""
    folder = Path(shutil.copytree(folders[1], tmp_path / "gone"))
    failed: list[tuple[str, str]] = []
    forgotten: list[int] = []

    def fail(request_id: str, error: RequestError) -> None:
        failed.append((request_id, str(error)))
        adapters.ended(request_id)

    adapters = AdapterRegistry(
        read_config(folders[0]),
        "model",
        [AdapterSpec("shared", folders[1]), AdapterSpec("gone", str(folder))],
        LoraLimits(num_lora_slots=8),
        load_on_ranks=no_ranks,
        forget=forgotten.append,
        fail_request=fail,
    )
    assert len(adapters.setup().loaded) == 2
    adapters.opened("mine", "gone")
    adapters.opened("other", "shared")
    if how == "removed":
        shutil.rmtree(folder)
    else:
        weights = folder / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes() + b" ")
    assert [load.folder for load in adapters.setup().loaded] == [folders[1]]
    assert failed == [("mine", "the files of the adapter gone are gone from the server; load it again")]
    assert len(forgotten) == 1 and list(adapters.cards) == ["shared"]
