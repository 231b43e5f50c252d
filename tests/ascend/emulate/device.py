"""device="npu" tensors with right numbers: a dispatch mode that computes every operator on the host, in the
device's memory.

Beneath it lies the real torch_npu: its allocator, streams, events, graphs and process groups run on the
simulated CANN libraries. An operator is computed at once; or later, in the lazy mode of queue.py; or, in a
capture of a graph, recorded and computed at each replay. What the host may not do in a capture, and what real
NPUs have no kernel for, is refused there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ascend.emulate import formats, graphs, queue
from tests.ascend.emulate.graphs import Call
from tests.ascend.emulate.memory import blank, device_like, host, is_device, leaves, mapped, meta
from tests.ascend.emulate.operators import OPERATORS
from tests.ascend.emulate.table import Limits, Refused, only_shapes

NAMESPACES = ("aten", "npu", "atb", "prims")
NATIVE = {  # torch_npu's own C++ does these in the simulated runtime
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::resize_",
    "aten::record_stream",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::lift_fresh",
    "aten::is_same_size",
    "aten::detach",
    "aten::alias",
    "npu::get_npu_format",
    "npu::npu_change_data_ptr",
    "npu::empty_with_format",
    "npu::_npu_fused_infer_attention_score_infer_output",
    "npu::_npu_fused_infer_attention_score_v2_infer_output",
}
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")
INDEXES = ("aten::index.Tensor",)  # reads values only where a mask is among its indices
HUGE = 1 << 26
KERNELS = (
    "PrivateUse1",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
# called with each operator that launches something
watchers: list[Callable[[str, tuple[Any, ...], dict[str, Any]], None]] = []
fallbacks: Counter[str] = Counter()  # operators that NPUs compute on the CPU, and how often


@dataclass(frozen=True)
class Signature:
    """What is known of an operator before it is called."""

    name: str
    namespace: str
    is_native: bool
    is_on_device: bool
    reads_values: bool  # the shapes of its results, or the host, depend on values: it waits for the device


@cache
def signature(func: Any) -> Signature:
    """What is known of an operator, cached."""
    schema = func._schema
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return Signature(
        name=name,
        namespace=schema.name.split("::")[0],
        is_native=name in NATIVE or func.is_view,
        is_on_device=name in OPERATORS or any(has(name, key) for key in KERNELS),
        reads_values=any(
            tag in func.tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        ),
    )


class HostNpu(TorchDispatchMode):
    """Computes operators on the host. A dispatch mode belongs to a thread: enter one in each thread that uses
    the device."""

    @staticmethod
    def install() -> None:
        """Once in a process, after torch_npu is imported."""
        graphs.install()
        queue.install()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        of = signature(func)
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == "npu"
        given = leaves((args, kwargs), [])
        on_device = any(is_device(leaf) for leaf in given)
        # composites come here whole: their parts come back
        if (on_device or to_device) and torch.is_inference_mode_enabled():
            with self:
                if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return found
        if (on_device or to_device) and not of.is_native:
            for watch in watchers:
                watch(of.name, args, kwargs)
        if of.namespace not in NAMESPACES or not (on_device or to_device):
            if on_device and of.namespace == "c10d":
                return collective(of.name, func, args, kwargs)
            return func(*args, **kwargs)
        if of.is_native:
            return func(*args, **kwargs)
        if of.namespace in ("npu", "atb") and of.name not in OPERATORS:
            raise NotImplementedError(f"{of.name} has no emulation")
        if of.name in formats.CASTS:
            return formats.cast(*args, **kwargs)
        if not of.is_on_device:
            fallbacks[of.name] += 1
        torch_device = (
            torch.device("npu", torch.npu.current_device())
            if to_device or (on_device and target is None)
            else None
        )
        return compute(of, func, args, kwargs, torch_device)


def collective(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a collective of torch_npu, which uses the simulated HCCL."""

    def run() -> Any:
        found = func(*args, **kwargs)
        queue.settle()
        return found

    if graphs.capturing() is None:
        return run()
    graphs.record(Call(name, run, ()))
    return func(*args, **kwargs)


def without(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    """Arguments as the host can take them."""
    given = {
        name: None if isinstance(value, torch.Generator) else value
        for name, value in kwargs.items()
        if name != "pin_memory"
    }
    return given | ({"device": torch.device(device)} if "device" in given else {})


def compute(
    of: Signature, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], torch_device: torch.device | None
) -> Any:
    """Computes an operator now, queues it, or records it in a capture."""
    kernel = OPERATORS.get(of.name, func)
    host_args, host_kwargs = mapped((args, without(kwargs, "cpu")), host)
    if of.name not in OPERATORS:
        formats.refuse(of.name, host_args)

    def run() -> Any:
        return kernel(*host_args, **host_kwargs)

    is_update = graphs.updating() is not None and "workspace" not in of.name
    is_captured = not is_update and graphs.capturing() is not None
    is_lazy = queue.is_lazy()
    if Limits.no_values and not waits(of, args, kwargs, torch_device):
        return work_out_shapes(of, func, args, kwargs, torch_device)[0]
    if not is_update and not is_captured and (not is_lazy or waits(of, args, kwargs, torch_device)):
        if is_lazy:
            queue.drain()
        return placed(run(), (args, kwargs), (host_args, host_kwargs), torch_device)[0]
    if is_captured:
        refuse_in_capture(of, args, kwargs, torch_device)
    if of.name not in COPIES:  # a launch takes the host's values with it; a copy reads them when it runs
        host_args, host_kwargs = mapped((host_args, host_kwargs), snapshots(args, kwargs))
    out, fresh = work_out_shapes(of, func, args, kwargs, torch_device)
    if is_update:
        graphs.update(of.name, run)
    elif is_captured:
        graphs.record(Call(of.name, run, fresh))
    else:
        queue.enqueue(Call(of.name, run, fresh).execute)
    return out


