"""The cost model counts what models hold: every weight is read once in a step of one token."""

import pytest

from bench.ascend_model import REFERENCES, Reference, predict, seconds
from bench.ascend_operators import (
    A3,
    LAUNCHES,
    PEAK,
    Layout,
    Load,
    Operator,
    Reach,
    decode_step,
    host_seconds,
    step,
)
from bench.shapes import shape
from runtime.options.model_sizes import qk_norm_count, weight_count


def matrix_bytes(operators: list[Operator]) -> float:
    return sum(o.count * o.num_bytes for o in operators if o.kind == "matrix")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_step_reads_the_weights_once(name: str, ranks: int) -> None:
    model = shape(name)
    operators = list(step(model, Layout(attention_ranks=ranks), Load(tokens=1e-9, context=1)))
    embedding, norms = (
        model.vocab_size // ranks * model.hidden_size,
        (2 * model.num_layers + 1) * model.hidden_size,
    )
    norms += qk_norm_count(model) * model.num_layers
    assert matrix_bytes(operators) == pytest.approx(
        2 * (weight_count(model, ranks) - embedding - norms), rel=1e-6
    )


@pytest.mark.parametrize(("name", "expert_ranks"), [("deepseek-r1", 32), ("qwen3-235b-a22b", 16)])
def test_many_tokens_hit_all_experts(name: str, expert_ranks: int) -> None:
    model = shape(name)
    operators = step(model, Layout(attention_ranks=1, expert_ranks=expert_ranks), Load(tokens=1e5, context=1))
    assert model.moe is not None
    read = sum(o.count * o.num_bytes for o in operators if o.name.startswith("npu_grouped_matmul"))
    own = model.moe.num_experts // expert_ranks * 3 * model.hidden_size * model.moe.intermediate_size
    assert read == pytest.approx(2 * own * sum(model.moe.layers))


def test_longer_contexts_and_fewer_devices_take_longer() -> None:
    def taken(load: Load, layout: Layout) -> float:
        return sum(o.seconds(A3, Reach()) for o in step(shape("qwen3-32b"), layout, load))

    alone, shared = Layout(attention_ranks=1), Layout(attention_ranks=8)
    assert taken(Load(tokens=16, context=1000), shared) < taken(Load(tokens=16, context=16000), shared)
    assert taken(Load(tokens=16, context=1000), shared) < taken(Load(tokens=16, context=1000), alone)


@pytest.mark.parametrize(
    "reference", REFERENCES, ids=lambda reference: f"{reference.model}-{reference.prompt}"
)
def test_no_published_time_is_below_what_peaks_allow(reference: Reference) -> None:
    tokens = 1 + reference.drafts
    assert 1000 * seconds(reference, A3, PEAK, tokens) < tokens * reference.tpot_ms
    row = predict(reference, A3, Reach())
    assert 0 < row["bound_ms"] < row["step_ms"] < row["verify_ms"]
    assert row["tokens_needed"] == pytest.approx(row["verify_ms"] / reference.tpot_ms, abs=0.01)


def test_small_launches_and_the_host_count() -> None:
    model, layout, load = shape("qwen3-32b"), Layout(attention_ranks=16), Load(tokens=1, context=1000)
    operators = decode_step(model, layout, load)
    of_model = sum(operator.count for operator in step(model, layout, load))
    counted = max(LAUNCHES["heads", "dense", False] * model.num_layers, of_model)
    assert sum(operator.count for operator in operators) == counted
    assert host_seconds(model, layout, Reach(update_s=1.0, replay_s=2.0)) == 66.0
    sparse = Layout(attention_ranks=4, expert_ranks=32, sparse_tokens=2048)
    assert host_seconds(shape("deepseek-v3.2"), sparse, Reach(update_s=1.0, replay_s=2.0)) == 2.0
    shared = decode_step(model, layout, Load(tokens=4, context=1000, queries=4))
    reads = [o.num_bytes for o in operators + shared if o.name == "npu_fused_infer_attention_score"]
    assert reads[0] == reads[1], "the queries of a sequence share what they read"
