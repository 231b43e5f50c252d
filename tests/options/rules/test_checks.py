"""What options cannot mean together: one case for each rule and each entry of the tables, and a similar case
that is fine."""

from typing import Any

import pytest

from runtime.options.rules import tables
from runtime.options.rules.base import is_set
from runtime.options.rules.checks import OPTION_RULES, option_problems
from runtime.options.table import by_name, rows
from tests.options.rules.draft_cases import DRAFT_CASES
from tests.options.rules.media_cases import MEDIA_CASES


def values(**changes: Any) -> dict[str, Any]:
    assert changes.keys() <= by_name().keys()
    return {row.name: row.default for row in rows()} | changes


def test_the_defaults_go_together() -> None:
    assert option_problems(values()) == []


# wrong values, part of the sentence, what mends them
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {"model_loader_extra_config": {"num_threads": 0}},
        "num_threads is a number from 1",
        {"model_loader_extra_config": {"num_threads": 8}},
    ),
    (
        {"model_loader_extra_config": {"tensorizer_uri": "x"}},
        "has tensorizer_uri, which is not known",
        {"model_loader_extra_config": {"concurrency": 8, "enable_multithread_load": True}},
    ),
    (
        {"skip_tokenizer_init": True, "grammar_backend": "xgrammar"},
        "--grammar-backend xgrammar needs a tokenizer",
        {"grammar_backend": "auto"},
    ),
    ({"load_format": "private"}, "--load-format private stands for loaders", {"load_format": "pt"}),
    ({"served_model_name": "a:b"}, "holds a colon", {"served_model_name": "ab"}),
    ({"cors_origins": ("https://a.example/",)}, "is no origin", {"cors_origins": ("https://a.example",)}),
    ({"allowed_hosts": ("a:80",)}, "is no name of a host", {"allowed_hosts": ("a", "::1", "10.0.0.1", "*")}),
    ({"api_key": "a b"}, "can't carry", {"api_key": "ab"}),
    ({"fastapi_root_path": "llm/"}, "must begin with /", {"fastapi_root_path": "/llm"}),
    (
        {"grpc_mode": True, "cors_origins": ("*",), "stream_interval": 4},
        "--cors-origins, --stream-interval: no effect on gRPC",
        {"grpc_mode": False},
    ),
    (
        {"max_step_ms": 100.0, "chunked_prefill_size": -1},
        "--max-step-ms 100 bounds no step",
        {"chunked_prefill_size": 512},
    ),
    ({"null_step_s": 0.1}, "--device null", {"device": "null"}),
    ({"nnodes": 2, "dist_init_addr": "h:1"}, "--nnodes 2 does not divide", {"tensor_parallel_size": 4}),
    (
        {"nnodes": 3, "data_parallel_size": 2, "dist_init_addr": "h:1"},
        "neither divides the other; a node has whole replicas, or a replica whole nodes",
        {"data_parallel_size": 6},
    ),
    (
        {"nnodes": 4, "data_parallel_size": 2, "tensor_parallel_size": 3, "dist_init_addr": "h:1"},
        "--nnodes 4 does not divide the 6 ranks",
        {"tensor_parallel_size": 4},
    ),
    ({"node_rank": 1}, "--node-rank 1 is none", {"node_rank": 0}),
    ({"nnodes": 2, "tensor_parallel_size": 2}, "--dist-init-addr", {"dist_init_addr": "h:1"}),
    (
        {"dist_secret_file": "s"},
        "--dist-secret-file does nothing without --nnodes",
        {"dist_secret_file": None},
    ),
    *(
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "dist_init_addr": "h:1", name: value},
            f"--nnodes above 1 does not go with --{name.replace('_', '-')}",
            {name: off},
        )
        for name, value, off in (
            ("enable_hierarchical_cache", True, False),
            ("standby_ranks", 1, 0),
            ("enable_torch_symm_mem", True, False),
            ("enable_profile_cuda_graph", True, False),
        )
    ),
    (
        {"enable_dp_attention": True},
        "--data-parallel-size above 1",
        {"data_parallel_size": 2, "tensor_parallel_size": 4},
    ),
    (
        {"enable_dp_attention": True, "data_parallel_size": 3, "tensor_parallel_size": 4},
        "does not divide",
        {"data_parallel_size": 2},
    ),
    *(
        (
            {"enable_dp_attention": True, "data_parallel_size": 2, "tensor_parallel_size": 4, name: value},
            f"--enable-dp-attention does not go with --{name.replace('_', '-')}",
            {name: off},
        )
        for name, value, off in (("enable_memory_saver", True, False), ("cpu_offload_gb", 1, 0))
    ),
    (
        {
            "enable_dp_attention": True,
            "data_parallel_size": 2,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "enable_hierarchical_cache": True,
        },
        "does not go with --enable-hierarchical-cache: pages of groups have been moved within one stage only",
        {"enable_hierarchical_cache": False},
    ),
    (
        {"moe_dense_tp_size": 2, "tensor_parallel_size": 4},
        "--moe-dense-tp-size 2 is neither 1",
        {"moe_dense_tp_size": 4},
    ),
    (
        {"expert_parallel_size": 3, "tensor_parallel_size": 4},
        "--expert-parallel-size 3 does not divide",
        {"expert_parallel_size": 2},
    ),
    (
        {"moe_a2a_backend": "deepep", "expert_parallel_size": 2, "tensor_parallel_size": 4},
        "spreads experts over all ranks",
        {"expert_parallel_size": 4},
    ),
    (
        {
            "moe_runner_backend": "cutlass",
            "quantization": "fp8",
            "expert_parallel_size": 2,
            "tensor_parallel_size": 2,
        },
        "cutlass has no fp8",
        {"quantization": None},
    ),
    (
        {"expert_distribution_recorder_buffer_size": 0, "expert_distribution_recorder_mode": "stat"},
        "holds no step",
        {"expert_distribution_recorder_buffer_size": -1, "expert_distribution_recorder_mode": "stat"},
    ),
    (
        {"enable_eplb": True},
        "does nothing without experts spread over ranks",
        {"expert_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    (
        {"enable_eplb": True, "expert_parallel_size": 2, "tensor_parallel_size": 2, "load_format": "dummy"},
        "has not those of all ranks",
        {"load_format": "safetensors"},
    ),
    (
        {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 2},
        "are chosen together",
        {"speculative_eagle_topk": 1},
    ),
    *DRAFT_CASES,
    ({"lora_paths": ("a",), "enable_lora": False}, "--no-enable-lora", {"enable_lora": True}),
    (
        {"enable_lora": True},
        "requires --max-lora-rank",
        {"max_lora_rank": 8, "lora_target_modules": ("all",)},
    ),
    (
        {"lora_paths": ("a",), "lora_target_modules": ("all", "q_proj")},
        "stands alone",
        {"lora_target_modules": ("q_proj",)},
    ),
    ({"lora_paths": ("a",), "max_loaded_loras": 2}, "below --max-loras-per-batch", {"max_loaded_loras": 8}),
    (
        {"lora_paths": tuple("abc"), "max_loaded_loras": 2, "max_loras_per_batch": 2},
        "names 3 adapters",
        {"max_loaded_loras": 3},
    ),
    (
        {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,
            "speculative_num_draft_tokens": 8,
            "page_size": 16,
            "attention_backend": "triton",
        },
        "take flashinfer or fa3",
        {"page_size": 1},
    ),
    (
        {"disaggregation_mode": "prefill", "tensor_parallel_size": 4, "disaggregation_decode_tp": 3},
        "multiples of one another",
        {"disaggregation_decode_tp": 2},
    ),
    (
        {"enable_pdmux": True, "pipeline_parallel_size": 2},
        "--enable-pdmux goes with neither",
        {"pipeline_parallel_size": 1},
    ),
    *MEDIA_CASES,
    (
        {"mamba_scheduler_strategy": "extra_buffer", "page_size": 48},
        "no multiple of --page-size",
        {"page_size": 64},
    ),
    (
        {
            "mamba_scheduler_strategy": "extra_buffer",
            "mamba_track_interval": 2,
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 4,
        },
        "is below --speculative-num-draft-tokens",
        {"mamba_track_interval": 4},
    ),
    (
        {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": {"directory": "x"},
        },
        "it knows dir, max_bytes",
        {"hicache_storage_backend_extra_config": {"dir": "x"}},
    ),
    (
        {"load_format": "remote_instance", "model_path": "tiny"},
        "copies the files of a server; give --remote",
        {
            "remote_instance_weight_loader_seed_instance_ip": "10.0.0.1",
            "remote_instance_weight_loader_seed_instance_service_port": 30000,
        },
    ),
    (
        {"remote_instance_weight_loader_seed_instance_ip": "10.0.0.1"},
        "does nothing without --load-format remote_instance",
        {"remote_instance_weight_loader_seed_instance_ip": None},
    ),
    (
        {
            "enable_memory_saver": True,
            "speculative_algorithm": "NGRAM",
            "enable_draft_weights_cpu_backup": True,
        },
        "is of draft models, and NGRAM has none",
        {"speculative_algorithm": "NEXTN"},
    ),
    ({"extra_metric_labels": {"le": "x"}}, "le cannot be a label", {"extra_metric_labels": {"zone": "x"}}),
]


