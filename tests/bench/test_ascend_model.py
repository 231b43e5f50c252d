"""The cost model counts what models hold: every weight is read once in a step of one token. Its layouts are
ones that this runtime takes, and its table is that of docs/ascend.md."""

from pathlib import Path

import pytest

from bench.ascend_model import HALVES, REFERENCES, Reference, predict, seconds
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
from runtime.options.facts import DEVICES, MachineFacts
from runtime.options.model_sizes import qk_norm_count, weight_count
from runtime.options.parse import from_values
from runtime.options.resolve import resolve


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


@pytest.mark.parametrize(
    "reference", REFERENCES, ids=lambda reference: f"{reference.model}-{reference.prompt}"
)
def test_this_runtime_takes_the_layout(reference: Reference) -> None:
    """The dies of a row as ranks: attention groups, experts spread over all, drafts; on as many servers."""
    model, layout = shape(reference.model), reference.layout
    dies = 2 * reference.decode_cards
    groups = dies // layout.attention_ranks
    length = reference.prompt + reference.output
    values: dict[str, object] = {"device": "npu", "tensor_parallel_size": dies, "context_length": length}
    values |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": reference.drafts + 1}
    if groups > 1:
        values |= {"data_parallel_size": groups, "enable_dp_attention": True}
    if layout.expert_ranks > 1:
        assert layout.expert_ranks == dies
        values |= {"expert_parallel_size": dies, "moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}
    if dies > 16:  # of a server
        values |= {"nnodes": dies // 16, "dist_init_addr": "10.0.0.1:5000"}
    plan = resolve(
        from_values(values), model, DEVICES["npu"], MachineFacts(cores=8, memory_bytes=2**36, entropy=1)
    )
    assert plan.parallel.num_ranks == dies
    # of the published recipes those of two servers compute prompts elsewhere
    assert (reference.lacks == HALVES) == (reference.decode_cards < reference.cards)


def test_the_documents_have_its_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text()
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    shown = [
        [float(cell.replace(" ms", "")) for cell in cells[1:]]
        for cells in lines
        if len(cells) == 9 and " + " in cells[0] and "ms" in cells[3]
    ]
    keys = ("bound_ms", "step_ms", "drafts", "verify_ms", "published_tpot_ms", "tokens_needed")
    assert len(shown) == len(REFERENCES)
    for (dies, sequences, *figures), reference in zip(shown, REFERENCES, strict=True):
        row = predict(reference, A3, Reach())
        assert dies == row["dies"] and sequences == pytest.approx(row["sequences_a_die"], abs=0.5)
        assert figures == pytest.approx([row[key] for key in keys], abs=0.06)
