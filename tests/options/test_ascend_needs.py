"""Flags that the reference supports on Ascend and that do nothing alone: each is taken on NPUs together with
what it needs, for a model that has what it is about."""

import json
from pathlib import Path

import pytest

from runtime.errors import OptionsError
from runtime.models.config.model_config import read_config
from runtime.options.parse import from_argv
from runtime.options.resolve import resolve
from tests.options.test_ascend import HF, MACHINE, MODEL, NPU, cases, problems
from tests.options.test_ascend_flags import REFUSED

SPARSE = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
MODELS: dict[str, dict[str, object]] = {
    "experts": HF,
    "sparse": HF | SPARSE | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "recurrent": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "vocab_size": 300,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "torch_dtype": "bfloat16",
    },
}
TWO = "--tensor-parallel-size 2"
HEAD = "--speculative-draft-model-path /head"
EXCHANGE = f"{TWO} --moe-a2a-backend deepep"
SPREAD = f"{TWO} --expert-parallel-size 2"
# how flags begin -> what is given with them, and for which model; the first one that fits
NEEDS: tuple[tuple[str, str, str], ...] = (
    ("--pp-", "--pipeline-parallel-size 2", ""),
    ("--log-requests-", "--log-requests", ""),
    ("--oltp-traces-endpoint", "--enable-trace", ""),
    ("--prompt-tokens-buckets", "--collect-tokens-histogram", ""),
    ("--generation-tokens-buckets", "--collect-tokens-histogram", ""),
    ("--tokenizer-metrics-custom-labels-header", "--tokenizer-metrics-allowed-custom-labels team", ""),
    ("--enable-return-routed-experts", "", "experts"),
    ("--export-metrics-to-file-dir", "--export-metrics-to-file", ""),
    ("--export-metrics-to-file", "--export-metrics-to-file-dir /metrics", ""),
    ("--node-rank", f"{TWO} --nnodes 2 --dist-init-addr 10.0.0.1:2000", ""),
    ("--max-lora", "--lora-paths name=/adapter", ""),
    ("--lora-target-modules", "--lora-paths name=/adapter", ""),
    ("--max-loaded-loras", "--lora-paths name=/adapter", ""),
    ("--speculative-algorithm", HEAD, ""),
    ("--speculative-draft-model-path", "--speculative-algorithm EAGLE3", ""),
    (
        "--speculative-num-steps",
        f"--speculative-algorithm EAGLE3 {HEAD} --speculative-num-draft-tokens 2",
        "",
    ),
    ("--speculative-num-draft", f"--speculative-algorithm EAGLE3 {HEAD} --speculative-num-steps 3", ""),
    ("--speculative-", f"--speculative-algorithm EAGLE3 {HEAD}", ""),
    ("--decrypted-draft", f"--speculative-algorithm EAGLE3 {HEAD}", ""),
    ("--moe-a2a-backend", TWO, "experts"),
    ("--deepep-mode", EXCHANGE, "experts"),
    ("--enable-single-batch-overlap", EXCHANGE, "experts"),
    ("--eplb-", f"{SPREAD} --enable-eplb", "experts"),
    ("--ep-num-redundant-experts", SPREAD, "experts"),
    ("--init-expert-location", SPREAD, "experts"),
    ("--enable-eplb", SPREAD, "experts"),
    ("--expert-distribution-recorder-", "--expert-distribution-recorder-mode stat", "experts"),
    ("--enable-expert-distribution-metrics", "", "experts"),
    ("--max-mamba-", "", "recurrent"),
    ("--mamba-", "", "recurrent"),
    ("--enable-dp-attention", f"{TWO} --data-parallel-size 2", ""),
    ("--enable-dp-lm-head", f"{TWO} --data-parallel-size 2 --enable-dp-attention", ""),
    ("--piecewise-", "--enable-piecewise-cuda-graph", ""),
    ("--enable-nsa-", f"{TWO} --attention-context-parallel-size 2", "sparse"),
    (
        "--disaggregation-decode-enable-fake",
        "--disaggregation-mode decode --disaggregation-transfer-backend fake",
        "",
    ),
    ("--disaggregation-", "--disaggregation-mode decode", ""),
)
# a value that fits better than that of every option
VALUES = {
    "--model-loader-extra-config": "{}",
    "--json-model-override-args": "{}",
    "--mm-process-config": "{}",
    "--limit-mm-data-per-request": "{}",
    "--prompt-tokens-buckets": "default",
    "--generation-tokens-buckets": "default",
    "--max-loaded-loras": "8",
    "--speculative-num-draft-tokens": "4",
    "--ep-num-redundant-experts": "2",
    "--init-expert-location": "trivial",
    "--piecewise-cuda-graph-max-tokens": "4096",
}
# what needs a file, a server or a model with an encoder, and where it is tried; --model-impl has other names
ELSEWHERE = {
    "--config": "tests/options/test_parse.py",
    "--enable-multimodal": "tests/e2e/test_deepstack.py",
    "--language-only": "tests/e2e/test_encoders.py",
    "--encoder-urls": "tests/e2e/test_encoders.py",
    "--remote-instance-weight-loader-seed-instance-ip": "tests/hub",
    "--remote-instance-weight-loader-seed-instance-service-port": "tests/hub",
    "--model-impl": "tests/options/test_parse.py",
    "--torch-compile-max-bs": "goes with --enable-torch-compile, which is refused",
    "--enable-torch-compile-debug-mode": "goes with --enable-torch-compile, which is refused",
}
LACKING = [
    (flag, value) for flag, value in cases() if flag not in REFUSED | ELSEWHERE and problems(flag, value, NPU)
]


@pytest.mark.parametrize(("flag", "value"), dict.fromkeys(LACKING))
def test_it_is_taken_with_what_it_needs(flag: str, value: str | None, tmp_path: Path) -> None:
    words, kind = next(((words, kind) for begin, words, kind in NEEDS if flag.startswith(begin)), ("", ""))
    own = [] if value is None else [VALUES.get(flag, value)]
    model = MODEL
    if kind:
        (tmp_path / "config.json").write_text(json.dumps(MODELS[kind]))
        model = read_config(str(tmp_path))
    try:
        resolve(from_argv([flag, *own, *words.split()]), model, NPU, MACHINE)
    except OptionsError as error:
        pytest.fail(str(error))


def test_every_line_is_used() -> None:
    flags = {flag for flag, _ in LACKING}
    assert VALUES.keys() <= flags
    used = {next((i for i, line in enumerate(NEEDS) if flag.startswith(line[0])), -1) for flag in flags}
    assert used - {-1} == set(range(len(NEEDS)))
