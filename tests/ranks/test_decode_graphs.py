"""Decode steps through graphs: the tokens of steps that are launched one by one, whatever the family, the
company and the padding."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.base import Device
from runtime.devices.facts import ANY_K
from runtime.layers.fused_ops import UnfusedOps
from runtime.messages.ranks import StartRank
from runtime.ranks.open_executor import DEVICES as MODULES
from tests.devices import taped
from tests.devices.drive import Planner, page_copies, sampling, start
from tests.models.compare import Checkpoints, in_company, maker, open_checkpoints
from tests.models.make import make_checkpoint
from tests.models.reference import Reference
from tests.models.test_llama import CASES, NUM_TOKENS, prompts
from tests.ranks.lora_slots import decode_with_adapters
from tests.ranks.test_torch_executor import SAMPLING_PARAMS
from tests.ranks.test_windows import MODELS, WINDOW

SIZES = [2, 4]  # 1 and 3 rows are padded
SMALL = {"max_len": 128, "device": "taped", "graph_sizes": SIZES}


@pytest.fixture(autouse=True)
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "taped", taped.__name__)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return open_checkpoints(tmp_path_factory, maker(CASES), prompts(), NUM_TOKENS)


def opened(folder: Path, page_size: int = 4, **options: Any) -> tuple[Planner, taped.Tapes]:
    executor, ready = start(folder, page_size=page_size, **(SMALL | options))
    assert isinstance(executor, taped.TapedRunner)
    return Planner(executor, ready, page_size), executor.tapes


# devices with graphs refuse them: sparse attention, and texts longer than a chunk of attention
ON_THE_CPU_ALONE = ("deepseek_v32", "glm_moe_dsa", "llama4")


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(ON_THE_CPU_ALONE)])
def test_greedy_equals_transformers(case: str, checkpoints: Checkpoints) -> None:
    """Sequences join one by one, in chunks, and leave: one to four rows decode, with mixed steps between."""
    folder, _, expected = checkpoints(case)
    planner, tapes = opened(folder, page_size=3)
    assert in_company(planner, prompts(), NUM_TOKENS, chunk=13, pause=2) == expected
    assert tapes.replays == 2 * len(tapes.lengths) > 40, "a forward and a choice for each decode step"
    assert {len(lengths) for lengths in tapes.lengths} == set(SIZES)
    assert tapes.lengths[0].tolist() == [len(prompts()[0]) + 1, 1], "with this step's token; 1 for padding"


@pytest.mark.parametrize("case", ["llama", "mistral window", "deepseek_v3"])
def test_prefix_and_preemption(case: str, checkpoints: Checkpoints) -> None:
    """A second sequence shares pages; the first loses its own and comes back in a slot that
    another sequence had before."""
    folder, reference, expected = checkpoints(case)
    planner, _ = opened(folder)
    first = planner.row(0, prompts()[3], sampling())
    planner.prefill(first)
    other = prompts()[3][:20] + [5, 6, 7]
    second = planner.row(1, other, sampling(), prefix=first, shared=20)
    planner.run([first], [(second, len(other) - 20)])
    for _ in range(6):
        planner.run([first, second], [])
    again = planner.row(1, first.tokens, sampling())
    planner.prefill(again, chunk=7)
    while len(again.tokens) < len(prompts()[3]) + NUM_TOKENS:
        planner.run([again], [])
    assert again.tokens[len(prompts()[3]) :] == expected[3]
    assert second.tokens[len(other) :] == reference.greedy(other, len(second.tokens) - len(other))


@pytest.mark.parametrize("model", MODELS)
def test_windows_in_a_pool_of_their_own(model: str, tmp_path: Path) -> None:
    family, overrides = MODELS[model]
    folder = make_checkpoint(family, tmp_path, **overrides)
    executor, ready = start(folder, max_step_tokens=8, window_ratio=0.1, **SMALL)
    planner = Planner(executor, ready, 4, window=WINDOW)
    rows = [
        planner.row(slot, [(i * k) % 250 for i in range(40)], sampling())
        for slot, k in enumerate((7, 11, 13))
    ]
    for row in rows:
        while row.computed < row.prompt_len:
            planner.run([], [(row, 8)])
    for _ in range(20):
        planner.run(rows, [])
    reference = Reference(folder)
    assert [row.tokens[40:] for row in rows] == [reference.greedy(row.tokens[:40], 21) for row in rows]


# plain rows' tokens by graphs
DRAWS = {"for all": (((ANY_K, True),), 40), "for none": ((), 10), "two": (((0, False), (4, True)), 30)}


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("company", [False, True])
def test_requested_sizes(
    draws: str, company: bool, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is plain is chosen in the graph, and everything else outside, with the tokens of a rank without
    graphs."""
    folder, _, _ = checkpoints("qwen3")
    device = taped.TapedDevice(DRAWS[draws][0])
    monkeypatch.setattr(taped, "open_executor", lambda *args: taped.TapedRunner(*args, device))

    def run(**options: Any) -> tuple[list[list[int]], Any]:
        executor, ready = start(folder, max_slots=16, max_len=128, **options)
        planner = Planner(executor, ready, 4)
        rows = [
            planner.row(slot, [5, 9, 100, 7], sampling(**params))
            for slot, params in enumerate(SAMPLING_PARAMS.values())
        ]
        rows.append(planner.row(9, [5, 9, 100, 7], sampling(top_logprobs=2, temperature=0.8)))
        for row in rows:
            planner.prefill(row)
        for batch in [rows] if company else [[row] for row in rows]:
            for _ in range(10):
                planner.run(batch, [])
        return [row.tokens for row in rows] + [[result[0] for result in rows[-1].results]], executor

    expected, _ = run()
    found, executor = run(device="taped", graph_sizes=[2, 16])
    assert found == expected
    forwards, replays = len(executor.tapes.lengths), executor.tapes.replays
    # rows that ask for nothing but a token: greedy, random, nucleus, top_k
    plain = 0 if company else DRAWS[draws][1]
    assert (forwards, replays - forwards) == ((10, 0) if company else (90, plain))


