"""Weights in host memory: which layers, in what order they come, and the tokens of a run that has all of them
on the device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import StartError
from runtime.messages.memory import ChangeMemory, OffloadSpec, WeightOffload, offloaded_layers
from runtime.ranks.weight_offload import span, tensors
from tests.devices.drive import Planner, sampling, start, start_rank
from tests.devices.streams import StreamedRunner, Streams, install
from tests.devices.taped import TapedDevice
from tests.models.make import make_checkpoint

PROMPT = [5, 9, 100, 7, 7, 31]
MANY: dict[str, Any] = {"num_hidden_layers": 5, "hidden_size": 64}
EVERY = OffloadSpec(0, 1, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **MANY)


def tokens(executor: Any, ready: Any, count: int = 6) -> list[list[int]]:
    """Of a prompt in chunks, and of two sequences at once."""
    planner = Planner(executor, ready, 4)
    first, second = (
        planner.row(0, PROMPT, sampling()),
        planner.row(1, PROMPT[::-1] * 3, sampling(temperature=1.0, seed=3)),
    )
    planner.prefill(first, chunk=4)
    planner.run([first], [(second, 18)])
    for _ in range(count):
        planner.run([first, second], [])
    return [first.tokens, second.tokens]


def opened(
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    is_late: bool,
    inner: TapedDevice | None = None,
    **options: Any,
) -> tuple[StreamedRunner, Any, Streams]:
    streams = Streams(is_late=is_late)
    install(patch, streams)
    executor = StreamedRunner(streams, inner, start_rank(folder, **({"max_total_tokens": 512} | options)))
    return executor, executor.ready, streams


@pytest.mark.parametrize("is_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("qwen3", EVERY),
        ("qwen3", OffloadSpec(0, 2, 1, 0)),
        ("qwen3", OffloadSpec(0, 1, 1, 3)),
        ("qwen3", OffloadSpec(400_000, -1, 1, 1)),
        ("deepseek_v3", OffloadSpec(0, 1, 1, 1)),
        ("qwen2_moe", OffloadSpec(0, 1, 1, 0)),
    ],
    ids=str,
)
def test_tokens_are_the_same(
    is_late: bool,
    family: str,
    spec: OffloadSpec,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = folder if family == "qwen3" else make_checkpoint(family, tmp_path)
    plain, plain_ready = start(model, max_total_tokens=512)
    expected = tokens(plain, plain_ready)
    executor, ready, _ = opened(model, monkeypatch, is_late=is_late, offload_setup=WeightOffload(spec))
    assert tokens(executor, ready) == expected
    assert ready.weights_bytes < plain_ready.weights_bytes
    kept = executor.memory_saver.loader.device.layer_devices
    layers = executor.runner.model.layers  # type: ignore[attr-defined]
    held = {t.untyped_storage().data_ptr() for i in kept for t in tensors(layers[i])}
    assert len(held) == spec.ahead + 1, "layers share the buffers"


def test_the_order_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five layers with two buffers: each waits for its own copy, and the next copy for who used its
    buffer."""
    executor, ready, streams = opened(folder, monkeypatch, is_late=False, offload_setup=WeightOffload(EVERY))
    planner = Planner(executor, ready, 4)
    row = planner.row(0, PROMPT, sampling())
    planner.prefill(row)
    streams.calls.clear()
    planner.step += 1
    with torch.inference_mode():
        start, loaded = np.array([row.computed]), executor.runner
        batch = loaded.inputs.batch(planner.plan([row], []), start, None)  # type: ignore[union-attr]
        loaded.model.forward(batch)  # type: ignore[union-attr]
    number = next(int(call.split()[1]) for call in streams.calls if call.startswith("event"))
    fetch = [["side waits for main", "copy on side", f"event {number + i} on side"] for i in range(5)]
    assert streams.calls == [
        *fetch[0],  # 2, behind layer 0
        *fetch[1],  # 3, behind layer 1
        f"main waits for event {number}",
        *fetch[2],  # 4, behind layer 2
        f"main waits for event {number + 1}",
        *fetch[3],  # 1 for the next step, behind layer 3
        f"main waits for event {number + 2}",
        *fetch[4],  # 0, behind layer 4
        "main waits for side",
    ]


