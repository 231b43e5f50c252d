"""Stages of a pipeline against transformers, and against one rank: tokens, drafts, states and pages."""

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.layers.weight import StageLayers, named_weights
from runtime.messages.ranks import RankReady, StepOverlap
from runtime.messages.stages import Stage
from runtime.scheduling.drafts import Draft
from tests.devices.drive import Planner, Row, page_copies, sampling, start
from tests.devices.stages import StagedExecutor, start_stages
from tests.models.compare import Checkpoints, in_company, maker, open_checkpoints, random_prompts
from tests.models.make import make_checkpoint
from tests.models.make_pooled import make_pooled
from tests.models.quantise import quantise
from tests.models.reference import Reference
from tests.ranks import lora_slots
from tests.ranks.test_verify import PARAMS, Guesses, finish, prefilled
from tests.ranks.test_windows import MODELS, WINDOW

NUM_TOKENS = 12
# four layers each: what differs from the sizes of make.py
LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LAYERS),
    "llama tied": ("llama", LAYERS | {"tie_word_embeddings": True}),
    "mistral window": ("mistral", LAYERS | {"sliding_window": 7}),
    "gemma2": ("gemma2", LAYERS | {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "qwen3_moe": ("qwen3_moe", LAYERS | {"mlp_only_layers": [0, 2]}),
    "deepseek_v3": ("deepseek_v3", LAYERS),
    "deepseek_v32": ("deepseek_v32", LAYERS | {"mlp_layer_types": None}),
    "olmo2": ("olmo2", LAYERS),
    "smollm3": ("smollm3", LAYERS | {"no_rope_layers": [1, 0, 1, 0]}),
    "jamba": ("jamba", {}),
    "qwen3_next": ("qwen3_next", {}),
    "falcon_h1": ("falcon_h1", {}),
    "gpt2": ("gpt2", LAYERS),
    "bloom": ("bloom", LAYERS),
}


def prompts() -> list[list[int]]:
    return random_prompts(1, 9, 30, 41)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return open_checkpoints(tmp_path_factory, maker(CASES), prompts(), NUM_TOKENS)


def opened(folder: Path, count: int, page_size: int = 4, **options: Any) -> tuple[StagedExecutor, Planner]:
    executor = start_stages(folder, count, page_size=page_size, num_states=12, **options)
    return executor, Planner(executor, executor.ready, page_size)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, count: int, checkpoints: Checkpoints) -> None:
    """Sequences join while others decode, with prompts in chunks that end anywhere."""
    folder, _, expected = checkpoints(case)
    executor, planner = opened(folder, count)
    assert in_company(planner, prompts(), NUM_TOKENS, chunk=7) == expected
    assert not any(executor.wires.hidden), "each stage takes what the one before sends"
    assert len(executor.wires.tokens[0]) == 1, "the tokens of the last step are due"


@pytest.mark.parametrize("case", ["deepseek_v3", "gemma2", "jamba", "llama tied"])
def test_stages_of_two_micro_batches(case: str, checkpoints: Checkpoints) -> None:
    """What a stage sends on is of both; the next one cuts it where its own plan says."""
    folder, _, expected = checkpoints(case)
    executor, planner = opened(folder, 2, overlap=StepOverlap(two_batches=True))
    cuts: list[int] = []
    for stage in executor.stages:
        watch_cuts(stage.runner.inputs, cuts)
    assert in_company(planner, prompts(), NUM_TOKENS, chunk=7) == expected
    assert len(cuts) > 20 and not any(executor.wires.hidden)


def watch_cuts(inputs: Any, cuts: list[int]) -> None:
    """Notes the tokens of the first of two micro-batches."""
    make = inputs.batch

    def batch(*arguments: Any) -> Any:
        made = make(*arguments)
        if made.micro_batches is not None:
            cuts.append(len(made.micro_batches[0].positions))
        return made

    inputs.batch = batch


