"""The plan: every value in force, with its source and reason; nothing overwritten, nothing forgotten."""

from typing import Any

import msgspec
import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from msgspec import structs

from runtime.errors import ModelError, OptionsError
from runtime.models.config.block import ScoreKind
from runtime.models.config.mla_config import MlaConfig
from runtime.models.config.moe_config import MoeConfig, Routing
from runtime.options.facts import DEVICES, MachineFacts, device_facts
from runtime.options.parse import from_argv, from_values
from runtime.options.plan import Plan, Provenance
from runtime.options.resolve import plan_for, resolve
from runtime.options.table import Row, by_flag, by_name, rows


class Model:
    context_len, dtype, vocab_size, num_heads, num_kv_heads, pooling = 4096, "bfloat16", 1000, 8, 4, None
    num_recurrent_layers, transformers_json, windows = 0, None, (0, 1024)
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    quantization = None
    head_dim, longest_head, scores, kv_sources, shares_blocks = 128, 128, ScoreKind(), (), False
    head_sizes = frozenset((128,))
    chunk, media, diffusion = 0, None, None


PLAN_ONLY = {"num_ranks": "parallel", "max_step_tokens": "schedule"}  # values that are no options
MACHINE = MachineFacts(cores=8, memory_bytes=2**34, entropy=7)


def plan(words: str = "") -> Plan:
    parsed = from_argv(words.split())
    return resolve(parsed, Model, device_facts(parsed.options.parallel.device), MACHINE)


@pytest.mark.parametrize(
    ("words", "name", "value", "source"),
    [
        ("", "page_size", 16, "derived"),
        ("--page-size 4", "page_size", 4, "flag --page-size"),
        ("", "host", "127.0.0.1", "default"),
        ("--dtype half", "dtype", "float16", "flag --dtype"),
        ("--dtype auto", "dtype", "bfloat16", "derived"),
        ("-m /some/folder", "served_model_name", "/some/folder", "derived"),
        ("", "served_model_name", "pocket", "derived"),
        ("-m /some/folder", "tokenizer_path", "/some/folder", "derived"),
        ("--max-total-tokens 640", "max_total_tokens", 640, "flag --max-total-tokens"),
        ("", "max_total_tokens", None, "derived"),
        ("--chunked-prefill-size -1 --max-prefill-tokens 100", "max_step_tokens", 4096, "derived"),
        ("--tp 2", "num_threads", 3, "derived"),
        ("--device null", "chunked_prefill_size", 8192, "derived"),
        ("--device npu", "page_size", 128, "derived"),
        ("--device cuda", "lora_backend", "triton", "derived"),
        ("--device cuda --lora-backend triton", "lora_backend", "triton", "flag --lora-backend"),
        ("--device cuda --lora-backend csgmv", "lora_backend", "csgmv", "flag --lora-backend"),
        ("--device cpu", "lora_backend", "torch_native", "derived"),
        ("--device npu", "attention_backend", "ascend", "derived"),
        ("--device npu --dtype float32", "dtype", "float32", "flag --dtype"),
    ],
)
def test_values_and_sources(words: str, name: str, value: Any, source: str) -> None:
    made = plan(words)
    group = by_name()[name].group if name in by_name() else PLAN_ONLY[name]
    assert getattr(getattr(made, group), name) == value
    assert made.why[name].value == value and made.why[name].source == source


def test_every_value_is_explained() -> None:
    made = plan()
    works = {row.name for row in rows() if row.acts}
    assert works | {"num_ranks", "max_step_tokens"} == made.why.keys()
    assert all(origin.reason for origin in made.why.values() if origin.source == "derived")


def test_every_option_that_works_reaches_the_plan() -> None:
    made = plan()
    for name, origin in made.why.items():
        group = by_name()[name].group if name in by_name() else PLAN_ONLY[name]
        assert getattr(getattr(made, group), name) == origin.value, name


def test_what_auto_stands_for_has_the_type_of_its_value() -> None:
    """A group with an "auto" that is always derived narrows its type in the plan."""
    kinds = {field.name: field.type for field in structs.fields(Plan)}
    for name, origin in plan().why.items():
        if origin.source == "derived" and name in by_name():
            kind = kinds[by_name()[name].group]
            msgspec.convert(origin.value, {field.name: field.type for field in structs.fields(kind)}[name])


