"""The memory plan against what a rank measures: equal for every family, whole or split."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from runtime.devices.progress import without_progress
from runtime.errors import ModelError
from runtime.messages.stages import Stage
from runtime.models.config.model_config import read_config
from runtime.options.facts import MachineFacts
from runtime.options.footprint import Footprint, footprint, stored_weights
from runtime.options.model_sizes import offloaded_bytes, weight_count
from runtime.options.parse import from_values
from runtime.options.plan import Plan
from runtime.options.quantized_sizes import Ranks
from runtime.options.resolve import plan_for
from runtime.options.stage_sizes import stage_weight_count
from tests.models.make import FAMILIES, make_checkpoint
from tests.models.make_pooled import make_pooled
from tests.options.footprint_variants import OTHERWISE, VARIANTS

MACHINE = MachineFacts(cores=2, memory_bytes=2**30, entropy=1)


def planned(folder: Path, machine: MachineFacts = MACHINE, **options: Any) -> tuple[Plan, Footprint]:
    plan = plan_for(from_values({"model_path": str(folder)} | options), machine)
    takes_media = options.get("enable_multimodal", True)
    model = read_config(folder, quantization=options.get("quantization"), takes_media=takes_media)
    return plan, footprint(plan, model, machine, stored_weights(folder))


@pytest.mark.sampled(70)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_weights_are_those_in_the_files(family: str, variant: str, tmp_path: Path) -> None:
    overrides = VARIANTS[variant] | OTHERWISE.get((family, variant), {}) | OTHERWISE.get((family, ""), {})
    folder = make_checkpoint(family, tmp_path, shard_size="100KB", **overrides)
    _, found = planned(folder)
    stored = stored_weights(folder)
    assert stored.files > 1 and stored.dtype == "F32"
    assert found.weights_bytes == stored.num_bytes


@pytest.mark.parametrize(
    ("family", "top"),
    [
        ("bert", "embed"),
        ("roberta", "classify"),
        ("distilbert", "classify"),
        ("modernbert", "classify"),
        ("qwen3", "classify"),
    ],
)
def test_models_that_pool(family: str, top: str, tmp_path: Path) -> None:
    """Of their weights and their pages, which encoders do not have."""
    from runtime.ranks.open_executor import open_executor
    from runtime.settings import start_rank

    folder = make_pooled(family, top, tmp_path)
    plan, found = planned(folder, max_total_tokens=4096)
    rank = open_executor(0, start_rank(plan, read_config(folder)), without_progress)
    rank.close()
    ready = rank.ready
    assert (ready.weights_bytes, ready.pages_bytes, ready.num_pages) == (
        found.weights_bytes,
        found.pages_bytes,
        found.num_pages,
    )
    assert (found.pages_bytes == 0) == (family != "qwen3")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("mistral", "float16"),
        ("gemma3n", "float32"),
        ("gemma4", "float32"),
        ("qwen2", "float32"),
        ("qwen3", "bfloat16"),
        ("qwen3_moe", "bfloat16"),
        ("deepseek_v2", "bfloat16"),
        ("deepseek_v3", "bfloat16"),
    ],
)
def test_a_rank_measures_what_was_planned(family: str, dtype: str, tmp_path: Path) -> None:
    from runtime.ranks.open_executor import open_executor
    from runtime.settings import start_rank

    folder = make_checkpoint(family, tmp_path)
    plan, found = planned(folder, dtype=dtype, max_total_tokens=4096, page_size=8)
    rank = open_executor(0, start_rank(plan, read_config(folder)), without_progress)
    rank.close()
    ready = rank.ready
    assert (ready.weights_bytes, ready.pages_bytes, ready.num_pages) == (
        found.weights_bytes,
        found.pages_bytes + found.states_bytes,
        found.num_pages,
    )
    assert ready.num_state_slots == found.num_states


@pytest.mark.parametrize(
    ("options", "machine_bytes"),
    [
        ({}, 2**30),
        ({}, 2**24),
        ({"swa_full_tokens_ratio": 0.1}, 2**24),
        ({"disable_hybrid_swa_memory": True}, 2**24),
        ({"max_total_tokens": 640}, 2**30),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_windows_have_their_own_pages(
    family: str, options: dict[str, Any], machine_bytes: int, tmp_path: Path
) -> None:
    """A rank that finds as much memory takes as many pages of each kind."""
    from runtime.ranks.start import count_pages
    from runtime.settings import start_rank

    own: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}
    folder = make_checkpoint(family, tmp_path, sliding_window=20, **own)
    model = read_config(folder)
    plan, found = planned(
        folder, MachineFacts(cores=2, memory_bytes=machine_bytes, entropy=1), dtype="float32", **options
    )
    layer_bytes = found.token_bytes // 2
    token_bytes = (layer_bytes, layer_bytes) if family == "qwen2" else (0, 2 * layer_bytes)
    pools = count_pages(
        start_rank(plan, model), model.windows, found.budget_bytes - found.weights_bytes, token_bytes
    )
    assert (found.num_pages, found.num_window_pages) == (
        pools.full + 1,
        pools.window + 1 if pools.window else 0,
    )
    assert (found.num_window_pages == 0) == plan.memory.disable_hybrid_swa_memory
    assert found.weights_bytes + found.pages_bytes <= found.budget_bytes


def test_ranks_share_what_is_shared(tmp_path: Path) -> None:
    """Split weights halve; norms, and the key/value head that two ranks copy, stay."""
    config = read_config(make_checkpoint("llama", tmp_path, num_key_value_heads=1))
    norms = config.hidden_size * (2 * config.num_layers + 1)
    shared_heads = config.num_layers * 2 * config.head_dim * config.hidden_size
    padding = config.hidden_size * 2 * (2 * -(-config.vocab_size // 2) - config.vocab_size)
    assert 2 * weight_count(config, 2) == weight_count(config, 1) + norms + shared_heads + padding


def test_what_bounds_the_pages(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    assert planned(folder, max_total_tokens=640)[1].bound == "--max-total-tokens"
    assert "--max-running-requests" in planned(folder, max_running_requests=1)[1].bound
    tight = structs.replace(MACHINE, memory_bytes=2**21)
    assert "--mem-fraction-static" in planned(folder, tight)[1].bound
    nothing = planned(folder, structs.replace(MACHINE, memory_bytes=2**10))[1]
    assert (nothing.num_pages, nothing.pool_tokens, nothing.longest_tokens) == (1, 0, 0)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0{", b"\x04\0\0\0\0\0\0\0abcd"])
def test_broken_files_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        stored_weights(tmp_path)


SAMPLED = (
    "awq",
    "fp8 static",
    "fp8 block",
    "ct int8 static",
    "gptq 3",
    "gptq order",
    "nf4",
    "modelopt nvfp4",
)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", SAMPLED)
def test_quantised_weights_are_those_of_a_rank(name: str, family: str, tmp_path: Path) -> None:
    from tests.devices.drive import start
    from tests.models.quantise import quantise

    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    if family == "deepseek_v3":
        sizes |= {"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32}
    quantise(make_checkpoint(family, tmp_path / "plain", **sizes), tmp_path, name)
    _, found = planned(tmp_path / "quantised")
    taken = start(tmp_path / "quantised")[1].weights_bytes
    assert found.weights_bytes == pytest.approx(taken, rel=0.002)


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_int8", "int4"])
def test_weights_quantised_while_loading_are_those_of_a_rank(quantization: str, tmp_path: Path) -> None:
    from tests.devices.drive import start

    folder = make_checkpoint("qwen3_moe", tmp_path, moe_intermediate_size=32)
    _, found = planned(folder, quantization=quantization)
    assert found.weights_bytes == pytest.approx(
        start(folder, quantization=quantization)[1].weights_bytes, rel=0.002
    )


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "gpt2", "opt", "gptj"])
def test_layers_that_differ_or_have_no_gate(family: str, quantization: str, tmp_path: Path) -> None:
    """Layers without keys of their own, with other heads, with wider feed-forwards, and without gates."""
    from tests.devices.drive import start

    folder = make_checkpoint(family, tmp_path, intermediate_size=128, hidden_size=64)
    _, found = planned(folder, quantization=quantization)
    assert found.weights_bytes == pytest.approx(
        start(folder, quantization=quantization)[1].weights_bytes, rel=0.002
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_quantised_while_loading(family: str, tmp_path: Path) -> None:
    from tests.devices.drive import start

    folder = make_checkpoint(family, tmp_path)
    _, found = planned(folder, quantization="fp8")
    taken = start(folder, quantization="fp8")[1].weights_bytes
    assert found.weights_bytes == pytest.approx(taken, rel=0.03)


DENSE_TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", DENSE_TARGETS),
        ("qwen2_moe", DENSE_TARGETS),
        *((family, ("all",)) for family in ("jamba", "kimi_linear", "mamba2", "qwen3_5", "lfm2")),
    ],
)
def test_lora_slots(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """As many bytes as a rank takes for them."""
    from runtime.admin.adapter_registry import open_adapters
    from runtime.ranks.open_executor import open_executor
    from runtime.settings import start_rank

    own = {"shared_expert_intermediate_size": 64} if family == "qwen2_moe" else {}
    folder = make_checkpoint(family, tmp_path, **own)
    plan, plain = planned(
        folder, max_total_tokens=1024, enable_lora=True, max_lora_rank=8, lora_target_modules=targets
    )
    config = read_config(folder)
    adapters = open_adapters(plan, config)
    assert adapters is not None
    found = footprint(plan, config, MACHINE, stored_weights(folder), adapters.setup())
    rank = open_executor(0, start_rank(plan, config, adapters.setup()), without_progress)
    rank.close()
    ready = rank.ready
    assert (
        found.weights_bytes + found.adapters_bytes == ready.weights_bytes
        and found.total_bytes > plain.total_bytes
    )


def test_layers_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.messages.memory import OffloadSpec, WeightOffload, offloaded_layers
    from tests.devices.drive import start_rank as start_of
    from tests.devices.streams import StreamedRunner, Streams, install

    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=6)
    config, spec = read_config(folder), OffloadSpec(0, 2, 1, 0)
    offloaded, buffers = offloaded_bytes(spec, config, (1, 1, 1), 4)
    assert offloaded_layers(spec, [1] * 6) == (1, 3, 5) and offloaded == 3 * buffers > 0
    install(monkeypatch, streams := Streams(is_late=False))
    ready = StreamedRunner(streams, None, start_of(folder, offload_setup=WeightOffload(spec))).ready
    assert ready.weights_bytes == pytest.approx(weight_count(config, 1) * 4 - offloaded + buffers, rel=0.01)


def test_graphs_are_of_the_largest_step(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)

    def graphs_bytes(**options: Any) -> int:
        return planned(folder, device="cuda", dtype="bfloat16", **options)[1].graphs_bytes

    decodes = {"enable_piecewise_cuda_graph": False}
    assert 0 < graphs_bytes(**decodes, cuda_graph_max_bs=128) < graphs_bytes(**decodes) < graphs_bytes()
    assert planned(folder, device="cuda", dtype="bfloat16", disable_cuda_graph=True)[1].graphs_bytes == 0
    assert planned(folder)[1].graphs_bytes == 0


def test_what_is_given_back(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    _, found = planned(
        folder, device="cuda", dtype="bfloat16", enable_memory_saver=True, enable_weights_cpu_backup=True
    )
    assert found.host_bytes == found.weights_bytes
    assert found.releasable_bytes == found.total_bytes - found.activations_bytes


def test_what_a_draft_model_takes_of_host_memory(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "one")
    other = make_checkpoint("llama", tmp_path / "other", num_hidden_layers=1)
    options = {
        "device": "cuda",
        "dtype": "bfloat16",
        "enable_memory_saver": True,
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(other),
    }
    alone = planned(folder, **options, enable_draft_weights_cpu_backup=True)[1]
    target = planned(folder, **options, enable_weights_cpu_backup=True)[1]
    assert alone.host_bytes == alone.draft_weights_bytes > 0
    assert target.host_bytes == target.weights_bytes - target.draft_weights_bytes


@pytest.mark.parametrize(
    "case", [("llama", False), ("llama", True), ("qwen3_moe", False), ("mistral", False)]
)
def test_stages(case: tuple[str, bool], tmp_path: Path) -> None:
    """The plan shows the weights of one of the stages, and the pages of the stage that has fewest."""
    from tests.devices.stages import start_stages

    family, is_tied = case
    folder = make_checkpoint(family, tmp_path, num_hidden_layers=5, tie_word_embeddings=is_tied)
    plan, found = planned(
        folder, max_total_tokens=1024, pipeline_parallel_size=3, disable_hybrid_swa_memory=True
    )
    options = {"max_total_tokens": 1024, "page_size": plan.memory.page_size, "max_slots": 64, "max_len": 1024}
    ready = [stage.ready for stage in start_stages(folder, 3, **options).stages]
    config, sizes = read_config(folder), Ranks(1, 1, 1)
    counts = [4 * stage_weight_count(config, sizes, Stage(i, 3)) for i in range(3)]
    assert counts == [one.weights_bytes for one in ready]
    assert found.weights_bytes in counts and found.num_pages == min(one.num_pages for one in ready)
    assert found.token_bytes in [one.pages_bytes // one.num_pages // plan.memory.page_size for one in ready]


ENCODERS = {
    "llava": "make_media:make_llava",
    "qwen3_vl": "make_qwen3_vl:make_qwen3_vl",
    "gemma3": "make_gemma_vision:make_gemma_vision",
    "glm4v": "make_glm_vision:make_glm_vision",
    "onevision": "make_onevision:make_onevision",
    "deepseek_ocr": "make_deepseek_ocr:make_deepseek_ocr",
    "llama4": "make_tiles:Llama4",
    "deepseek_vl": "make_tiles:DeepSeekVl",
    "deepseek_hybrid": "make_tiles:DeepSeekVlHybrid",
    "aya_vision": "make_tiles:AyaVision",
    "command_a_vision": "make_tiles:Cohere2Vision",
    "idefics3": "make_tiles:Idefics3",
    "minicpmv": "make_minicpmv:MiniCpmV",
    "kimi": "make_moonvit:Kimi",
}


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_takes_what_a_rank_takes(family: str, tmp_path: Path) -> None:
    """Weights of the vision tower and the projector, and room for encoded images."""
    from runtime.devices.progress import without_progress
    from runtime.ranks.open_executor import open_executor
    from runtime.settings import start_rank

    module, name = ENCODERS[family].split(":")
    made = getattr(import_module(f"tests.models.{module}"), name)
    made().make(tmp_path) if isinstance(made, type) else made(tmp_path)
    taken = {}
    for is_on in (True, False):
        plan, found = planned(tmp_path, dtype="float32", max_total_tokens=4096, enable_multimodal=is_on)
        rank = open_executor(0, start_rank(plan, read_config(tmp_path)), without_progress)
        rank.close()
        assert rank.ready.weights_bytes == found.weights_bytes
        taken[is_on] = found
    assert taken[True].weights_bytes > taken[False].weights_bytes
    assert 0.999 * (256 << 20) < taken[True].encodings_bytes <= 256 << 20
    assert taken[False].encodings_bytes == 0


@pytest.mark.parametrize("backend", ["triton", "torch_native"])
def test_images_that_are_seen_both_ways_go_with_any_kernels(backend: str, tmp_path: Path) -> None:
    from tests.models.make_gemma_vision import make_gemma_vision

    make_gemma_vision(tmp_path)
    options = {"model_path": str(tmp_path), "device": "cuda", "attention_backend": backend}
    assert plan_for(from_values(options), MACHINE).model.enable_multimodal