@pytest.mark.parametrize("num_layers, count", [(5, 2), (7, 4), (3, 3), (61, 8)])
def test_every_layer_is_in_one_stage(num_layers: int, count: int) -> None:
    parts = [Stage(i, count).layers(num_layers) for i in range(count)]
    assert [i for part in parts for i in part] == list(range(num_layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_stage_has_the_weights_and_pages_of_its_layers(checkpoints: Checkpoints) -> None:
    folder, _, _ = checkpoints("llama")
    executor, _ = opened(folder, 3)
    models: list[Any] = [stage.runner.model for stage in executor.stages]
    names = [
        [name for name, _ in named_weights(model) if name.endswith("input_layernorm.weight")]
        for model in models
    ]
    assert names == [[f"layers.{i}.input_layernorm.weight" for i in own] for own in ((0, 1), (2,), (3,))]
    assert [isinstance(model.layers, StageLayers) and model.layers.first for model in models] == [0, 2, 3]
    assert [model.embed_tokens is not None for model in models] == [True, False, False]
    assert [model.lm_head is not None for model in models] == [False, False, True]
    assert [len(stage.runner.kv) for stage in executor.stages] == [2, 1, 1]
    whole = start(folder)[1]
    ready = [stage.ready for stage in executor.stages]
    assert sum(one.weights_bytes for one in ready) == whole.weights_bytes
    assert sum(one.pages_bytes for one in ready) == whole.pages_bytes


def test_a_missing_weight_is_missed_by_its_stage_alone(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", **LAYERS)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    extra = tensors["model.layers.3.mlp.down_proj.weight"]
    save_file(tensors | {"model.layers.3.mlp.other.weight": extra.clone()}, path)
    with pytest.raises(ModelError, match="does not use"):
        start_stages(folder, 2)
    del tensors["model.layers.3.mlp.down_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match="lacks 1 weights"):
        start_stages(folder, 2)


def test_stages_compute_different_steps_at_a_time(checkpoints: Checkpoints) -> None:
    """The first stage is a step ahead of the last one, with other sequences."""
    folder, reference, _ = checkpoints("llama")
    executor, planner = opened(folder, 2)
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts()[1:3])]
    for row in rows:
        planner.prefill(row)
    first, last = executor.stages
    for _ in range(NUM_TOKENS - 1):
        plans = [planner.plan([row], []) for row in rows]
        for plan in plans:
            assert first.launch(plan).result() is None
        for row, plan in zip(rows, plans, strict=True):
            result = last.launch(plan).result()
            assert result is not None
            row.tokens.append(int(result.token_ids[0]))
    for row in rows:
        assert row.tokens[row.prompt_len :] == reference.greedy(row.tokens[: row.prompt_len], NUM_TOKENS)


def test_tokens_are_received_when_they_are_needed_and_no_later(checkpoints: Checkpoints) -> None:
    """A sequence that has ended leaves a token that no step needs: it is taken after some others."""
    folder, _, _ = checkpoints("llama")
    executor, planner = opened(folder, 2, steps_in_flight=3)
    rows = [planner.row(slot, [slot, 5], sampling()) for slot in range(8)]
    for row in rows:
        planner.prefill(row)
        assert len(executor.wires.tokens[0]) <= 4
    pipeline = executor.stages[0].runner.pipeline
    assert pipeline is not None and len(pipeline.due) == len(executor.wires.tokens[0]) == 4
    assert executor.stages[1].runner.pipeline is not None and not executor.stages[1].runner.pipeline.due


@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("name", ["greedy", "random", "penalties", "logprobs"])
def test_drafts(name: str, has_trees: bool, checkpoints: Checkpoints) -> None:
    """All stages accept the same drafts: one in the middle needs the tokens as well."""
    folder, _, _ = checkpoints("llama")
    executor, ready = start(folder)
    alone = Planner(executor, ready, 4)
    expected = prefilled(alone, PARAMS[name])
    for _ in range(23):
        alone.run(expected, [])
    truths = [row.tokens[row.prompt_len :] for row in expected]
    for luck in (0.0, 0.7, 1.0):
        staged, planner = opened(folder, 3)
        finish(planner, prefilled(planner, PARAMS[name]), truths, Guesses(3, luck, has_trees=has_trees))
        assert {stage for kind, stage, _ in staged.wires.sent if kind == "tokens"} == {0, 1}


def test_drafts_over_states(checkpoints: Checkpoints) -> None:
    """Each stage moves its states on over what is accepted."""
    folder, reference, _ = checkpoints("jamba")
    _, planner = opened(folder, 2)
    row = planner.row(0, prompts()[1], sampling())
    planner.prefill(row)
    answer = reference.greedy(prompts()[1], 12)
    planner.run([], [], [(row, Draft([*answer[1:4], answer[4] + 1]))])
    assert row.tokens[row.prompt_len :] == answer[:5]
    planner.run([], [], [(row, Draft([answer[5] + 1, 3, 4]))])
    planner.run([], [], [(row, Draft(answer[6:8], is_sure=True))])
    while len(row.tokens) < row.prompt_len + 12:
        planner.run([row], [])
    assert row.tokens[row.prompt_len :] == answer


def test_log_probabilities_and_random_tokens_are_those_of_one_rank(checkpoints: Checkpoints) -> None:
    folder, _, _ = checkpoints("qwen3_moe")
    params = sampling(temperature=0.8, seed=3, top_logprobs=2, prompt_logprobs=1, repetition_penalty=1.2)

    def run(planner: Planner) -> Row:
        row = planner.row(0, prompts()[2], params)
        planner.generate(row, NUM_TOKENS, chunk=11)
        return row

    executor, ready = start(folder)
    one, staged = run(Planner(executor, ready, 4)), run(opened(folder, 2)[1])
    assert staged.tokens == one.tokens
    for mine, theirs in zip(staged.results, one.results, strict=True):
        assert mine[2] == theirs[2] and mine[1] == pytest.approx(theirs[1], abs=1e-5)
    for part, other in zip(staged.prompt, one.prompt, strict=True):
        assert part.logprobs == pytest.approx(other.logprobs, abs=1e-5, nan_ok=True)


def test_pages_of_all_stages_go_to_host_memory_and_come_back(checkpoints: Checkpoints) -> None:
    folder, _, expected = checkpoints("llama")
    fds = [os.memfd_create(f"host-{i}") for i in range(2)]
    try:
        staged, planner = opened(folder, 2, host_ratio=1.0, host_fds=fds, max_total_tokens=256)
        first = planner.row(0, prompts()[3], sampling())
        planner.prefill(first)
        hosts = [9, 2, 31, 4, 17]
        planner.page_copies = page_copies(saves=dict(zip(first.pages[:5], hosts, strict=True)))
        planner.run([], [])
        assert staged.wires.sent[-1] == ("hidden", 1, (1, 1)), "the last stage waits for the copies"
        planner.free = first.pages + planner.free
        second = planner.row(1, prompts()[3], sampling())
        second.pages, second.computed = [planner.free.pop() for _ in hosts], 20
        planner.page_copies = page_copies(loads=dict(zip(hosts, second.pages, strict=True)))
        assert planner.generate(second, NUM_TOKENS) == expected[3]
        staged.close()
    finally:
        for fd in fds:
            os.close(fd)


def test_quantized_layers(tmp_path: Path) -> None:
    """A stage finds the quantized modules of its layers by their names in the whole model."""
    plain = make_checkpoint("qwen3", tmp_path / "plain", **LAYERS)
    quantise(plain, tmp_path, "awq", leave=("layers.2.",))
    folder = tmp_path / "quantised"
    executor, ready = start(folder)
    expected = in_company(Planner(executor, ready, 4), prompts(), NUM_TOKENS, chunk=7)
    staged, planner = opened(folder, 2)
    assert in_company(planner, prompts(), NUM_TOKENS, chunk=7) == expected
    assert sum(stage.ready.weights_bytes for stage in staged.stages) == ready.weights_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_adapters(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage adds what an adapter has for its layers."""

    def start_two(folder: Path, **options: Any) -> tuple[StagedExecutor, RankReady]:
        staged = start_stages(folder, 2, **options)
        return staged, staged.ready

    monkeypatch.setattr(lora_slots, "start", start_two)
    folder = make_checkpoint(family, tmp_path / "model", **LAYERS)
    targets = lora_slots.ALL if family == "llama" else ("q_proj", "v_proj", "o_proj")
    staged: Any = lora_slots.decode_with_adapters(folder, tmp_path, 3, targets=targets)
    paths = [stage.runner.adapters.lora_slots for stage in staged.stages]
    assert all(paths) and not set(paths[0]) & set(paths[1])


@pytest.mark.parametrize("name", MODELS)
def test_windows_with_pages_of_their_own(name: str, tmp_path: Path) -> None:
    """Of four layers, two a stage; a stage may have layers of one kind alone."""
    family, overrides = MODELS[name]
    folder = make_checkpoint(family, tmp_path, **(overrides | LAYERS))
    reference = Reference(folder)
    for count in (2, 4):
        staged = start_stages(folder, count, page_size=4, max_step_tokens=8, window_ratio=0.05)
        planner = Planner(staged, staged.ready, 4, window=WINDOW)
        row = planner.row(3, prompts()[3], sampling())
        assert planner.generate(row, NUM_TOKENS, chunk=7) == reference.greedy(prompts()[3], NUM_TOKENS)


def test_a_decoder_that_pools(tmp_path: Path) -> None:
    """The last stage makes the vectors."""
    folder = make_pooled("qwen3", "classify", tmp_path)
    executor, ready = start(folder)
    alone = Planner(executor, ready, 4)
    staged, planner = opened(folder, 2)
    for slot, prompt in enumerate(prompts()):
        found = []
        for one in (alone, planner):
            row = one.row(slot, prompt, sampling())
            result = one.executor.launch(one.plan([], [(row, len(prompt))])).result()
            assert result is not None and result.vectors is not None
            found.append(result.vectors)
        assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert {kind for kind, _, _ in staged.wires.sent} == {"hidden"}, "there are no tokens"