class Fused(taped.TapedDevice):
    """With operators that apply penalties, so that captured steps do."""

    def open(self, start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        device = super().open(start, rank, dtype)
        return replace(device, fused=UnfusedOps(device.ops))


EDITS: list[dict[str, Any]] = [
    {"bias_ids": [3, 90], "bias_values": [2.5, 9.0]},
    {"bias_ids": [5], "bias_values": [-50.0], "frequency_penalty": 0.6},
    {"stop_ids": list(range(0, 32, 2)), "min_len": 9},  # until five tokens are there
    {"stop_ids": list(range(0, 32, 2)), "min_len": 9, "temperature": 0.8, "seed": 3},
    {},
]


@pytest.mark.parametrize("company", [False, True])
def test_biases_and_banned_stop_ids(
    company: bool, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are sampled in graphs, and are those of a rank without graphs; a slot's next sequence has
    nothing of them."""
    folder, _, _ = checkpoints("qwen3")
    monkeypatch.setattr(taped, "open_executor", lambda *args: taped.TapedRunner(*args, Fused()))

    def run(**options: Any) -> tuple[list[list[int]], Any]:
        executor, ready = start(folder, max_slots=16, max_len=128, **options)
        planner, found = Planner(executor, ready, 4), []
        for params in (EDITS, [{} for _ in EDITS]):
            rows = [planner.row(slot, [5, 9, 100, 7], sampling(**given)) for slot, given in enumerate(params)]
            for row in rows:
                planner.prefill(row)
            for batch in [rows] if company else [[row] for row in rows]:
                for _ in range(8):
                    planner.run(batch, [])
            found += [row.tokens for row in rows]
        return found, executor

    expected, _ = run()
    found, executor = run(device="taped", graph_sizes=[2, 8])
    assert found == expected and found[0] != found[5] and 90 in found[0][4:]
    steps = 2 * 8 * (1 if company else len(EDITS))
    assert executor.tapes.replays == 2 * steps, "a forward pass and a choice each"


def test_adapters(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A graph with adapters serves any LoRA slots, and steps without adapters have graphs of their own."""
    executor = decode_with_adapters(checkpoints("qwen3")[0], tmp_path, 4, device="taped", graph_sizes=[1, 4])
    assert isinstance(executor, taped.TapedRunner) and executor.tapes.replays == 2 * 2 * 3 * 4


def test_what_takes_another_way(checkpoints: Checkpoints) -> None:
    folder, _, expected = checkpoints("llama")
    planner, tapes = opened(folder)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate([*prompts(), [1, 2, 3]])]
    planner.run([], [(row, row.prompt_len) for row in rows])
    planner.run(rows, [])  # five rows, and four are captured
    planner.run(rows[:1], [(planner.row(7, [4, 5], sampling()), 2)])  # a newcomer
    assert tapes.replays == 0
    while any(len(row.tokens) < row.prompt_len + NUM_TOKENS for row in rows[:4]):
        planner.run(rows[:4], [])
    assert tapes.replays > 0 and [row.tokens[row.prompt_len :][:NUM_TOKENS] for row in rows[:4]] == expected


def test_without_padding_a_graph_serves_its_own_number(checkpoints: Checkpoints) -> None:
    planner, tapes = opened(checkpoints("llama")[0], graph_pads=False)
    rows = [planner.row(slot, [1, 2, 3], sampling()) for slot in range(3)]
    planner.run([], [(row, 3) for row in rows])
    planner.run(rows, [])
    assert tapes.replays == 0
    planner.run(rows[:2], [])
    assert tapes.replays == 2


def test_many_page_updates_in_one_step(checkpoints: Checkpoints) -> None:
    """More than the inputs of a graph have room for: after a retraction that gave pages of a long sequence
    anew, say."""
    planner, tapes = opened(checkpoints("llama")[0])
    row = planner.row(0, [1, 2, 3], sampling())
    planner.prefill(row)
    row.pages += [planner.free.pop() for _ in range(5)]
    planner.run([row], [])
    assert tapes.replays == 0
    planner.run([row], [])
    assert tapes.replays == 2


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_capture_leaves_everything_as_it_was(at: int, checkpoints: Checkpoints) -> None:
    folder, _, expected = checkpoints("llama")
    planner, tapes = opened(folder)
    graphs = planner.executor.runner.graphs  # type: ignore[attr-defined]
    graphs.recorded.pop(4)
    graphs.ready.remove(4)
    row = planner.row(0, prompts()[1], sampling())
    planner.prefill(row)
    tapes.fails_at = at
    captured = planner.executor.capture(4)
    assert captured.size == 4 and captured.error == "OutOfMemoryError: no room for a tape"
    while len(row.tokens) < row.prompt_len + NUM_TOKENS:
        planner.run([row], [])
    assert row.tokens[row.prompt_len :] == expected[1] and tapes.replays > 0
    assert planner.executor.capture(4).error == ""


def test_a_draw_that_cannot_be_captured_stays_outside(checkpoints: Checkpoints) -> None:
    """The size counts all the same, and no size that is captured later tries that draw."""
    planner, tapes = opened(checkpoints("llama")[0], graph_sizes=[2, 4, 8])
    graphs = planner.executor.runner.graphs  # type: ignore[attr-defined]
    row = planner.row(0, prompts()[1], sampling(temperature=1.0))
    planner.prefill(row)
    planner.run([row], [])
    assert tapes.replays == 2
    tapes.fails_at = 2
    assert [planner.executor.capture(size).error for size in (2, 4)] == ["", ""] and tapes.fails_at is None
    num_samplers = {size: len(graphs.recorded[size].samplers) for size in (2, 4, 8)}
    assert num_samplers[2] == num_samplers[4] == 0 < num_samplers[8]
    planner.run([row], [])
    assert tapes.replays == 3


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x + torch.from_numpy(np.ones(2, np.float32)),
        lambda x: x.unique(),
        lambda x: int(x[0]),
        lambda x: torch.repeat_interleave(x, x.long()),
    ],
)
def test_the_double_refuses_what_a_graph_cannot_hold(body: Any) -> None:
    x = torch.ones(2)
    with pytest.raises(taped.Refused), torch.inference_mode():
        taped.Tapes().capture(lambda: body(x))


