"""Kernels of attention by name: a device has its own, and an error says what the others would take."""

from typing import Any

import pytest
from msgspec import structs

from runtime.devices.attention_backends import BACKENDS, why_not, why_unsuited
from runtime.errors import OptionsError
from runtime.models.config.block import ScoreKind
from runtime.models.config.mla_config import IndexerConfig
from runtime.models.config.moe_config import MoeConfig, Routing
from runtime.options.facts import DEVICES
from runtime.options.parse import from_argv
from runtime.options.plan import Plan
from runtime.options.resolve import resolve
from runtime.options.table import by_name
from tests.options.test_plan import MACHINE, Latents, Model

INDEXER = IndexerConfig(num_heads=8, dim=64, top_k=512)


def test_devices_attend_with_their_own() -> None:
    for facts in DEVICES.values():
        assert why_not(facts.attention_backend, None, facts) is None and facts.attention_backend in BACKENDS
    assert set(BACKENDS) <= set(by_name()["attention_backend"].choices or ())


@pytest.mark.parametrize(
    ("name", "phase", "device", "reason"),
    [
        ("triton", None, "cpu", "not possible on cpu"),
        ("cutlass_mla", "decode", "cuda", "package"),
        ("aiter", None, "cuda", "not possible on cuda"),
        ("cutlass_mla", None, "cuda", "no adapter here yet"),
        ("cutlass_mla", "prefill", "cuda", "has no prefill"),
        ("trtllm_mla", "prefill", "cuda", "has no prefill"),
        ("torch_native", None, "npu", "ascend"),
    ],
)
def test_errors_say_what_is_missing(name: str, phase: str | None, device: str, reason: str) -> None:
    assert reason in (why_not(name, phase, DEVICES[device]) or "")


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("triton", (64, "float32", "fp8_e4m3", None), None),
        ("torch_native", (1, "bfloat16", "fp8_e4m3", 80), None),
        ("torch_native", (64, "bfloat16", "bfloat16", None), "no latent attention"),
        ("cudnn", (16, "bfloat16", "fp8_e4m3", None), None),
        ("flashmla", (64, "bfloat16", "bfloat16", 128), "for latent attention"),
        ("flashmla", (16, "bfloat16", "bfloat16", None), "pages of 64"),
        ("flashmla", (64, "bfloat16", "bfloat16", None), None),
        ("flashmla", (64, "bfloat16", "fp8_e4m3", None), "pages of bfloat16 only"),
        ("flashmla", (64, "float32", "float32", None), "computes in bfloat16 and float16"),
    ],
)
def test_what_suits_a_model(name: str, facts: tuple[int, str, str, int | None], reason: str | None) -> None:
    found = why_unsuited(name, *facts)
    assert found is None if reason is None else reason in (found or "")


def card(words: str, **changes: Any) -> Plan:
    return resolve(
        from_argv(["--device", "cuda", *words.split()]),
        type("Changed", (Model,), changes),
        DEVICES["cuda"],
        MACHINE,
    )


def test_decodes_without_graphs() -> None:
    """Decodes that cannot be captured are launched one by one; asking for graphs of them is an error."""
    made = card("--decode-attention-backend torch_native")
    assert made.graphs.cuda_graph_max_bs == 0 and "not captured" in made.why["cuda_graph_max_bs"].reason
    assert card("--prefill-attention-backend flex_attention").graphs.cuda_graph_max_bs > 0
    with pytest.raises(
        OptionsError, match="--cuda-graph-bs: decodes of --attention-backend flex_attention are not captured"
    ):
        card("--attention-backend flex_attention --cuda-graph-bs 4")


def test_models_that_kernels_do_not_know() -> None:
    with pytest.raises(
        OptionsError,
        match=r"--prefill-attention-backend torch_native .* has no latent attention \(MLA\); take triton",
    ):
        card("--attention-backend torch_native", mla=Latents.mla)
    with pytest.raises(OptionsError, match="trtllm_mha .*caps no scores"):
        card("--attention-backend trtllm_mha", scores=ScoreKind(cap=50.0))
    with pytest.raises(OptionsError, match="flashmla .*rotary parts of 512 and 64 numbers"):
        card("--attention-backend flashmla", mla=structs.replace(Latents.mla, kv_rank=256))
    with pytest.raises(OptionsError, match="fa3 .*adds no biases of distance"):
        card("--attention-backend fa3 --page-size 16", scores=ScoreKind(is_biased=True))
    with pytest.raises(OptionsError, match="attend to some others.* cuda"):
        card("", mla=structs.replace(Latents.mla, indexer=INDEXER))
    for scores in (ScoreKind(cap=50.0), ScoreKind(has_sinks=True), ScoreKind(is_biased=True)):
        assert card("", scores=scores).kernels.attention_backend == "triton"
        changed = type("Changed", (Model,), {"scores": scores})
        plan = resolve(from_argv(["--device", "npu"]), changed, DEVICES["npu"], MACHINE)
        assert plan.kernels.attention_backend == "ascend"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--tp-size 2 --ep-size 2", "experts are on all ranks, split"),
        ("--tp-size 2 --moe-a2a-backend deepep", "this model's are split"),
    ],
)
def test_experts_of_one_tensor(words: str, reason: str) -> None:
    moe = MoeConfig(
        num_experts=4,
        intermediate_size=8,
        shared_size=0,
        has_shared_gate=False,
        has_bias=False,
        layers=(True,),
        routing=Routing(top_k=2),
        is_stacked=True,
    )
    with pytest.raises(OptionsError, match=reason):
        card(words, moe=moe)