def test_nothing_is_left_to_choose() -> None:
    left = [name for name, origin in plan().why.items() if origin.value == "auto"]
    assert (
        left
        == (
            "tokenizer_mode load_format model_impl chat_template "
            "completion_template reasoning_parser tool_call_parser deepep_mode npu_soc"
        ).split()
    )


def test_the_embedded_model_is_a_word() -> None:
    made = plan()
    assert made.model.model_path.endswith("/pocket") and made.model.model_path.startswith("/")
    assert plan("-m ./pocket").model.model_path == "./pocket"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--tp 9",
            "--tensor-parallel-size 9 leaves ranks without any of the model's 8 attention heads; give at "
            "most 8",
        ),
        ("--context-length 5000", "--context-length 5000 is beyond the model's 4096 tokens"),
        ("--max-total-tokens 16 --page-size 16", "less than two pages"),
        (
            "--device npu --page-size 16",
            "--page-size 16 is not possible on npu; choose one of 128, 256, 384, 512",
        ),
        (
            "--device npu --kv-cache-dtype fp8_e4m3",
            "--kv-cache-dtype fp8_e4m3 is not possible on npu, which keeps keys and values in bfloat16",
        ),
        (
            "--attention-backend ascend",
            "--attention-backend ascend is not possible on cpu, which has torch_native",
        ),
        ("--sampling-backend ascend", "--sampling-backend ascend is not possible on cpu, which has pytorch"),
        (
            "--mm-attention-backend ascend_attn",
            "is not possible on cpu, whose towers have sdpa; leave it out",
        ),
        ("--mm-attention-backend fa3", "fa3"),
        ("--enable-multimodal true", "this runtime has no encoder of this model"),
        ("--base-gpu-id 2", "--base-gpu-id chooses among accelerators, and --device cpu is none"),
    ],
)
def test_rules_about_the_model(words: str, sentence: str) -> None:
    with pytest.raises(OptionsError) as caught:
        plan(words)
    assert any(sentence in problem for problem in caught.value.problems)


class Sparse(Model):
    moe = MoeConfig(
        num_experts=6,
        intermediate_size=36,
        shared_size=0,
        has_shared_gate=False,
        has_bias=False,
        layers=(True, True),
        routing=Routing(top_k=2),
    )


@pytest.mark.parametrize(
    ("words", "model", "sentence"),
    [
        ("--tp 2 --ep-size 2", Model, "--expert-parallel-size 2 spreads experts, and this model has none"),
        (
            "--tp 4 --ep-size 4",
            Sparse,
            "does not divide the model's 6 experts; choose a divisor, or fill the groups with copies: "
            "--ep-num-redundant-experts 2",
        ),
        ("--tp 4 --ep-size 2", Sparse, ""),
        ("--tp 2 --moe-a2a-backend deepep", Sparse, ""),
        (
            "--tp 2 --moe-a2a-backend deepep",
            Model,
            "--moe-a2a-backend deepep brings tokens to experts, and this model has none",
        ),
        (
            "--moe-a2a-backend deepep",
            Sparse,
            "and there is one; leave it out, or raise --tensor-parallel-size",
        ),
    ],
)
def test_rules_about_experts(words: str, model: type[Model], sentence: str) -> None:
    parsed = from_argv(words.split())
    if not sentence:
        assert resolve(parsed, model, DEVICES["cpu"], MACHINE).experts.expert_parallel_size == 2
        return
    with pytest.raises(OptionsError) as caught:
        resolve(parsed, model, device_facts(parsed.options.parallel.device), MACHINE)
    assert any(sentence in problem for problem in caught.value.problems)


class Latents(Model):
    mla = MlaConfig(kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128, is_interleaved=True)


def test_latents_have_pages_of_their_own() -> None:
    sentence = (
        r"--page-size 256 is not possible on npu with latent attention \(MLA\); choose 128, or leave it out"
    )
    with pytest.raises(OptionsError, match=sentence):
        resolve(from_argv(["--device", "npu", "--page-size", "256"]), Latents, DEVICES["npu"], MACHINE)
    assert resolve(from_argv(["--device", "npu"]), Latents, DEVICES["npu"], MACHINE).memory.page_size == 128


class Recurrent(Model):
    num_recurrent_layers = 3


