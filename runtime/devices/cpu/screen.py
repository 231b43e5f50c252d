"""Screens of heads (kernels/screen.h): copies in fewer bits, by which greedy tokens are found without reading
all of the head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime import log
from runtime.devices.base import Memory
from runtime.devices.cpu.matrices import INPUT_GROUP, Form, Kind, Matrix, Threads, matrix_of, packed_bytes
from runtime.devices.cpu.program import Buffer, Program

Pass = int  # screen::Pass*, which lives as long as its program
ROUGH = Kind.Q5_0  # of a screen
KINDS = (Kind.FLOAT32, Kind.FLOAT16, Kind.BFLOAT16)  # of heads that have enough more bits
LEAST_BYTES = 64 << 20  # of a head: smaller ones are read from caches in part, or are a small part of a step
SHARE = 2  # memory that is spare, over what a screen takes of it
MOST_ROWS = 4  # screen::MOST_ROWS
PART_WEIGHTS = 1 << 22  # of the head, of which one step makes the screen: some 20 ms of one thread


@dataclass(frozen=True, slots=True, eq=False)
class Screen:
    """A head's copy in fewer bits, and how far it is from the head."""

    rough: Matrix
    bounds: Tensor  # float32 [2, outputs padded to whole blocks]: errors and lengths of screen::Screen
    longest: float  # of the lengths that are finite

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return self.rough.num_bytes + self.bounds.nbytes


def can_screen(head: Matrix) -> bool:
    """Whether a screen of this head would have fewer bytes, and enough of them for that to count."""
    is_known = head.kind in KINDS and not head.parts and head.inputs % INPUT_GROUP == 0
    return is_known and head.num_bytes >= LEAST_BYTES


class ScreenMaker:
    """A screen that is made in parts, for a head for which `can_screen` holds, of whatever size."""

    def __init__(self, threads: Threads, head: Matrix) -> None:
        """Raises OSError where there is no memory."""
        self.threads, self.head = threads, head
        form = _form(head)
        self.rough = matrix_of(
            threads.library, form, threads.memory.take(packed_bytes(threads.library, form))
        )
        self.num_blocks = -(-head.outputs // threads.library.outputs)
        self.bounds = torch.empty(2, self.num_blocks * threads.library.outputs)
        self.num_made = 0  # blocks

    def advance(self, num_weights: int) -> Screen | None:
        """Makes the part of about so many weights. -> the screen, when it is complete"""
        block = self.threads.library.outputs * self.head.inputs
        first, end = self.num_made, min(self.num_made + max(num_weights // block, 1), self.num_blocks)
        self.threads.functions.kernels_screen(
            self.threads.handle, self.head.handle, self.rough.handle, self.bounds.data_ptr(), first, end
        )
        self.num_made = end
        if end < self.num_blocks:
            return None
        lengths = self.bounds[1]
        return Screen(self.rough, self.bounds, lengths.where(lengths.isfinite(), 0.0).max().item())


def add_head(program: Program, source: Buffer, norm: Tensor, eps: float, head: Matrix) -> Pass:
    """Program.head for a head that may get a screen."""
    program.kept.append(head)
    functions, inputs = program.functions, program.buffer_for(head)
    rough = functions.program_pair_buffer(program.handle, head.inputs, functions.kernels_input_form(ROUGH), 1)
    address = program.keep(norm)
    return functions.program_screened_head(program.handle, source, address, eps, inputs, head.handle, rough)


def set_screen(program: Program, found: Pass, screen: Screen) -> None:
    """Gives a head of the program its screen, between steps."""
    program.kept.append(screen)
    bounds = screen.bounds.data_ptr()
    program.functions.program_set_screen(found, screen.rough.handle, bounds, screen.longest)


class LateScreen:
    """The screen of a program's head, made in parts by the first steps that want it: where all is sampled at
    random there is none, and no step takes much longer for it."""

    def __init__(self, program: Program, found: Pass, head: Matrix, memory: Memory, cache_bytes: int) -> None:
        """`can_screen(head)`; `found`: of `add_head`. `cache_bytes`: of keys and values, which may not have
        taken their memory yet."""
        self.program, self.found, self.head, self.memory = program, found, head, memory
        self.cache_bytes = cache_bytes
        self.is_decided = False  # there is one, or there will be none
        self.maker: ScreenMaker | None = None
        self.log = log.get("screen")

    def want(self, num_rows: int) -> None:
        """A step with so many rows that are sampled, all of them greedy, would have one: makes a part of it,
        where there is memory to spare for it."""
        if self.is_decided or num_rows > MOST_ROWS:
            return
        maker = self.maker or self._begin()
        if maker is None:
            self.is_decided = True
            return
        self.maker = maker
        if (screen := maker.advance(PART_WEIGHTS)) is not None:
            set_screen(self.program, self.found, screen)
            self.is_decided, self.maker = True, None
            self.log.info("greedy tokens have a screen of the head", bytes=screen.num_bytes)

    def _begin(self) -> ScreenMaker | None:
        threads = self.program.threads
        spare = self.memory.free_host_bytes(self.cache_bytes)
        if packed_bytes(threads.library, _form(self.head)) * SHARE > spare:
            self.log.info("greedy tokens have no screen of the head: no memory to spare", spare=spare)
            return None
        try:
            return ScreenMaker(threads, self.head)
        except OSError as error:
            self.log.warning("greedy tokens have no screen of the head", why=str(error))
            return None


def _form(head: Matrix) -> Form:
    return Form(ROUGH, head.outputs, head.inputs)
