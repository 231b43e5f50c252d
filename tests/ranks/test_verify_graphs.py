"""Steps that verify drafts, and the passes of a draft model, as graphs: tokens are those of decoding one by
one, drafts are those of passes that are launched one by one, and the host waits for neither."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from runtime.messages.lora import AdapterSetup, LoadAdapter
from runtime.messages.speculation import Speculation
from runtime.ranks.open_executor import DEVICES as MODULES
from runtime.ranks.sample_rows import sample_rows
from runtime.scheduling.drafts import Draft
from tests.devices import taped
from tests.devices.cpu.ranks import RankProcess
from tests.devices.drive import Planner, sampling, speculation
from tests.models.make import make_checkpoint
from tests.models.make_adapter import ALL, make_adapter
from tests.models.make_heads import HeadReference, make_eagle, make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.ranks.lora_slots import assigned
from tests.ranks.test_draft_heads import LAYERS, check_drafts
from tests.ranks.test_own_drafts import decoded, drafted, opened
from tests.ranks.test_verify import PARAMS, PROMPTS, Guesses, Late, finish, prefilled
from tests.ranks.test_windows import MODELS, PAGE_SIZE, WINDOW

GRAPHS: dict[str, Any] = {"device": "taped", "max_slots": 5, "max_len": 64, "graph_sizes": [1, 2, 4]}
NGRAM = Speculation(algorithm="NGRAM", num_steps=0, topk=1, num_draft_tokens=6)
PLAIN = ("greedy", "random", "filtered")  # rows that ask for nothing but a token


@pytest.fixture(autouse=True)
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "taped", taped.__name__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("other"), num_hidden_layers=1, hidden_size=32)


def ngram(folder: Path, **options: Any) -> Planner:
    """A rank whose drafts come from the scheduler."""
    planner = opened(folder, speculation=NGRAM, **(GRAPHS | options))
    planner.follows = False
    return planner


def tapes_of(planner: Planner) -> taped.Tapes:
    return planner.executor.tapes  # type: ignore[attr-defined, no-any-return]


def refuse_kernels(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no step may be launched kernel by kernel."""
    monkeypatch.setattr(planner.executor.runner.forward, "compute", None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_tokens_are_those_without_drafts(
    folder: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Rows with drafts and without, of one to three sequences: all replayed where tokens are all that rows
    ask for, else launched one by one."""
    expected = decoded(folder, params)
    is_plain = any(f"[{name}]" in request.node.name for name in PLAIN)
    for luck in (0.0, 0.7, 1.0):
        planner = ngram(folder, page_size=3)
        rows = prefilled(planner, params)
        if is_plain:
            refuse_kernels(planner, monkeypatch)
        truths = [truth[:24] for truth in expected]
        steps = finish(planner, rows, truths, Guesses(3, luck, has_trees=False))
        assert steps < 18 if luck == 1.0 else steps <= 24


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "gpt_oss", "mistral", "qwen3_moe"])
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention, score caps, sinks, windows and experts."""
    folder = make_checkpoint(family, tmp_path)
    expected = [truth[:24] for truth in decoded(folder, {})]
    planner = ngram(folder, page_size=2)
    rows = prefilled(planner, {})
    refuse_kernels(planner, monkeypatch)
    finish(planner, rows, expected, Guesses(1, 0.7, has_trees=False))


@pytest.mark.parametrize("model", MODELS)
def test_windows_in_a_pool_of_their_own(model: str, tmp_path: Path) -> None:
    family, overrides = MODELS[model]
    folder = make_checkpoint(family, tmp_path, **overrides)
    options: dict[str, Any] = {"page_size": PAGE_SIZE, "max_step_tokens": 8, "window_ratio": 0.1}
    expected = [truth[:24] for truth in decoded(folder, {})]
    planner = ngram(folder, max_len=256, **{k: v for k, v in options.items() if k != "max_len"})
    planner.window = WINDOW
    before = tapes_of(planner).replays
    rows = prefilled(planner, {})
    finish(planner, rows, expected, Guesses(2, 0.7, has_trees=False))
    assert tapes_of(planner).replays > before


def test_trees_and_certain_drafts_are_launched_one_by_one(folder: Path) -> None:
    expected = decoded(folder, {})
    planner = ngram(folder)
    (row,) = prefilled(planner, {})[:1]
    truth, before = expected[0], tapes_of(planner).replays
    planner.run([], [], [(row, Draft(truth[1:4], is_sure=True))])
    assert row.tokens[row.prompt_len :] == truth[:5]
    planner.run([], [], [(row, Draft([truth[5], 1, truth[6]], [0, 0, 1]))])
    assert row.tokens[row.prompt_len :] == truth[:8] and tapes_of(planner).replays == before
    planner.run([], [], [(row, Draft(truth[8:10]))])
    assert row.tokens[row.prompt_len :] == truth[:11] and tapes_of(planner).replays > before


def test_a_graph_is_used_for_half_of_its_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of many rows with few drafts takes a narrower graph, and none where most would be padding."""
    planner = ngram(folder, page_size=4, max_slots=33, graph_sizes=[32])
    graphs = planner.executor.runner.verifies  # type: ignore[attr-defined]
    assert sorted(graphs.recorded) == [(32, 2), (32, 3), (32, 6)]
    shapes = [graphs.shape_for(*step) for step in ((20, 2, 40), (20, 3, 60), (20, 6, 60), (33, 2, 66))]
    assert shapes == [(32, 2), (32, 3), None, None]
    graphs.pads = False
    assert graphs.shape_for(20, 2, 40) is None and graphs.shape_for(32, 2, 64) == (32, 2)


def test_adapters(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of rows with an adapter and without, in one captured step, are those of decoding."""
    adapter = make_adapter(folder, tmp_path / "1", seed=1, targets=ALL)
    setup = AdapterSetup(num_lora_slots=2, max_rank=6, targets=ALL, loaded=[LoadAdapter(1, str(adapter))])

    def run(planner: Planner, truths: list[list[int]] | None) -> list[list[int]]:
        planner.lora_assignment = assigned(s0=1)
        rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(PROMPTS)]
        rows[0].lora_slot = rows[2].lora_slot = 0
        planner.run([], [(row, row.prompt_len) for row in rows])
        if truths is None:
            for _ in range(24):
                planner.run(rows, [])
            return [row.tokens[row.prompt_len :] for row in rows]
        refuse_kernels(planner, monkeypatch)
        finish(planner, rows, [truth[:24] for truth in truths], Guesses(3, 0.7, has_trees=False))
        return truths

    plain = opened(folder, adapters=setup)
    plain.follows = False
    run(ngram(folder, adapters=setup), run(plain, None))


def test_nothing_waits_for_accepted_counts(folder: Path, other: Path) -> None:
    """Steps that draft and verify are replayed one behind the other before the host knows what the first of
    them accepted."""
    for draft in (folder, other):
        expected = decoded(folder, {})[1]
        planner = opened(folder, speculation=speculation("STANDALONE", draft), **GRAPHS)
        row = planner.row(0, PROMPTS[1], sampling())
        planner.prefill(row)
        loaded = planner.executor.runner  # type: ignore[attr-defined]
        loaded.transfers = loaded.verifies.transfers = loaded.verifies.drafts.transfers = Late()
        loaded.device.graphs.reads_lengths = False
        row.pages += [planner.free.pop() for _ in range(4)]
        results = []
        for _ in range(3):
            results.append(planner.executor.launch(planner.plan([], [], [(row, Draft.own(4))])))
            assert loaded.slots.lengths._coming and loaded.drafts.pending._is_behind
        tokens = [token for result in results for token in result.result().token_ids.tolist()]
        assert tokens == expected[1 : 1 + len(tokens)] and (draft is other or len(tokens) == 15)
        length = len(PROMPTS[1]) + len(tokens)
        assert loaded.slots.lengths.starts(np.array([0])).tolist() == [length]
        assert torch.equal(loaded.slots.lengths.on_device[:1], torch.tensor([length]))


@pytest.mark.parametrize("reads_lengths", [True, False])
@pytest.mark.parametrize("params", PLAIN)
def test_a_model_knows_what_it_will_sample(
    folder: Path, params: str, reads_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts of captured passes are right, and steps between that only decode are followed."""
    expected = decoded(folder, PARAMS[params])
    planner = opened(folder, speculation=speculation("STANDALONE", folder), **GRAPHS)
    tapes_of(planner).reads_lengths = reads_lengths
    launches = count_launches(planner, monkeypatch)
    assert drafted(planner, PARAMS[params], expected, share=0.7) >= 0.99
    assert launches[0] > 2 * launches[1] > 0, "prompts are launched kernel by kernel, and nothing else"


def count_launches(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that are launched from now on: all, and those of them kernel by kernel."""
    counts, runner = [0, 0], planner.executor.runner  # type: ignore[attr-defined]
    launch, compute = runner.launch, runner.forward.compute

    def launched(*args: Any) -> Any:
        counts[0] += 1
        return launch(*args)

    def computed(*args: Any) -> Any:
        counts[1] += 1
        return compute(*args)

    monkeypatch.setattr(runner, "launch", launched)
    monkeypatch.setattr(runner.forward, "compute", computed)
    return counts


@pytest.mark.parametrize("params", ["greedy", "random", "penalties", "logprobs"])
def test_newcomers_between_captured_steps(folder: Path, params: str) -> None:
    """A prompt joins steps that draft: those are launched one by one, with entries where graphs left them."""
    expected = decoded(folder, PARAMS[params])
    planner = opened(folder, speculation=speculation("STANDALONE", folder), **GRAPHS)
    tapes_of(planner).reads_lengths = False
    random, rows, waiting = Random(1), [], list(enumerate(PROMPTS))
    proposed = accepted = 0
    while waiting or min(len(row.tokens) - row.prompt_len for row in rows) < 20:
        extends = []
        if waiting and random.random() < 0.3:
            slot, prompt = waiting.pop(0)
            extends = [(planner.row(slot, prompt, sampling(**PARAMS[params])), len(prompt))]
        left = [row for row in rows if len(row.tokens) - row.prompt_len < 20]
        verifies = [(row, Draft.own(random.randint(1, 4))) for row in left]
        before = sum(len(row.tokens) for row in left)
        planner.run([], extends, verifies)
        proposed += sum(len(draft.tokens) for _, draft in verifies)
        accepted += sum(len(row.tokens) for row in left) - before - len(left)
        rows += [row for row, _ in extends]
    for row, truth in zip(rows, expected, strict=True):
        assert row.tokens[row.prompt_len :][:20] == truth[:20]
    assert params == "penalties" or accepted == proposed


@pytest.mark.parametrize("reads_lengths", [True, False])
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_drafts_of_heads_are_those_of_plain_torch(
    algorithm: str, reads_lengths: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=LAYERS)
    make = make_eagle if algorithm == "EAGLE" else make_eagle3
    head = make(tmp_path / "head")
    planner = opened(folder, speculation=speculation(algorithm, head), **GRAPHS)
    tapes_of(planner).reads_lengths = reads_lengths
    assert check_drafts(planner, HeadReference(folder, head, algorithm), decoded(folder, {})) > 5


def test_drafts_of_a_next_token_layer_are_those_of_plain_torch(tmp_path: Path) -> None:
    folder = add_next_token_layers(make_checkpoint("deepseek_v3", tmp_path / "model"))
    planner = opened(folder, speculation=speculation("NEXTN", None), **GRAPHS)
    assert check_drafts(planner, HeadReference(folder, folder, "NEXTN"), decoded(folder, {})) > 5


def test_one_draft_at_most(folder: Path) -> None:
    expected = decoded(folder, {})
    settings = speculation("STANDALONE", folder, num_steps=1, num_draft_tokens=2)
    planner = opened(folder, speculation=settings, **GRAPHS)
    assert drafted(planner, {}, expected, most=1) >= 0.99


@pytest.mark.parametrize("at", range(6))
def test_a_failed_capture_leaves_everything_as_it_was(at: int, folder: Path) -> None:
    """Failures of the forward graphs, of which there are two for each width."""
    expected = decoded(folder, {})
    planner = opened(folder, speculation=speculation("STANDALONE", folder), **GRAPHS)
    tapes, graphs = tapes_of(planner), planner.executor.runner.verifies  # type: ignore[attr-defined]
    for shape in [shape for shape in graphs.recorded if shape[0] == 4]:
        del graphs.recorded[shape]
    graphs.sizes.remove(4)
    tapes.fails_at = at
    captured = planner.executor.capture(4, "verifies")
    assert captured.error == "OutOfMemoryError: no room for a tape" and captured.unit == "verifies"
    assert graphs.sizes == [1, 2]
    assert drafted(planner, {}, expected) >= 0.99
    assert planner.executor.capture(4, "verifies").error == "" and graphs.sizes == [1, 2, 4]


def test_without_speculation_nothing_is_captured(folder: Path) -> None:
    planner = opened(folder, **GRAPHS)
    answer = planner.executor.capture(2, "verifies")
    assert answer.error == "taped captures no steps of this model"


def test_shapes() -> None:
    assert NGRAM.captured_widths(8) == (2, 3, 6)
    assert speculation("EAGLE", None).captured_widths(1) == (1, 2, 3, 5)
    assert NGRAM.captured_widths(256) == (2,) and NGRAM.captured_sizes([1, 256, 512]) == [1, 256]


def test_places_of_accepted_tokens(folder: Path) -> None:
    """A captured step's rows of logits lie in a grid, those of other steps one behind the other."""
    planner = ngram(folder)
    rows = prefilled(planner, {})
    plan = planner.plan(rows[:1], [], [(rows[1], Draft([5, 6]))])
    places, counts = sample_rows(plan, np.array([4, 19])).accepted(np.array([2]))
    assert places.tolist() == [0, 1, 2] and counts.tolist() == [1, 2]
    graphs = planner.executor.runner.verifies  # type: ignore[attr-defined]
    shape = graphs.shape_of([plan], [graphs.slots.needs])
    with torch.inference_mode():
        sampled = graphs.launch(shape, plan, is_adapted=False)
    places, counts = sampled.accepted(np.array([1, 2]))
    assert sampled.width == 3 and places.tolist() == [0, 3, 4] and counts.tolist() == [1, 2]


@pytest.mark.parametrize("algorithm", [pytest.param("STANDALONE", marks=pytest.mark.full), "EAGLE3"])
def test_on_two_ranks(algorithm: str, tmp_path: Path) -> None:
    """Both replay the same graphs, of the draft model's passes and of the verification, with the same
    tokens."""
    folder = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=6)
    draft = folder if algorithm == "STANDALONE" else make_eagle3(tmp_path / "head")
    job = [str(folder), str(tmp_path / "rendezvous"), algorithm, str(draft), PROMPTS]
    ranks = [RankProcess("tests.devices.cpu.verifying_rank") for _ in range(2)]
    try:
        for number, rank in enumerate(ranks):
            rank.ask([number, *job])
        first, second = (rank.answer() for rank in ranks)
    finally:
        for rank in ranks:
            rank.close()
    assert first["replays"] == second["replays"] >= 3 * 8, "two passes of the draft model, and the target's"
    assert first["last"] == second["last"] == [tokens[-1] for tokens in first["tokens"]]
    for found, expected in zip(first["tokens"], decoded(folder, {}), strict=True):
        count = min(len(found), len(expected))
        assert count > 8 and found[:count] == expected[:count]
    if algorithm == "STANDALONE":
        assert sum(map(len, first["tokens"])) > 8 * 2 * len(first["tokens"]), "its drafts are right"