def test_recurrent_layers_compute_no_trees() -> None:
    words = "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-num-draft-tokens"
    trees, chains = f"{words} 8 --speculative-eagle-topk 2", f"{words} 4 --speculative-eagle-topk 1"
    with pytest.raises(OptionsError, match="--speculative-eagle-topk 2 asks for trees"):
        resolve(from_argv(trees.split()), Recurrent, device_facts("auto"), MACHINE)
    assert resolve(from_argv(trees.split()), Model, device_facts("auto"), MACHINE)
    assert resolve(from_argv(chains.split()), Recurrent, device_facts("auto"), MACHINE)


def test_states_need_recurrent_layers() -> None:
    words = ["--max-mamba-cache-size", "8", "--mamba-scheduler-strategy", "extra_buffer"]
    with pytest.raises(
        OptionsError, match="--max-mamba-cache-size, --mamba-scheduler-strategy does nothing with this model"
    ):
        plan(" ".join(words))
    facts = device_facts("auto")
    made = resolve(from_argv(words), Recurrent, facts, MACHINE)
    assert (made.states.max_mamba_cache_size, made.states.state_interval) == (8, 256)
    assert resolve(from_argv([]), Recurrent, facts, MACHINE).states.mamba_scheduler_strategy == "extra_buffer"
    assert (
        resolve(from_argv(["--mamba-track-interval", "40"]), Recurrent, facts, MACHINE).states.state_interval
        == 0
    )
    for wrong, sentence in (
        (
            ["--mamba-track-interval", "40", "--mamba-scheduler-strategy", "extra_buffer"],
            "is no multiple of --page-size 16",
        ),
    ):
        with pytest.raises(OptionsError, match=sentence):
            resolve(from_argv(wrong), Recurrent, facts, MACHINE)


def test_pieces_of_recurrent_models_are_captured_and_not_compiled() -> None:
    words = ["--device", "cuda", "--enable-piecewise-cuda-graph"]
    assert resolve(from_argv(words), Recurrent, DEVICES["cuda"], MACHINE).graphs.piecewise_cuda_graph_tokens
    with pytest.raises(OptionsError, match="inductor does not compile recurrent layers"):
        compiled = [*words, "--piecewise-cuda-graph-compiler", "inductor"]
        resolve(from_argv(compiled), Recurrent, DEVICES["cuda"], MACHINE)


def test_kernels_of_recurrent_layers_are_the_devices() -> None:
    def backend(device: str, *words: str) -> tuple[str, str]:
        why = resolve(from_argv([*words]), Recurrent, DEVICES[device], MACHINE).why["mamba_backend"]
        return str(why.value), why.reason

    assert backend("cpu") == ("cpu", "they are the kernels of cpu")
    assert backend("cuda", "--device", "cuda")[0] == "torch_native"
    assert backend("cpu", "--mamba-backend", "torch_native")[0] == "torch_native"
    with pytest.raises(
        OptionsError, match="--mamba-backend cpu is not possible on cuda, which has torch_nat"
    ):
        backend("cuda", "--device", "cuda", "--mamba-backend", "cpu")
    assert backend("cuda", "--device", "cuda", "--mamba-backend", "triton")[0] == "triton"
    with pytest.raises(OptionsError, match="--mamba-backend triton is not possible on cpu, which has cpu"):
        backend("cpu", "--mamba-backend", "triton")
    assert backend("cuda", "--device", "cuda", "--mamba-backend", "flashinfer")[0] == "flashinfer"
    with pytest.raises(OptionsError, match="--mamba-backend flashinfer is not possible on cpu"):
        backend("cpu", "--mamba-backend", "flashinfer")
    with pytest.raises(OptionsError, match="--mamba-backend does nothing with this model"):
        plan("--mamba-backend torch_native")


def test_what_the_device_lacks_is_refused() -> None:
    parsed = from_argv(["--dtype", "bfloat16"])
    with pytest.raises(OptionsError, match="not possible on cpu; choose one of float32"):
        resolve(parsed, Model, structs.replace(DEVICES["cpu"], dtypes=("float32",)), MACHINE)


def test_all_broken_rules_are_shown() -> None:
    with pytest.raises(OptionsError) as caught:
        plan("--tp 99 --context-length 5000 --max-total-tokens 1")
    assert len(caught.value.problems) == 3


