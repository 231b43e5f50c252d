"""Greedy tokens by a screen of the head: the same as by all of it, to the bit of their logits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cpu import screen as screens
from runtime.devices.cpu.kernels import library
from runtime.devices.cpu.kernels.levels import Level, supported_levels
from runtime.devices.cpu.kernels.library import Step
from runtime.devices.cpu.matrices import Kind, Matrix, Threads, pack
from runtime.devices.cpu.memory import CpuMemory
from runtime.devices.cpu.program import Program
from runtime.devices.cpu.sampling import CpuLogitsOps
from runtime.devices.cpu.screen import Pass, Screen, ScreenMaker, add_head, set_screen
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint

BUILT = [level for level in supported_levels() if level.path.is_file()]
VOCAB, WIDTH = 5003, 96  # no whole number of blocks, nor of 64 inputs
INF, NAN = math.inf, math.nan
KINDS = ["bfloat16", "float16", "float32"]
PAUSE = 16  # screen::FIRST_PAUSE


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def threads(request: pytest.FixtureRequest) -> Threads:
    level: Level = request.param
    return Threads(library.Library(level), 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(threads: Threads, weight: Tensor, kind: str) -> Matrix:
    return pack(threads, weight.to(getattr(torch, kind)))


def make_screen(threads: Threads, head: Matrix, num_weights: int = 1 << 30) -> Screen:
    maker = ScreenMaker(threads, head)
    while (screen := maker.advance(num_weights)) is None:
        pass
    return screen


class Heads:
    """A head as it is and one with a screen, both behind rows of hidden states."""

    def __init__(self, threads: Threads, weight: Tensor, kind: str, hidden: Tensor) -> None:
        self.matrix = packed(threads, weight, kind)
        self.screen = make_screen(threads, self.matrix)
        self.width, self.vocab = hidden.shape[1], len(weight)
        self.functions, self.ops = threads.functions, CpuLogitsOps(threads)
        self.found: Pass = 0
        self.plain, self.screened = (self.program(threads, hidden, has_screen=has) for has in (False, True))

    def program(self, threads: Threads, hidden: Tensor, *, has_screen: bool) -> Program:
        program, norm = Program(threads), torch.ones(self.width)
        x = program.buffer(self.width)
        program.embed(hidden, 1.0, x)
        program.output(x)
        if has_screen:
            self.found = add_head(program, x, norm, 1e-6, self.matrix)
            set_screen(program, self.found, self.screen)
        else:
            program.head(x, norm, 1e-6, self.matrix)
        return program

    def logits(self, program: Program, rows: list[int], *, largest_only: bool = True) -> Tensor:
        ids, places = torch.tensor(rows), torch.arange(len(rows))
        hidden = torch.empty(len(rows), self.width)
        logits = torch.full((len(rows), -(-self.vocab // 64) * 64), NAN)
        step = Step(
            num_tokens=len(rows),
            token_ids=ids.data_ptr(),
            output=hidden.data_ptr(),
            num_samples=len(rows),
            sample_places=places.data_ptr(),
            logits=logits.data_ptr(),
            largest_only=largest_only,
        )
        program.run(step)
        return logits[:, : self.vocab]

    def compare(self, rows: list[int]) -> int:
        """Checks a step. -> the blocks of the head that were computed, -1: all, without a screen."""
        wanted, found = self.logits(self.plain, rows), self.logits(self.screened, rows)
        blocks = int(self.functions.program_screened_blocks(self.found))
        tokens = self.ops.choose(wanted, None)
        assert self.ops.choose(found, None).tolist() == tokens.tolist()
        at = torch.arange(len(rows)), tokens
        assert torch.equal(found[at].view(torch.int32), wanted[at].view(torch.int32))
        largest = wanted == wanted[at].unsqueeze(1)
        assert torch.equal(found[largest], wanted[largest])
        return blocks


def ties(weight: Tensor) -> None:
    weight[[4, 17, 900, 2500, 5002]] = weight[900].clone() * 3


def odd_rows(weight: Tensor) -> None:
    weight[7], weight[11], weight[3000] = 1e4, -1e4, 0.0
    weight[33, 5], weight[4000, 0], weight[4100, 1] = NAN, INF, -INF


def mixed_scales(weight: Tensor) -> None:
    weight *= 10.0 ** torch.arange(VOCAB).remainder(9).sub(6).unsqueeze(1)
    weight[:, ::7] *= 100


WEIGHTS = {
    "random": lambda weight: None,
    "ties": ties,
    "all equal": lambda weight: weight.copy_(weight[0].clone()),
    "zeros": lambda weight: weight.zero_(),
    "large": lambda weight: weight.mul_(1e35),
    "tiny": lambda weight: weight.mul_(1e-36),
    "mixed scales": mixed_scales,
    "odd rows": odd_rows,
}


def hidden_states(weight: Tensor) -> Tensor:
    """Rows at random, towards tokens, and such as no model should give. Behind the norm all that are finite
    have a length of sqrt(WIDTH)."""
    rows = random(16, WIDTH, seed=1)
    towards = weight[[4, 900, 2500, 5002]].nan_to_num(0, 0, 0)
    rows[4:8] = towards / towards.abs().amax(1, keepdim=True).clamp(min=1e-30) * 4 + rows[4:8] / 4
    rows[8], rows[9], rows[10, 3], rows[11, 3], rows[12, 3] = 0.0, 1.0, NAN, INF, -INF
    rows[13] *= 1e-6
    rows[14, 1:] = 0.0
    rows[15, 0] = 1e6
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", WEIGHTS)
def test_tokens_are_those_of_the_whole_head(threads: Threads, of: str, kind: str) -> None:
    weight = random(VOCAB, WIDTH)
    WEIGHTS[of](weight)
    if kind == "float16":
        weight.clamp_(-60000, 60000)
    heads = Heads(threads, weight, kind, hidden_states(weight))
    for row in range(16):
        heads.compare([row])
    for rows in ([0, 1], [2, 10], [5, 4, 6], [15, 8, 3, 11], [0, 1, 2, 3, 4]):
        heads.compare(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_screen_leaves_few_blocks(threads: Threads, kind: str) -> None:
    """Rows that are near a token's weights, as those of a model that is sure are."""
    weight = random(VOCAB, WIDTH)
    heads = Heads(threads, weight, kind, weight[::50] + random(101, WIDTH, seed=2))
    most = -(-VOCAB // threads.library.outputs) // 20
    assert all(0 < heads.compare([row]) <= most for row in range(40))
    assert 0 < heads.compare([40, 41]) <= 2 * most
    assert heads.compare([0, 1, 2, 3, 4]) == -1, "too many rows"
    heads.logits(heads.screened, [0], largest_only=False)
    assert heads.functions.program_screened_blocks(heads.found) == -1
    plain = heads.logits(heads.plain, [0])
    assert torch.equal(heads.logits(heads.screened, [0], largest_only=False), plain)


def test_a_screen_pauses_where_it_leaves_too_much(threads: Threads) -> None:
    """For longer each time that it was in vain, and not once it was not."""
    weight = random(VOCAB, WIDTH)
    weight[1:] = weight[0] + random(VOCAB - 1, WIDTH, seed=1) / 1e3
    weight[9] = -weight[0]
    heads = Heads(threads, weight, "bfloat16", torch.stack((weight[0], weight[9])))
    total = -(-VOCAB // threads.library.outputs)
    steps = [heads.compare([0]) for _ in range(2 * PAUSE + PAUSE + 4)]
    assert steps[0] > total // 2 and steps[1 : PAUSE + 1] == [-1] * PAUSE
    assert steps[PAUSE + 1] == steps[0] and steps[PAUSE + 2 : 3 * PAUSE + 2] == [-1] * 2 * PAUSE
    assert steps[3 * PAUSE + 2] == steps[0] and steps[-1] == -1
    assert [block for _ in range(4 * PAUSE) if (block := heads.compare([1])) > 0][0] <= total // 20
    assert heads.compare([1]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_and_are_near(threads: Threads, kind: str) -> None:
    weight = random(VOCAB, WIDTH) * 10.0 ** torch.arange(VOCAB).remainder(5).sub(2).unsqueeze(1)
    matrix = packed(threads, weight, kind)
    screen, every = make_screen(threads, matrix), torch.arange(VOCAB)
    exact, rough = matrix.rows(every).double(), screen.rough.rows(every).double()
    errors, lengths = screen.bounds[:, :VOCAB].double()
    for bound, wanted in ((errors, (exact - rough).norm(dim=1)), (lengths, exact.norm(dim=1))):
        assert (bound >= wanted).all() and (bound <= wanted * 1.0001 + 1e-17).all()
    assert (errors < 0.08 * lengths).all() and screen.longest == lengths.max()


def test_parts_make_the_same_as_the_whole(threads: Threads) -> None:
    matrix, every = packed(threads, random(VOCAB, WIDTH), "bfloat16"), torch.arange(VOCAB)
    whole = make_screen(threads, matrix)
    for size in (1, 40 * WIDTH, 1000 * WIDTH):
        parts = make_screen(threads, matrix, size)
        assert torch.equal(parts.rough.rows(every), whole.rough.rows(every))
        assert (
            torch.equal(parts.bounds[:, :VOCAB], whole.bounds[:, :VOCAB]) and parts.longest == whole.longest
        )


@pytest.mark.parametrize("kind", KINDS)
def test_no_logit_is_above_its_bound(threads: Threads, kind: str) -> None:
    """Hidden states along the error of an output, where its bound is tight, and against it."""
    weight, every = random(VOCAB, WIDTH), torch.arange(VOCAB)
    first = Heads(threads, weight, kind, weight[:1])
    error = first.matrix.rows(every) - first.screen.rough.rows(every)
    hidden = torch.cat((error[:300:3], -error[1:300:3]))
    heads = Heads(threads, weight, kind, hidden)
    screened = 0
    for row in range(len(hidden)):
        screened += heads.compare([row]) > 0
        assert (heads.logits(heads.screened, [row]) >= heads.logits(heads.plain, [row])).all()
    assert screened > 3


def generated(folder: Path, **options: Any) -> tuple[list[list[int]], Any]:
    """Tokens of a sequence alone, of two with others beside them, and the screen of the rank."""
    executor, ready = start(folder, num_threads=2, **options)
    planner = Planner(executor, ready, page_size=4)
    rows = [Row(0, [5, 9, 200, 31], sampling(), [], prompt_len=4)]
    planner.known_pages |= dict.fromkeys(range(5), 0)
    planner.generate(rows[0], 24)
    biased = sampling(bias_ids=[7, 8], bias_values=[5.0, 6.0])
    asked = [sampling(), sampling(temperature=1.0, seed=3), sampling(top_logprobs=2), biased]
    for slot, params in enumerate(asked, 1):
        rows.append(Row(slot, [slot, 40, 41, 42], params, [], prompt_len=4))
        planner.generate(rows[-1], 4)
    for first in range(1, 4):
        for _ in range(4):
            planner.run(rows[first : first + 2], [])
    tokens = [row.tokens[row.prompt_len :] for row in rows]
    return tokens, executor.runner.forward.program.screen  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [level.name for level in BUILT])
def test_a_model_says_the_same(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_CPU_KERNELS", level)
    folder = make_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=192)
    wanted, none = generated(folder, dtype="bfloat16")
    assert none is None, "such a small head has no screen"
    used = list[int]()
    monkeypatch.setattr(screens, "LEAST_BYTES", 0)
    monkeypatch.setattr(screens, "PART_WEIGHTS", 128 * 256)
    run = Program.run

    def noted(self: Program, step: Step, first: int = 0, end: int | None = None) -> None:
        used.append(step.largest_only)
        run(self, step, first, end)

    monkeypatch.setattr(Program, "run", noted)
    found, screen = generated(folder, dtype="bfloat16")
    assert found == wanted and screen.is_decided
    # the first two sequences, and each step with another beside a row at random, log probabilities or biases
    assert sum(used) == 24 + 4 and len(used) == 24 + 4 * 4 + 3 * 4


def test_where_memory_is_scarce_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "LEAST_BYTES", 0)
    folder = make_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=192)
    wanted, _ = generated(folder)
    monkeypatch.setattr(CpuMemory, "free_host_bytes", lambda self, cache_bytes: 0)

    def refused(*_: Any) -> None:
        raise AssertionError("a screen was made")

    monkeypatch.setattr(screens, "ScreenMaker", refused)
    found, screen = generated(folder)
    assert found == wanted and screen.is_decided


def test_heads_that_have_no_more_bits_get_none(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "LEAST_BYTES", 0)
    assert screens.can_screen(pack(threads, random(64, 64)))
    assert not screens.can_screen(pack(threads, random(64, 50))), "no whole groups of inputs"
    assert Kind.INT8 not in screens.KINDS and Kind.Q5_0 not in screens.KINDS
    monkeypatch.setattr(screens, "LEAST_BYTES", 64 * 64 * 4 + 1)
    assert not screens.can_screen(pack(threads, random(64, 64)))
