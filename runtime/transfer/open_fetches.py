"""The halves of a replica, put together from the options."""

from collections.abc import Callable
from pathlib import Path

from anyio import to_thread

from runtime.devices.host_memory import HostPages
from runtime.errors import LinkError, StartError
from runtime.models.config.model_config import ModelConfig
from runtime.options.plan import Plan
from runtime.scheduling.scheduler import Scheduler
from runtime.storage.identity import identity, model_facts, weight_samples
from runtime.transfer.fetches import PageFetches
from runtime.transfer.halves import Halves
from runtime.transfer.layout import RankPages
from runtime.transfer.transports import FAKE


async def open_fetches(
    plan: Plan,
    model: ModelConfig,
    scheduler: Scheduler,
    ranks: list[HostPages],
    states: list[HostPages],
    fds: tuple[list[int], list[int]],
    halves: Halves,
    wake: Callable[[], None],
) -> PageFetches:
    """What fetches and offers pages of a replica, over the host memory of its ranks; `states`: that of states
    of recurrent layers, empty where there are none; `fds`: descriptors of both, which stay open. Raises
    StartError where the memory can't be offered."""
    own = await to_thread.run_sync(transfer_identity, plan, model)
    halves.service.identity = own
    pages = RankPages(
        ranks,
        states,
        plan.memory.page_size,
        plan.parallel.pipeline_parallel_size,
        num_heads=1 if model.mla is not None else model.num_kv_heads,
        fds=fds[0],
        state_fds=fds[1] if states else [],
    )
    if halves.transport is not None:
        try:
            await to_thread.run_sync(halves.transport.add, pages)
        except LinkError as error:
            raise StartError(f"--disaggregation-transfer-backend {halves.transport.name}: {error}") from None
    return PageFetches(
        scheduler,
        pages,
        halves.rooms,
        least_tokens=plan.disaggregation.disaggregation_local_prompt_tokens,
        is_fake=plan.disaggregation.disaggregation_transfer_backend == FAKE,
        fakes_all=plan.disaggregation.disaggregation_decode_enable_fake_auto,
        identity=own,
        key=halves.link_key,
        transport=halves.transport,
        vocab_size=model.vocab_size,
        wake=wake,
    )


def transfer_identity(plan: Plan, model: ModelConfig) -> bytes:
    """Whose pages these are, but for how ranks divide them."""
    is_dummy = plan.model.load_format == "dummy"
    return identity(
        model=model_facts(model),
        weights=["dummy", plan.schedule.random_seed]
        if is_dummy
        else weight_samples(Path(plan.model.model_path)),
        device=plan.parallel.device,
        dtype=plan.precision.dtype,
        kv_dtype=plan.precision.kv_cache_dtype,
        attention=plan.kernels.attention_backend,
        **page_form(plan, model),
    )


def page_form(plan: Plan, model: ModelConfig) -> dict[str, int]:
    """What pages have besides their dtype that both servers must have alike. In NZ the numbers of a head, not
    those of a token, lie together: pages of other ranks' heads cannot be divided anew."""
    if not plan.ascend.npu_nz_cache:
        return {}
    return {"nz": 1 if model.mla is not None else plan.parallel.attention_layout.num_head_ranks}