def test_options_of_the_null_device_are_for_its_ranks_only() -> None:
    assert plan().device_options == {}
    assert plan("--device null --null-step-s 0.5").device_options == {
        "step_s": 0.5,
        "token_s": 0.0,
        "vocab_size": 1000,
        "first_token": 97,
        "num_tokens": 26,
        "script": [],
        "fail_at_step": None,
        "poison_token": None,
        "poison": "raise",
    }


def test_secrets_are_hidden() -> None:
    made = structs.replace(
        plan(), why={"api_key": Provenance("s3cret", "flag --api-key"), "port": Provenance(1, "default")}
    )
    assert made.public() == {
        "api_key": {"value": "(hidden)", "source": "flag --api-key", "reason": ""},
        "port": {"value": 1, "source": "default", "reason": ""},
    }
    assert by_name()["api_key"].secret and by_name()["admin_api_key"].secret


def test_the_same_facts_give_the_same_plan() -> None:
    assert plan("--tp 2") == plan("--tp 2")


def test_a_folder_without_a_model() -> None:
    with pytest.raises(ModelError):
        plan_for(from_values({"model_path": "/does/not/exist"}))


CHOICES = [
    (row, choice)
    for row in rows()
    if row.acts and not row.name.startswith("null_")
    for choice in row.choices or ()
    if choice not in row.later and f" {choice}," not in f"{row.missing},".replace(":", ",")
]


@pytest.mark.parametrize(("row", "choice"), CHOICES, ids=lambda x: x if isinstance(x, str) else x.flag)
def test_a_choice_that_is_here_is_possible_somewhere(row: Row, choice: str) -> None:
    """What no device does is named as missing by the table."""
    refusals = []
    for device in DEVICES:
        try:
            plan(f"{'' if row.name == 'device' else f'--device {device}'} {row.flag} {choice}")
        except OptionsError as error:
            refusals += [
                problem
                for problem in error.problems
                if f"{row.flag} {choice} " in problem
                and any(
                    words in problem for words in ("is not possible on", "has no adapter", "not here yet")
                )
            ]
    assert len(refusals) < len(DEVICES), refusals[0]


def test_all_ranks_hold_whole_experts_with_the_former_switch() -> None:
    parsed = from_argv("--tp 2 --enable-ep-moe".split())
    made = resolve(parsed, Sparse, DEVICES["cpu"], MACHINE)
    assert made.experts.expert_parallel_size == 2
    assert made.why["expert_parallel_size"] == Provenance(
        2, "flag --enable-ep-moe", "tp is --tensor-parallel-size: whole experts on every rank"
    )


@pytest.mark.parametrize(
    ("asked", "tokens", "says"),
    [("auto", 96, False), ("96", 96, False), ("100", 96, True), ("9999999999", 96, True)],
)
def test_what_became_of_the_tokens_that_were_asked_for(asked: str, tokens: int, says: bool) -> None:
    notice = plan(f"--max-total-tokens {asked}").memory.pool_notice(tokens)
    assert bool(notice) == says and (not says or f"--max-total-tokens {asked} became {tokens}: " in notice)


@pytest.mark.parametrize(
    ("device", "other"), [("cpu", "triton"), ("cuda", "torch_native"), ("npu", "triton")]
)
def test_adapters_have_the_kernels_of_the_device(device: str, other: str) -> None:
    with pytest.raises(OptionsError, match=f"--lora-backend {other} is not possible on {device}"):
        plan(f"--device {device} --lora-backend {other}")


names = sorted(
    flag for flag, row in by_flag().items() if (row.acts or row.status == "superseded") and flag != "--config"
)


@settings(max_examples=200, deadline=None)
@examples(
    st.lists(
        st.tuples(
            st.sampled_from(names), st.sampled_from(["1", "2", "3", "16", "auto", "-1", "0.5", "true"])
        ),
        max_size=6,
    )
)
def test_any_flags_give_a_plan_or_sentences(pairs: list[tuple[str, str]]) -> None:
    try:
        made = plan(" ".join(word for pair in pairs for word in pair))
    except OptionsError as error:
        assert error.problems and all(error.problems)
    else:
        assert made.schedule.max_step_tokens >= 1 and made.parallel.num_threads >= 1
