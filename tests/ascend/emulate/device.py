"""device="npu" tensors with right numbers: a dispatch mode that computes every operator on the host, in the device's memory.

Beneath it lies the real torch_npu: its allocator, streams, events, graphs and process groups run on the simulated CANN libraries. An
operator is computed at once, or, in a capture of a graph, recorded and computed at each replay. What the host may not do in a capture,
and what real NPUs have no kernel for, is refused there.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import tests.ascend.emulate
from tests.ascend.emulate import graphs
from tests.ascend.emulate.graphs import Call
from tests.ascend.emulate.memory import blank, device_like, host, is_device, meta
from tests.ascend.emulate.table import OPERATORS, Refused, only_shapes

assert tests.ascend.emulate  # importing it fills the table

NAMESPACES = ("aten", "npu", "atb", "prims")
NATIVE = {  # torch_npu's own C++ does these in the simulated runtime
    "aten::empty.memory_format", "aten::empty_strided", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
    "aten::resize_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::lift_fresh", "aten::is_same_size",
    "aten::detach", "aten::alias", "npu::get_npu_format", "npu::npu_change_data_ptr", "npu::_npu_fused_infer_attention_score_infer_output",
    "npu::_npu_fused_infer_attention_score_v2_infer_output"}
KERNELS = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
fallbacks: Counter[str] = Counter()  # operators that NPUs compute on the CPU, and how often


@dataclass(frozen=True)
class Signature:
    """What an operator's schema says."""

    name: str
    namespace: str
    schema: Any
    is_native: bool
    is_on_device: bool
    reads_values: bool  # the shapes of its results, or the host, depend on values: it waits for the device
    written: tuple[tuple[int, str], ...]  # positions and names of arguments that it writes


@cache
def signature(func: Any) -> Signature:
    schema = func._schema
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    written = tuple((index, argument.name) for index, argument in enumerate(schema.arguments)
                    if argument.alias_info is not None and argument.alias_info.is_write or argument.name == "out")
    return Signature(
        name=name, namespace=schema.name.split("::")[0], schema=schema,
        is_native=name in NATIVE or func.is_view,
        is_on_device=name in OPERATORS or any(has(name, key) for key in KERNELS),
        reads_values=any(tag in func.tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)),
        written=written)


def written(of: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for index, name in of.written:
        value = args[index] if index < len(args) else kwargs.get(name)
        found += [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)]
    return found


class HostNpu(TorchDispatchMode):
    """A mode is a thread's: enter one in each thread that uses the device."""

    @staticmethod
    def install() -> None:
        """Once in a process, after torch_npu is imported."""
        graphs.install()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        of = signature(func)
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == "npu"
        on_device = any(is_device(leaf) for leaf in tree_flatten((args, kwargs))[0])
        if of.namespace not in NAMESPACES or not (on_device or to_device):
            if on_device and of.namespace == "c10d" and graphs.capturing() is not None:
                graphs.record(Call(of.name, lambda: func(*args, **kwargs), ()))
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # composites come here whole then: their parts come back to this mode
            with self:
                if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return found
        if of.is_native:
            return func(*args, **kwargs)
        if of.namespace in ("npu", "atb") and of.name not in OPERATORS:
            raise NotImplementedError(f"{of.name} has no emulation")
        if not of.is_on_device:
            fallbacks[of.name] += 1
        place = torch.device("npu", torch.npu.current_device()) if to_device or (on_device and target is None) else None
        return compute(of, func, args, kwargs, place)


def compute(of: Signature, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device | None) -> Any:
    kernel = OPERATORS.get(of.name, func)
    device = {"device": torch.device("cpu")} if "device" in kwargs else {}
    given = {name: None if isinstance(value, torch.Generator) else value for name, value in kwargs.items() if name != "pin_memory"}
    host_args, host_kwargs = tree_map_only(Tensor, host, (args, given))

    def run() -> Any:
        return kernel(*host_args, **{**host_kwargs, **device})

    if graphs.updating() is not None and "workspace" not in of.name:
        graphs.update(of.name, run)
        return aliases(of, args, kwargs)
    if graphs.capturing() is None:
        return place_results(of, run(), args, kwargs, place)
    refuse_in_capture(of, args, kwargs, place)
    shapes = work_out_shapes(of, func, args, given)
    out = aliases(of, args, kwargs) if of.written else tree_map_only(Tensor, lambda made: device_like(made, place), shapes)
    fresh = () if of.written else tuple(host(leaf) if is_device(leaf) else None for leaf in tree_flatten(out)[0])
    graphs.record(Call(of.name, run, fresh))
    return out


def aliases(of: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator that writes its arguments returns."""
    found = written(of, args, kwargs)
    count = len(of.schema.returns)
    return None if count == 0 else found[0] if count == 1 else tuple(found[:count])


def place_results(of: Signature, results: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device | None) -> Any:
    if of.written:
        return aliases(of, args, kwargs)
    if not of.schema.returns:
        return None

    def to_device(result: Tensor) -> Tensor:
        if place is None:
            return result
        made = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=place)
        if result.numel():
            host(made).copy_(result)
        return made
    return tree_map_only(Tensor, to_device, results)


def work_out_shapes(of: Signature, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator would return, and whether it would be refused, without the values."""
    if of.name not in OPERATORS:
        device = {"device": torch.device("meta")} if "device" in kwargs else {}
        meta_args, meta_kwargs = tree_map_only(Tensor, meta, (args, kwargs))
        try:
            return func(*meta_args, **{**meta_kwargs, **device})
        except NotImplementedError:  # no shape function
            pass
    device = {"device": torch.device("cpu")} if "device" in kwargs else {}
    blank_args, blank_kwargs = tree_map_only(Tensor, blank, (args, kwargs))
    with only_shapes():
        return OPERATORS.get(of.name, func)(*blank_args, **{**blank_kwargs, **device})


def refuse_in_capture(of: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device | None) -> None:
    if not of.is_on_device:
        raise Refused(f"{of.name} has no NPU kernel: it cannot be captured")
    masks = of.name.startswith("aten::index") and any(
        isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_flatten(args[1])[0])
    if masks or (of.reads_values and of.name != "aten::index.Tensor"):
        raise Refused(f"{of.name}: the host would wait for the device's values during a capture")
    if of.name == "aten::copy_":
        to, source = args[0], args[1]
    elif of.name == "aten::_to_copy":
        to, source = None, args[0]
    else:
        return
    if (to is not None and not is_device(to)) or (to is None and place is None):
        raise Refused(f"{of.name}: reading from the device during a capture")
    if not is_device(source) and not (source.is_pinned() and kwargs.get("non_blocking", len(args) > 2 and args[2])):
        raise Refused(f"{of.name}: a blocking copy to the device during a capture")
