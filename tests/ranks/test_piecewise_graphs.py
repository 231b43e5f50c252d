"""Steps with prompts in pieces between attentions: the tokens of steps that are launched kernel by kernel."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.devices.base import ForwardBatch
from runtime.layers.moe.plain_experts import PlainExperts
from runtime.messages.ranks import Captured, Profile
from runtime.ranks import open_executor
from runtime.ranks.piecewise_graphs import Crossings, Walk
from tests.devices import taped
from tests.devices.drive import Planner, Row, page_copies, sampling, start
from tests.devices.stages import start_stages
from tests.models.make import make_checkpoint
from tests.models.make_adapter import ALL
from tests.models.reference import Reference
from tests.ranks.lora_slots import decode_with_adapters
from tests.ranks.test_windows import MODELS, WINDOW

PROMPTS = [[5, 9, 100, 7, 3], list(range(20)), list(range(3, 40)), [250, 1]]
SMALL: dict[str, Any] = {
    "device": "taped",
    "max_len": 128,
    "graph_sizes": [2],
    "piecewise_sizes": [8, 16],
    "num_states": 12,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "latent": ("deepseek_v3", {}),
    "gemma": ("gemma2", {}),
    "window": ("mistral", {"sliding_window": 7}),
    "convolutions": ("lfm2", {}),
    "scan alone": ("mamba2", {}),
    "scan by channels": ("jamba", {}),
    "scan beside attention": ("falcon_h1", {}),
    "delta rule": ("qwen3_5", {}),
    "delta rule of Kimi": ("kimi_linear", {}),
    "layers of one kind each": ("nemotron_h", {}),
    "norms behind": ("olmo_hybrid", {}),
}


@pytest.fixture(autouse=True)
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(open_executor.DEVICES, "taped", taped.__name__)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Reference]]:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("model"))
    yield folder, Reference(folder)


def opened(folder: Path, **options: Any) -> tuple[Planner, Any]:
    executor, ready = start(folder, **(SMALL | options))
    return Planner(executor, ready, 4), executor


def pieces_of(executor: Any) -> int:
    """Replays of a step in pieces, of which each is counted."""
    states, model = executor.runner.states, executor.runner.model
    experts = sum(isinstance(layer.mlp, PlainExperts) for layer in model.layers)
    return len(model.attentions) + (0 if states is None else len(states.tensors)) + experts + 1


def is_exact(row: Row, reference: Reference) -> bool:
    return row.tokens[row.prompt_len :] == reference.greedy(
        row.tokens[: row.prompt_len], len(row.tokens) - row.prompt_len
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, tmp_path: Path) -> None:
    """Prompts come in chunks, beside rows that decode: steps of 2 to 16 tokens, with more or less padding."""
    name, overrides = FAMILIES[family]
    folder = make_checkpoint(name, tmp_path, **overrides)
    planner, executor = opened(folder)
    rows: list[Row] = []
    steps = 0
    for slot, prompt in enumerate(PROMPTS):
        row = planner.row(slot, prompt, sampling())
        while row.computed < row.prompt_len:
            planner.run(rows, [(row, min(13, row.prompt_len - row.computed))])
            steps += 1
        rows.append(row)
        planner.run(rows, [])
    assert all(is_exact(row, Reference(folder)) for row in rows)
    assert executor.tapes.replays > pieces_of(executor) * steps


def test_prefix_and_preemption(llama: tuple[Path, Reference]) -> None:
    """A second sequence computes only what is new; the first comes back in another slot, with all its
    tokens."""
    folder, reference = llama
    planner, executor = opened(folder)
    first = planner.row(0, PROMPTS[2], sampling())
    planner.prefill(first, chunk=16)
    second = planner.row(1, [*PROMPTS[2][:20], 5, 6, 7], sampling(), prefix=first, shared=20)
    planner.run([first], [(second, 3)])
    again = planner.row(2, first.tokens, sampling())
    planner.prefill(again, chunk=7)
    planner.run([second, again], [])
    assert all(is_exact(row, reference) for row in (first, second, again))
    assert executor.tapes.replays == pieces_of(executor) * (3 + 1 + 6) + 2, (
        "no step but the last was launched otherwise"
    )


@pytest.mark.parametrize("model", MODELS)
def test_windows_in_a_pool_of_their_own(model: str, tmp_path: Path) -> None:
    family, overrides = MODELS[model]
    folder = make_checkpoint(family, tmp_path, **overrides)
    executor, ready = start(folder, max_step_tokens=8, window_ratio=0.1, **SMALL)
    planner = Planner(executor, ready, 4, window=WINDOW)
    row = planner.row(0, [(i * 7) % 250 for i in range(40)], sampling())
    while row.computed < row.prompt_len:
        planner.run([], [(row, 8)])
    for _ in range(5):
        planner.run([row], [])
    assert is_exact(row, Reference(folder))


def test_padding_is_stored_nowhere_but_on_the_padding_page(llama: tuple[Path, Reference]) -> None:
    """Padding overwrites no free pages, nor those of the last step, whose indices the inputs still hold."""
    planner, executor = opened(llama[0])
    planner.prefill(planner.row(0, PROMPTS[2][:8], sampling()))
    kept = [x.clone() for pair in executor.runner.kv for x in pair]
    row = planner.row(1, [5, 6, 7], sampling())
    planner.prefill(row)
    used = [row.pages[0] * 4 + i for i in range(3)]
    for before, after in zip(kept, (x for pair in executor.runner.kv for x in pair), strict=True):
        changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
        assert [index for index in changed if index >= 4] == used, "page 0 is the padding page"
        assert after.isfinite().all()


def test_what_a_step_is_asked_for_besides_is_the_same(llama: tuple[Path, Reference]) -> None:
    """Log probabilities of the prompt, random tokens, penalties: all behind the hidden states."""

    def run(**options: Any) -> tuple[list[int], list[float], list[float]]:
        planner, executor = opened(llama[0], **options)
        row = planner.row(
            0,
            PROMPTS[1],
            sampling(temperature=0.9, seed=3, frequency_penalty=0.5, top_logprobs=2, prompt_logprobs=1),
        )
        planner.prefill(row, chunk=9)
        planner.run([row], [])
        assert (executor.tapes.replays > 0) == bool(options["piecewise_sizes"])
        return (
            row.tokens,
            [x for part in row.prompt for x in part.logprobs.tolist()],
            [result[1] for result in row.results],
        )

    tokens, chosen, top = run(piecewise_sizes=[1, 16], graph_sizes=[])
    expected = run(piecewise_sizes=[], graph_sizes=[])
    assert (tokens, chosen, top) == (
        expected[0],
        pytest.approx(expected[1], abs=1e-5, nan_ok=True),
        pytest.approx(expected[2], abs=1e-5),
    )


@pytest.mark.parametrize(
    ("ready", "count", "size"),
    [
        ([8, 16], 5, 8),
        ([8, 16], 16, 16),
        ([8, 16], 17, None),
        ([128], 1, 128),
        ([160], 128, 160),
        ([160], 127, None),
        ([], 4, None),
    ],
)
def test_the_size_of_a_step(
    ready: list[int], count: int, size: int | None, llama: tuple[Path, Reference]
) -> None:
    """As padding is free up to 128 tokens, and may be a quarter beyond."""
    _, executor = opened(llama[0], piecewise_sizes=[8])
    pieces = executor.runner.piecewise
    pieces.ready = ready
    tokens = torch.zeros(count, dtype=torch.int64)
    assert pieces.size_for(ForwardBatch(tokens, tokens, (tokens,), [], None)) == size
    assert pieces.size_for(ForwardBatch(tokens, tokens, (tokens,), [], None, embeds=(tokens, tokens))) is None


@pytest.mark.parametrize("at", [0, 2])
def test_a_failed_capture_leaves_everything_as_it_was(at: int, llama: tuple[Path, Reference]) -> None:
    """No memory for a piece twice: at first all pieces are tried again."""
    folder, reference = llama
    planner, executor = opened(folder)
    pieces, capture = executor.runner.piecewise, executor.tapes.capture

    def again() -> Captured:
        pieces.recorded.pop(16, None)
        pieces.ready = sorted(pieces.recorded)
        return executor.capture(16, "tokens")

    executor.tapes.fails_at = at
    answer = again()
    assert (answer.size, answer.unit, answer.error) == (16, "tokens", ""), "once is not enough"

    def full(body: Any) -> Any:
        executor.tapes.fails_at = 0
        return capture(body)

    executor.tapes.capture = full
    assert again().error == "OutOfMemoryError: no room for a tape"
    row = planner.row(0, PROMPTS[2], sampling())
    planner.prefill(row, chunk=6)
    planner.run([row], [])
    assert is_exact(row, reference) and pieces.ready == [8]


def test_a_body_that_failed_is_not_run_on() -> None:
    """A device may try a body twice; a forward that ended in an error has no other half."""

    def broken() -> Any:
        raise torch.OutOfMemoryError("full")
        yield

    tokens = torch.zeros(2, dtype=torch.int64)
    batch = ForwardBatch(tokens, tokens, (tokens,), [], None)
    way = Walk(broken(), 2, batch, Crossings(2))
    for words in ("full", "no memory for a piece of a step"):
        with pytest.raises(torch.OutOfMemoryError, match=words):
            way.advance()


def test_loads_from_host_memory_are_waited_for_layer_by_layer(llama: tuple[Path, Reference]) -> None:
    fd = os.memfd_create("host-test")
    planner, executor = opened(llama[0], host_ratio=1.0, host_fds=[fd], max_total_tokens=128)
    row = planner.row(0, PROMPTS[1], sampling())
    planner.page_copies = None
    planner.prefill(row, chunk=16)
    planner.page_copies = page_copies(saves={page: i for i, page in enumerate(row.pages[:4])})
    planner.run([row], [])
    loaded = [planner.free.pop() for _ in range(4)]
    planner.page_copies = page_copies(loads=dict(enumerate(loaded)))
    second = planner.row(1, PROMPTS[1], sampling())
    second.pages, second.computed = loaded, 16
    before = executor.tapes.replays
    planner.prefill(second)
    assert executor.tapes.replays == before + pieces_of(executor) and is_exact(second, llama[1])
    executor.close()
    os.close(fd)


ADAPTED = {
    "llama": ("llama", ALL),
    "experts": ("qwen3_moe", ("q_proj", "o_proj")),
    "latent": ("deepseek_v3", ("q_a_proj", "o_proj")),
    "delta rule": ("qwen3_5", ("q_proj", "up_proj")),
}


@pytest.mark.parametrize("family", ADAPTED)
def test_steps_with_adapters_have_graphs_of_their_own(family: str, tmp_path: Path) -> None:
    """A step of two adapters and of none is replayed; graphs that are captured behind it know none."""
    name, targets = ADAPTED[family]
    folder = make_checkpoint(name, tmp_path / "model")
    executor: Any = decode_with_adapters(
        folder, tmp_path, 2, targets=targets, device="taped", graph_sizes=[], piecewise_sizes=[4, 16]
    )
    assert executor.tapes.replays == 2 * (1 + 3 * 2) * pieces_of(executor), "every step"
    assert executor.capture(4, "tokens").error == ""
    planner = Planner(executor, executor.ready, 4)
    row = planner.row(3, [5, 9, 100], sampling())
    before = executor.tapes.replays
    planner.prefill(row)
    planner.run([row], [])
    assert is_exact(row, Reference(folder))
    assert executor.tapes.replays == before + 2 * pieces_of(executor)


def test_captures_are_traced(llama: tuple[Path, Reference], tmp_path: Path) -> None:
    """One that cannot be written is no failure, and there is none while something else is recorded."""
    _, executor = opened(llama[0], trace_folder=str(tmp_path / "traces"))
    traces = {str(path.relative_to(tmp_path / "traces")) for path in (tmp_path / "traces").rglob("*.gz")}
    assert traces == {f"{name}/rank-0.trace.json.gz" for name in ("2-sequences", "8-tokens", "16-tokens")}
    events = json.loads(gzip.decompress((tmp_path / "traces/16-tokens/rank-0.trace.json.gz").read_bytes()))[
        "traceEvents"
    ]
    assert (
        sum(event.get("name") == "aten::addmm" or event.get("name") == "aten::linear" for event in events) > 8
    )
    (tmp_path / "file").write_text("")
    executor.trace_folder = str(tmp_path / "file")
    assert executor.capture(8, "tokens").error == ""
    executor.trace_folder = str(tmp_path / "other")
    executor.profile(Profile(folder=str(tmp_path / "steps")))
    assert executor.capture(8, "tokens").error == "" and not (tmp_path / "other").exists()
    executor.profile(Profile())
    assert (tmp_path / "steps" / "rank-0.trace.json.gz").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_stages_of_a_pipeline(family: str, tmp_path: Path) -> None:
    """Each stage replays its own layers, behind the first one from hidden states."""
    folder = make_checkpoint(family, tmp_path, num_hidden_layers=3)
    device = taped.TapedDevice()
    sizes = SMALL | {"graph_sizes": []}
    executor = start_stages(folder, 2, facts=device.facts, open_whole=device.open, **sizes)
    for size in SMALL["piecewise_sizes"]:
        for stage in executor.stages:
            assert stage.capture(size, "tokens").error == ""
    planner, rows, steps = Planner(executor, executor.ready, 4), list[Row](), 0
    for slot, prompt in enumerate(PROMPTS):
        row = planner.row(slot, prompt, sampling())
        while row.computed < row.prompt_len:
            planner.run(rows, [(row, min(13, row.prompt_len - row.computed))])
            steps += 1
        rows.append(row)
        planner.run(rows, [])
    reference = Reference(folder)
    assert all(is_exact(row, reference) for row in rows)
    assert device.tapes.replays >= (3 + 2) * steps, "three layers, and one piece more in each stage"