def test_the_double_replays_tensors_and_not_python() -> None:
    x, out, number = torch.ones(2), torch.zeros(2), [1.0]
    tapes = taped.Tapes()
    with torch.inference_mode():
        tape = tapes.capture(lambda: [out.copy_((x * 2 + number[0]).view(1, 2).squeeze(0))].clear())
        x.fill_(5.0)
        number[0] = 100.0
        tapes.replay(tape, ())
    assert out.tolist() == [11.0, 11.0]


def test_a_device_without_graphs_says_so(checkpoints: Checkpoints) -> None:
    executor, _ = start(checkpoints("llama")[0], graph_sizes=[1])
    assert executor.capture(1).error == "cpu captures no steps of this model"


def test_saves_go_with_a_graph_and_loads_without(checkpoints: Checkpoints) -> None:
    fd = os.memfd_create("host-test")
    planner, tapes = opened(checkpoints("llama")[0], host_ratio=1.0, host_fds=[fd], max_total_tokens=128)
    row = planner.row(0, prompts()[1], sampling())
    planner.prefill(row)
    planner.page_copies = page_copies(saves={row.pages[0]: 3})
    planner.run([row], [])
    assert tapes.replays == 2
    page = planner.free.pop()
    planner.page_copies = page_copies(loads={3: page})
    planner.run([row], [])
    assert tapes.replays == 2
    kv = planner.executor.runner.kv  # type: ignore[attr-defined]
    for kept in (x.view(-1, 4, *x.shape[1:]) for pair in kv for x in pair):
        assert kept[page].any() and torch.equal(kept[page], kept[row.pages[0]])
    planner.executor.close()
    os.close(fd)


def test_graphs_end_before_the_communicator(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's does not end while a graph holds operations of it."""
    planner, tapes = opened(checkpoints("llama")[0])
    row = planner.row(0, prompts()[1], sampling())
    planner.prefill(row)
    planner.run([row], [])
    runner, ended = planner.executor.runner, []  # type: ignore[attr-defined]
    assert tapes.replays == 2 and runner.graphs is not None
    monkeypatch.setattr(tapes, "forget", lambda: ended.append("graphs"))
    monkeypatch.setattr(runner.device.collectives, "close", lambda: ended.append("communicator"))
    planner.executor.close()
    assert ended == ["graphs", "communicator"] and runner.graphs is None