@pytest.mark.parametrize(("wrong", "sentence", "mended"), CASES, ids=[case[1] for case in CASES])
def test_rules(wrong: dict[str, Any], sentence: str, mended: dict[str, Any]) -> None:
    problems = option_problems(values(**wrong))
    assert len(problems) == 1 and sentence in problems[0], problems
    assert option_problems(values(**wrong | mended)) == []


def test_every_rule_has_a_case() -> None:
    fired = {rule.__name__ for rule in OPTION_RULES for wrong, _, _ in CASES if rule(values(**wrong))}
    assert fired | {"bounds_have_a_form"} == {rule.__name__ for rule in OPTION_RULES}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("default",), None),
        (("default", "1"), "nothing after default"),
        (("tse", "10", "2", "8"), None),
        (("tse", "10", "1", "8"), "base above 1"),
        (("tse", "10"), "base above 1"),
        (("custom", "1", "5"), None),
        (("custom",), "different bounds"),
        (("custom", "1", "1"), "different bounds"),
        (("custom", "-1"), "different bounds"),
        (("custom", "x"), "takes numbers"),
        (("other",), "begins with"),
    ],
)
def test_bounds(words: tuple[str, ...], problem: str | None) -> None:
    problems = option_problems(values(prompt_tokens_buckets=words, collect_tokens_histogram=True))
    assert (problem is None) == (not problems) and (problem or "") in "".join(problems)