@pytest.mark.parametrize("is_late", [False, True], ids=["early", "late"])
def test_a_step_that_broke_off_harms_no_other(
    is_late: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(*start(folder, max_total_tokens=512))
    executor, ready, _ = opened(folder, monkeypatch, is_late=is_late, offload_setup=WeightOffload(EVERY))
    planner = Planner(executor, ready, 4)
    layer = executor.runner.model.layers[3]  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            planner.run([], [(planner.row(0, PROMPT, sampling()), 6)])
    assert tokens(executor, ready) == expected


def test_captured_steps_bring_their_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(*start(folder, max_total_tokens=512))
    executor, ready, _ = opened(
        folder,
        monkeypatch,
        is_late=False,
        inner=TapedDevice(),
        offload_setup=WeightOffload(EVERY),
        graph_sizes=[1, 2],
    )
    for size in (1, 2):
        assert executor.capture(size).error == ""
    tapes = executor.inner.tapes  # type: ignore[union-attr]
    assert tokens(executor, ready) == expected and tapes.replays > 6


@pytest.mark.parametrize("is_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("spec", [EVERY, OffloadSpec(0, 2, 1, 0), OffloadSpec(0, 1, 1, 3)], ids=str)
def test_pieces_of_steps_bring_their_weights(
    spec: OffloadSpec, is_late: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are launched between the graphs: these hold none, and steps of both kinds follow each other."""
    expected = tokens(*start(folder, max_total_tokens=512))
    executor, ready, streams = opened(
        folder,
        monkeypatch,
        is_late=is_late,
        inner=TapedDevice(),
        offload_setup=WeightOffload(spec),
        graph_sizes=[2],
        piecewise_sizes=[8, 32],
    )
    for size in (8, 32):
        before = len(streams.calls)
        assert executor.capture(size, "tokens").error == ""
        copies = [call for call in streams.calls[before:] if call == "copy on side"]
        assert len(copies) == len(executor.memory_saver.loader.device.layer_devices), "of the trial alone"
    assert executor.capture(2).error == ""
    tapes = executor.inner.tapes  # type: ignore[union-attr]
    assert tokens(executor, ready) == expected
    assert tapes.replays == 3 * 6 + 6 * 2, "steps with prompts in pieces, and decodes with their sampling"
    assert executor.change_memory(ChangeMemory(1, ("weights",))).weights_bytes == 0
    assert executor.runner.offload is None
    assert executor.change_memory(ChangeMemory(2, ())).weights_bytes == ready.weights_bytes
    assert executor.capture(32, "tokens").error == "" and tokens(executor, ready) == expected


def test_offloaded_layers_go_and_come_back_with_the_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, ready, _ = opened(folder, monkeypatch, is_late=True, offload_setup=WeightOffload(EVERY))
    expected = tokens(executor, ready)
    assert executor.change_memory(ChangeMemory(1, ("weights",))).weights_bytes == 0
    assert executor.change_memory(ChangeMemory(2, ())).weights_bytes == ready.weights_bytes
    assert tokens(executor, ready) == expected


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen2_moe"])
def test_a_backup_needs_no_checkpoint(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(family, tmp_path)
    steps = 4 if "moe" in family else None
    executor, ready, _ = opened(
        folder, monkeypatch, is_late=True, offload_setup=WeightOffload(has_backup=True), expert_steps=steps
    )
    expected = tokens(executor, ready)
    (folder / "model.safetensors").unlink()
    for _ in range(2):
        answer = executor.change_memory(ChangeMemory(1, ("weights",)))
        assert answer.weights_bytes == 0 and answer.error == ""
        assert executor.change_memory(ChangeMemory(2, ())).weights_bytes == ready.weights_bytes
        assert tokens(executor, ready) == expected
    if executor.runner is not None and executor.runner.load is not None:
        assert int(executor.runner.load.total.sum()) > 0, "experts are counted as before"


def test_an_offloaded_model_has_nothing_on_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _, _ = opened(folder, monkeypatch, is_late=False, offload_setup=WeightOffload(has_backup=True))
    model = executor.runner.model  # type: ignore[attr-defined]
    before = {t.untyped_storage().data_ptr() for t in tensors(model)}
    executor.change_memory(ChangeMemory(1, ("weights",)))
    after = {t.untyped_storage().data_ptr() for t in tensors(model)}
    assert len(before) > 20 and len(after) == 1 and not before & after


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (OffloadSpec(0, 4, 1, 0), (3, 7, 11)),
        (OffloadSpec(0, 4, 3, 1), (1, 2, 3, 5, 6, 7, 9, 10, 11)),
        (OffloadSpec(0, 1, 1, 1), tuple(range(12))),
        (OffloadSpec(300, -1, 1, 1), (3, 7, 11)),
        (OffloadSpec(301, -1, 1, 1), (2, 5, 8, 11)),
        (OffloadSpec(1200, -1, 1, 1), tuple(range(12))),
    ],
)
def test_which_layers(spec: OffloadSpec, layers: tuple[int, ...]) -> None:
    assert offloaded_layers(spec, [100] * 12) == layers


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (OffloadSpec(1201, -1, 1, 1), "--cpu-offload-gb asks for"),
        (OffloadSpec(200, -1, 1, 1), "nothing is gained"),
        (OffloadSpec(0, 12, 1, 0), "--offload-group-size 12"),
        (OffloadSpec(0, 4, 1, 2), "lower --offload-prefetch-step"),
    ],
)
def test_what_gains_nothing_is_refused(spec: OffloadSpec, words: str) -> None:
    with pytest.raises(StartError, match=words):
        offloaded_layers(spec, [100] * 12)


def test_spans_of_views() -> None:
    base = torch.zeros(4, 6)
    assert [span(t) for t in (base, base[1:3, 2], base.T)] == [96, 28, 96]