def snapshots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Copies host tensors, whose values a launch takes with it."""
    theirs = {
        id(leaf) for leaf in leaves((args, kwargs), []) if isinstance(leaf, Tensor) and not is_device(leaf)
    }
    return lambda mine: mine.clone() if id(mine) in theirs else mine


def copied(of: Signature, args: tuple[Any, ...]) -> tuple[Tensor | None, Tensor]:
    """Target of a copy, if it exists already, and source."""
    if of.name == "aten::_foreach_copy_":
        check_batch(*args[:2])
        return args[0][0], args[1][0]
    return (args[0], args[1]) if of.name == "aten::copy_" else (None, args[0])


def check_batch(targets: list[Tensor], sources: list[Tensor]) -> None:
    """What aclrtMemcpyBatchAsync takes of torch._foreach_copy_, which knows addresses and sizes alone
    (op-plugin, ForeachCopyKernelOpApi.cpp). Raises Refused."""
    for tensors in (targets, sources):
        if len({is_device(one) for one in tensors}) > 1 or not all(one.is_contiguous() for one in tensors):
            raise Refused("copies of a batch: contiguous tensors, all of them from the host or all to it")
    for to, source in zip(targets, sources, strict=True):
        if to.dtype != source.dtype or to.shape != source.shape or is_device(to) == is_device(source):
            raise Refused("copies of a batch: pairs of one dtype and shape, between host and device")


def is_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy has to be complete when it returns."""
    return not kwargs.get("non_blocking", len(args) > 2 and args[2])


def waits(
    of: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], torch_device: torch.device | None
) -> bool:
    """Whether the host waits for the device in this call."""
    if of.name in COPIES:
        to, source = copied(of, args)
        within = is_device(source) and (is_device(to) if to is not None else torch_device is not None)
        return not within and (is_blocking(args, kwargs) or (to is None and torch_device is None))
    return (of.reads_values and of.name not in INDEXES) or reads_mask(of, args) or not of.is_on_device


def reads_mask(of: Signature, args: tuple[Any, ...]) -> bool:
    """Whether an index operator has a mask among its indices."""
    return of.name.startswith("aten::index") and any(
        isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves(args[1], [])
    )


def placed(
    results: Any, given: Any, computed: Any, torch_device: torch.device | None, fill: bool = True
) -> tuple[Any, tuple[Tensor | None, ...]]:
    """Results on the device: those that are arguments, written in place, as the caller's own tensors, others
    as new ones. And, in the order of `leaves(results)`, the memory of the new ones."""
    own = {
        id(mine): theirs
        for mine, theirs in zip(leaves(computed, []), leaves(given, []), strict=False)
        if isinstance(mine, Tensor)
    }
    fresh: list[Tensor | None] = []

    def to_device(result: Tensor) -> Tensor:
        if id(result) in own or torch_device is None:
            fresh.append(None)
            return own.get(id(result), result)
        # in the lazy mode the memory may be that of a call that has not run: its contents stay
        made = (
            device_like(result, torch_device)
            if not fill and not queue.is_lazy()
            else torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=torch_device)
        )
        fresh.append(host(made))
        if fill and result.numel():
            fresh[-1].copy_(result)
        return made

    return mapped(results, to_device), tuple(fresh)


def work_out_shapes(
    of: Signature, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], torch_device: torch.device | None
) -> tuple[Any, tuple[Tensor | None, ...]]:
    """What an operator would return, and whether it would be refused, without the values."""
    if of.name not in OPERATORS or is_huge(args, kwargs):
        meta_args, meta_kwargs = mapped((args, without(kwargs, "meta")), meta)
        try:
            return placed(
                func(*meta_args, **meta_kwargs),
                (args, kwargs),
                (meta_args, meta_kwargs),
                torch_device,
                fill=False,
            )
        except NotImplementedError:  # it has no shape function
            pass
    blank_args, blank_kwargs = mapped((args, without(kwargs, "cpu")), blank)
    with only_shapes():
        results = OPERATORS.get(of.name, func)(*blank_args, **blank_kwargs)
    return placed(results, (args, kwargs), (blank_args, blank_kwargs), torch_device, fill=False)


def is_huge(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether tensors are too large to be zeros: shapes are then torch_npu's own, and limits are not
    checked."""
    return Limits.no_values and any(
        isinstance(leaf, Tensor) and leaf.nbytes > HUGE for leaf in leaves((args, kwargs), [])
    )


def refuse_in_capture(
    of: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], torch_device: torch.device | None
) -> None:
    """Raises Refused for what a capture must not contain."""
    if not of.is_on_device:
        raise Refused(f"{of.name} has no NPU kernel: it cannot be captured")
    if reads_mask(of, args) or (of.reads_values and of.name not in INDEXES):
        raise Refused(f"{of.name}: the host would wait for the device's values during a capture")
    if of.name not in COPIES:
        return
    to, source = copied(of, args)
    if (to is not None and not is_device(to)) or (to is None and torch_device is None):
        raise Refused(f"{of.name}: reading from the device during a capture")
    if not is_device(source) and not (source.is_pinned() and not is_blocking(args, kwargs)):
        raise Refused(f"{of.name}: a blocking copy to the device during a capture")