def other_value(name: str) -> Any:
    """A value of an option that asks for something."""
    row = by_name()[name]
    words = [word for word in row.choices or () if word not in (row.default, "none", "null", "auto")]
    if row.takes in ("switch", "json"):
        return True if row.takes == "switch" else {"x": 1}
    return (
        words[0]
        if words
        else ("x",)
        if row.takes == "many"
        else 7
        if row.type.startswith(("int", "float"))
        else "x"
    )


@pytest.mark.parametrize(("pattern", "switches"), tables.NEEDS, ids=lambda x: str(x))
def test_what_needs_another(pattern: str, switches: tuple[str, ...]) -> None:
    names = [name for name in tables._dependent(pattern) if name in by_name() and name not in switches]
    assert names, "the pattern names nothing"
    for name in names:
        given = values(**{name: other_value(name)})
        assert is_set(given, name)
        sentence = f"{by_name()[name].flag} does nothing without {by_name()[switches[0]].flag}"
        assert any(problem.startswith(sentence) for problem in option_problems(given))
        for switch in switches:
            assert not any(
                problem.startswith(sentence)
                for problem in option_problems(given | {switch: other_value(switch)})
            )


@pytest.mark.parametrize(("name", "required"), tables.REQUIRES)
def test_what_requires_another(name: str, required: str) -> None:
    lacking = values(**{name: other_value(name)}) | {required: None}
    sentence = f"{by_name()[name].flag} requires {by_name()[required].flag}; add it"
    assert sentence in option_problems(lacking)
    assert sentence not in option_problems(lacking | {required: other_value(required)})


@pytest.mark.parametrize(("one", "other"), tables.EXCLUDES)
def test_what_excludes_another(one: str, other: str) -> None:
    both = values(**{one: other_value(one), other: other_value(other)})
    assert any("exclude one another" in problem for problem in option_problems(both))
    assert not any(
        "exclude one another" in problem
        for problem in option_problems(both | {other: by_name()[other].default})
    )


@pytest.mark.parametrize(("name", "word", "other", "allowed"), tables.ALLOWS, ids=lambda x: str(x)[:30])
def test_what_goes_with_what(name: str, word: str, other: str, allowed: tuple[Any, ...]) -> None:
    chosen: Any = {"True": True, "": 7}.get(word, word)
    row = by_name()[other]
    strangers = [choice for choice in row.choices or ("7", 7) if choice not in allowed]
    assert chosen in (by_name()[name].choices or (chosen,)) and all(
        choice in (row.choices or (choice,)) for choice in allowed if choice
    )
    assert any(
        "does not go with" in problem
        for problem in option_problems(values(**{name: chosen, other: strangers[-1]}))
    )
    assert not any(
        "does not go with" in problem
        for problem in option_problems(values(**{name: chosen, other: allowed[-1]}))
    )


@pytest.mark.parametrize(("name", "whole"), tables.DIVIDES)
def test_what_divides_what(name: str, whole: str) -> None:
    assert any("does not divide" in problem for problem in option_problems(values(**{name: 3, whole: 4})))
    assert not any("does not divide" in problem for problem in option_problems(values(**{name: 2, whole: 4})))
