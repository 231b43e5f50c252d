"""A double of the parts of Gluon and of Hopper that attention_roles.py and latent_roles.py use: functions run
in threads, one for each group of warps with a role, over tensors of torch.

It is as late as a card may be: products are computed when they are waited for, of what shared memory holds
then, and copies arrive some time after they were begun. Barriers have the phases, arrivals and bytes of PTX's
mbarrier; a wait that does not end raises. New shared memory is NaN.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

WAIT_S = 30.0
NAMES = ("gl", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait", "fence_async_shared")


@dataclass
class Pointer:
    """Elements of a tensor's memory."""

    memory: Tensor  # flat
    at: Any = 0

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)


@dataclass
class Shared:
    """Shared memory, or a barrier in it."""

    data: Tensor

    def index(self, at: int) -> "Shared":
        return Shared(self.data[int(at)])

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))


@dataclass
class Barrier:
    """mbarrier: a phase ends when `count` have arrived and all bytes that are expected."""

    count: int
    missing: int = 0
    num_bytes: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.num_bytes += num_bytes
            assert self.missing >= 0
            if self.missing == 0 and self.num_bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, WAIT_S):
                raise TimeoutError("a barrier is waited for that no one arrives on")


@dataclass
class Descriptor:
    """A descriptor of blocks of a tensor; zeros are read outside of it."""

    tensor: Tensor
    block: list[int]
    layout: object

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=torch.Size(self.block).numel() * self.tensor.itemsize)

    def read(self, at: Sequence[Any]) -> Tensor:
        found = torch.zeros(self.block, dtype=self.tensor.dtype)
        begins = [int(one) for one in at]
        sizes = zip(begins, self.block, self.tensor.shape, strict=True)
        inside = [(max(0, -begin), min(size, most - begin)) for begin, size, most in sizes]
        if all(low < high for low, high in inside):
            to = tuple(slice(low, high) for low, high in inside)
            of = tuple(
                slice(begin + low, begin + high) for begin, (low, high) in zip(begins, inside, strict=True)
            )
            found[to] = self.tensor[of]
        return found


def _both(function: Callable[[Tensor, Tensor], Tensor], left: Any, right: Any) -> Tensor:
    return function(torch.as_tensor(left), torch.as_tensor(right))


def _load(pointer: Pointer, mask: Any = True, other: float = 0) -> Tensor:
    at, is_read = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
    found = pointer.memory[torch.where(is_read, at, 0).long()]
    return torch.where(is_read, found, torch.as_tensor(other, dtype=found.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    at, is_written = torch.broadcast_tensors(pointer.at, mask)
    pointer.memory[at[is_written].long()] = value[is_written]


def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype))


def _multiply(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Any:
    """`acc`: a tensor, or a product that was started before."""
    assert is_async
    left = a.data if isinstance(a, Shared) else a
    added = acc if callable(acc) else lambda: acc
    return lambda: left.float() @ b.data.float() + (added() if use_acc else 0)


def _wait(outstanding: int, started: list[Callable[[], Tensor]]) -> Tensor:
    (one,) = started
    time.sleep(random.random() / 1000)
    return one()


def _side_by_side(roles: list[tuple[Callable[..., None], tuple]], warps: list[int], regs: list[int]) -> None:
    """Runs every role in a thread."""
    assert len(roles) == len(warps) + 1 == len(regs) + 1
    errors: list[BaseException] = []

    def run(function: Callable[..., None], args: tuple) -> None:
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=role) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Double:
    """In place of a kernel: runs its programs one after the other."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.barriers: dict[int, Barrier] = {}
        self.program: tuple[int, ...] = (0,)
        self.grid: tuple[int, ...] = (0,)
        module = kernel.fn.__globals__
        doubles = dict(zip(NAMES, self._language(), strict=True))
        self.names = {name: getattr(value, "value", value) for name, value in module.items()} | doubles
        for name, value in module.items():
            if isinstance(value, JITFunction):
                self.names[name] = FunctionType(value.fn.__code__, self.names, name, value.fn.__defaults__)
        self.kernel = self.names[kernel.fn.__name__]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._run, grid)

    def _run(self, grid: tuple[int, ...], *args: Any, num_warps: int, **constants: int) -> None:
        assert num_warps == 4
        given, self.grid = [self._argument(arg) for arg in args], grid
        for program in product(*map(range, grid)):
            self.program, self.barriers = program, {}
            self.kernel(*given, **constants)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, TensorDescriptor):
            return Descriptor(arg.base, arg.block_shape, arg.layout)
        if isinstance(arg, Tensor):
            size = arg.untyped_storage().nbytes() // arg.itemsize - arg.storage_offset()
            return Pointer(arg.as_strided((size,), (1,)))
        return torch.as_tensor(arg)

    def _init(self, barrier: Shared, count: int) -> None:
        self.barriers[barrier.data.data_ptr()] = Barrier(count, count)

    def _of(self, barrier: Shared) -> Barrier:
        return self.barriers[barrier.data.data_ptr()]

    def _copy(self, descriptor: Descriptor, at: list[Any], barrier: Shared, to: Shared) -> None:
        def arrive() -> None:
            to.data.copy_(descriptor.read(at))
            self._of(barrier).add(0, -descriptor.block_type.nbytes)

        threading.Timer(random.random() / 1000, arrive).start()

    def _language(self) -> tuple[Any, ...]:
        """What NAMES are in the kernel."""
        nothing = lambda *args, **options: None  # noqa: E731
        names = ("SliceLayout", "BlockedLayout", "DotOperandLayout", "SwizzledSharedLayout")
        layouts = {name: nothing for name in names}
        gl = SimpleNamespace(
            **layouts,
            NVMMADistributedLayout=nothing,
            NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
            int64=torch.int64,
            float32=torch.float32,
            bfloat16=torch.bfloat16,
            program_id=lambda axis: torch.tensor(self.program[axis]),
            num_programs=lambda axis: self.grid[axis],
            arange=lambda begin, end, layout: torch.arange(begin, end),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            convert_layout=lambda x, layout: x,
            static_range=range,
            load=_load,
            store=_store,
            maximum=partial(_both, torch.maximum),
            minimum=partial(_both, torch.minimum),
            where=lambda condition, left, right: torch.where(torch.as_tensor(condition), left, right),
            exp2=torch.exp2,
            log2=torch.log2,
            max=torch.amax,
            sum=torch.sum,
            allocate_shared_memory=_allocate,
            warp_specialize=_side_by_side,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=nothing,
            init=lambda barrier, count: self._init(barrier, count),
            wait=lambda barrier, parity: self._of(barrier).wait(parity),
            expect=lambda barrier, num_bytes: self._of(barrier).add(1, num_bytes),
            arrive=lambda barrier, count: self._of(barrier).add(count, 0),
        )
        tma = SimpleNamespace(async_copy_global_to_shared=self._copy)
        return gl, mbarrier, tma, _multiply, _wait, nothing
