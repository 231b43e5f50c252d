"""Profiles: what they set is in force with its reason, what they leave for later is not here yet, and
everything wins over them."""

import json
from pathlib import Path

import msgspec
import pytest

from runtime.devices.facts import DeviceFacts
from runtime.errors import OptionsError
from runtime.models.config.model_config import read_config
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.options.facts import DEVICES, MachineFacts
from runtime.options.parse import from_argv
from runtime.options.plan import Plan
from runtime.options.profile import names, read_profile
from runtime.options.profile_docs import markdown
from runtime.options.resolve import plan_for, resolve
from runtime.options.table import by_name

MACHINE = MachineFacts(cores=8, memory_bytes=2**36, entropy=1)
NPU = DEVICES["npu"]


def plan(words: str, device: DeviceFacts, machine: MachineFacts = MACHINE) -> Plan:
    folder = str(Path(__file__).parents[2] / "runtime" / "pocket")
    return resolve(from_argv(words.split()), read_config(folder), device, machine)


# of each model of a profile, what decides whether options go with it
LATENT: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
SPARSE = LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
HEADS: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_hidden_layers": 94,
    "vocab_size": 151936,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
MODELS = (("deepseek-r1", LATENT), ("deepseek-v3.2", SPARSE), ("qwen3", HEADS))
# what `when_given` waits for
GIVEN = {
    "speculative_draft_model_path": "/head",
    "dist_init_addr": "10.0.0.1:2000",
    "disaggregation_key_file": "/key",
}


@pytest.mark.parametrize("name", names())
def test_what_a_profile_sets_works_and_what_it_leaves_is_not_here(name: str, tmp_path: Path) -> None:
    profile = read_profile(name)
    assert profile.about and profile.source and profile.options
    groups = (profile.options, *profile.when_given.values(), profile.later)
    for option, line in (item for lines in groups for item in lines.items()):
        assert line.why and by_name()[option].acts, f"{name}: {option} does not work"
        assert msgspec.convert(line.value, by_name()[option].convert, strict=False) == line.value or (
            isinstance(line.value, list)
        )
    if not name.startswith("ascend"):
        assert not profile.later and not profile.when_given
        return
    assert profile.when_given.keys() <= GIVEN.keys()
    config = next(config for model, config in MODELS if model in name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_config(str(tmp_path))
    words = ["--profile", name]
    assert resolve(from_argv(words), model, NPU, MACHINE).why["tensor_parallel_size"].source.endswith(name)
    given = [word for option in profile.when_given for word in (by_name()[option].flag, GIVEN[option])]
    found = resolve(from_argv([*words, *given]), model, NPU, MACHINE)
    for option in (option for lines in profile.when_given.values() for option in lines):
        assert found.why[option].source == f"profile {name}"
    for option, line in profile.later.items():
        with pytest.raises(OptionsError):
            resolve(from_argv([*words, *given, by_name()[option].flag, str(line.value)]), model, NPU, MACHINE)


def test_what_waits_for_an_option_that_no_profile_knows() -> None:
    parsed = from_argv("--profile ascend-a3-qwen3-32b".split())
    assert any("goes on with --speculative-draft-model-path" in notice for notice in parsed.notices)
    assert parsed.options.speculation.speculative_algorithm is None
    parsed = from_argv("--profile ascend-a3-qwen3-32b --speculative-draft-model-path /head".split())
    assert parsed.options.speculation.speculative_algorithm == "EAGLE3" and not parsed.notices
    flags = "--speculative-num-steps 1 --speculative-num-draft-tokens 2"
    parsed = from_argv(f"--profile ascend-a3-qwen3-32b --speculative-draft-model-path /head {flags}".split())
    assert parsed.options.speculation.speculative_num_steps == 1, "flags win"


def test_a_profile_sets_values_with_their_reasons() -> None:
    found = plan_for(from_argv("--profile cpu-edge".split()), MACHINE)
    assert found.schedule.max_running_requests == 8
    assert found.public()["max_running_requests"] == {
        "value": 8,
        "source": "profile cpu-edge",
        "reason": "a core computes few sequences at once",
    }


def test_a_file_wins_over_a_profile_and_flags_over_both(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("profile: cpu-edge\nmax-running-requests: 3\nmax-queued-requests: 5\n")
    found = plan_for(from_argv(["--config", str(tmp_path / "a.yaml"), "--max-queued-requests", "6"]), MACHINE)
    assert (
        found.schedule.max_running_requests,
        found.schedule.max_queued_requests,
        found.schedule.chunked_prefill_size,
    ) == (3, 6, 128)
    assert (
        found.why["max_running_requests"].source == "file a.yaml"
        and found.why["max_running_requests"].reason == ""
    )


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "about: mine\noptions:\n  tp: {value: 1, why: one is enough}\nlater:\n  attn-cp-size: "
        "{value: 2, why: two are more}\n"
    )
    parsed = from_argv(["--profile", str(path)])
    assert parsed.reasons["tensor_parallel_size"] == "one is enough"
    left_out = "attention_context_parallel_size"
    assert parsed.notices == [f"profile {path} leaves out what is not here yet: {left_out}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "about: x\noptions:\n  no-such: {value: 1, why: x}\n",
            "no-such is no option that a profile can set",
        ),
        ("about: x\noptions:\n  config: {value: a.yaml, why: x}\n", "config is no option"),
        ("about: x\noptions:\n  page-size: 3\n", "is no profile: Expected `object`, got `int`"),
        ("about: x\noptions:\n  page-size: {value: none, why: x}\n", "page_size of profile"),
        ("about: [\n", "is no profile"),
        ("- a\n", "is no profile"),
    ],
)
def test_a_broken_profile_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(OptionsError) as error:
        from_argv(["--profile", str(path)])
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["no-such", "no-such.yaml"])
def test_an_unknown_profile_is_refused(name: str) -> None:
    with pytest.raises(OptionsError, match=f"--profile {name}"):
        from_argv(["--profile", name])


def test_ranks_on_npu_devices_get_the_variables_of_their_libraries() -> None:
    usual = {variable: value for variable, value, _ in RANK_VARIABLES.values()}
    assert plan("", NPU).ascend.rank_environment == usual
    assert plan("", DEVICES["cpu"]).ascend.rank_environment == {}
    machine = msgspec.structs.replace(MACHINE, environment={"HCCL_BUFFSIZE": "123"})
    assert plan("", NPU, machine).ascend.rank_environment == usual | {"HCCL_BUFFSIZE": "123"}
    assert plan("--hccl-buffer-mb 1600", NPU, machine).ascend.rank_environment == usual | {
        "HCCL_BUFFSIZE": "1600"
    }


def test_options_of_one_device_are_refused_on_others() -> None:
    with pytest.raises(
        OptionsError,
        match="--hccl-buffer-mb does nothing on --device cpu; leave it out, or take --device npu",
    ):
        plan("--hccl-buffer-mb 1600", DEVICES["cpu"])


def test_the_page_of_profiles_is_fresh() -> None:
    page = Path(__file__).parents[2] / "docs" / "profiles.md"
    assert page.read_text() == markdown(), "python -m runtime.options.profile_docs > docs/profiles.md"
