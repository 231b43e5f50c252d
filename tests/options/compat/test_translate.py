"""Command lines of other systems as ours. What comes out is always a command that `serve` accepts, or refuses
with a sentence."""

import shlex

import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from runtime.errors import OptionsError
from runtime.options.compat.translate import translate
from runtime.options.compat.vllm import COMMON, SAME, SWITCHES, WITHOUT
from runtime.options.parse import from_argv
from runtime.options.table import by_flag
from tests.options.compat.lines import serve_takes

SGLANG = "python3 -m sglang.launch_server "
VLLM = "vllm serve /m "
RTP = "python3 -m rtp_llm.start_server "

CASES: list[tuple[str, str, str]] = [  # their command, ours after `runtime serve`, part of a note
    (
        SGLANG + "--model-path /m --tp 2 --port=8000",
        "--model-path /m --tensor-parallel-size 2 --port 8000",
        "",
    ),
    (SGLANG + "--model /m --mem-fraction-static 0.7", "--model-path /m --mem-fraction-static 0.7", ""),
    (
        SGLANG + "--chunked-prefill-size -1 --enable-mixed-chunk",
        "--chunked-prefill-size -1",
        "--enable-mixed-chunk is left out: every",
    ),
    (SGLANG + "--cuda-graph-bs 1 2 4 --port 1", "--cuda-graph-bs 1 2 4 --port 1", ""),
    (SGLANG + "--enable-deepep-moe", "--moe-a2a-backend deepep", ""),
    (SGLANG + "--does-not-exist 3 --port 1", "--port 1", "--does-not-exist is unknown here"),
    ("HCCL_BUFFSIZE=400 FOO=1 " + SGLANG + "--port 1", "--hccl-buffer-mb 400 --port 1", "FOO is left out"),
    ("FOO=1 " + SGLANG + "--port 1", "--port 1", "FOO is left out: the runtime takes no settings"),
    (
        "sysctl -w vm.swappiness=0 && /opt/vllm/python -m sglang.launch_server --port 1 > log 2>&1 &",
        "--port 1",
        "vm.swappiness is left",
    ),
    (
        "docker run -p 1:1 --env KEY=s3cret example/sglang python3 -m sglang.launch_server --port 1",
        "--port 1 --host 0.0.0.0",
        "KEY is left out",
    ),
    ("sglang serve --model-path /m", "--model-path /m", ""),
    (
        "python -m sglang_router.launch_server --model-path /m --dp 2",
        "--model-path /m --data-parallel-size 2",
        "",
    ),
    (
        VLLM + "-tp 2 --max-model-len 8k",
        "--model-path /m --tensor-parallel-size 2 --context-length 8000 --port 8000",
        "",
    ),
    (
        VLLM + "--max-model-len 8K --max-num-seqs 32",
        "--model-path /m --context-length 8192 --max-running-requests 32 --port 8000",
        "",
    ),
    (
        VLLM + "--gpu-memory-utilization 0.8 --block-size 32",
        "--model-path /m --mem-fraction-static 0.8 --page-size 32 --port 8000",
        "",
    ),
    (VLLM + "--scheduling-policy fcfs", "--model-path /m --port 8000", ""),
    (
        VLLM + "--scheduling-policy priority",
        "--model-path /m --enable-priority-scheduling --schedule-low-priority-values-first --port 8000",
        "",
    ),
    (VLLM + "--enforce-eager", "--model-path /m --disable-cuda-graph --port 8000", ""),
    (VLLM + "--no-enable-prefix-caching", "--model-path /m --disable-radix-cache --port 8000", ""),
    (VLLM + "--no-enable-chunked-prefill", "--model-path /m --chunked-prefill-size -1 --port 8000", ""),
    (VLLM + "--enable-prefix-caching", "--model-path /m --port 8000", "it happens anyway"),
    (VLLM + "--swap-space 4", "--model-path /m --port 8000", "computed again, not swapped"),
    (VLLM + "--kv-cache-dtype fp8", "--model-path /m --kv-cache-dtype fp8_e4m3 --port 8000", ""),
    (VLLM + "--served-model-name a b", "--model-path /m --served-model-name a --port 8000", ""),
    (
        VLLM + """--speculative-config '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}'""",
        "--model-path /m --speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4 --speculative-draft-model-path /d --port 8000",
        "",
    ),
    (VLLM + "--speculative-config {", "--model-path /m --port 8000", "it is no JSON object"),
    (VLLM + """--speculative-config '{"num_speculative_tokens": "x"}'""", "--model-path /m --port 8000", ""),
    (
        VLLM + """--speculative-config '{"method": "psychic", "x": 1}'""",
        "--model-path /m --port 8000",
        "its method is unknown",
    ),
    (
        "python -m vllm.entrypoints.openai.api_server --model /m --seed 3",
        "--model-path /m --random-seed 3 --port 8000",
        "",
    ),
    (
        RTP + "--concurrency_limit 64 --sp_type vanilla",
        "--max-running-requests 64 --port 8088",
        "--sp_type is left out: it asks for",
    ),
    (RTP + "--reuse_cache 0 --log-level INFO", "--disable-radix-cache --log-level info --port 8088", ""),
    (
        "TP_SIZE=2 CHECKPOINT_PATH=/m MODEL_TYPE=qwen " + RTP + "--start_port 8088",
        "--tensor-parallel-size 2 --model-path /m --port 8088",
        "config.json says it",
    ),
    (
        RTP + "--sp_type deterministic --sp_min_token_match 2 --sp_max_token_match 5 --gen_num_per_cycle 4",
        "--speculative-algorithm NGRAM --speculative-ngram-min-match-window-size 2 "
        "--speculative-ngram-max-match-window-size 5 --speculative-num-draft-tokens 5 --port 8088",
        "",
    ),
    (
        RTP + "--sp_type mtp --sp_model_type deepseek-v3-mtp --gen_num_per_cycle 3 --sp_checkpoint_path /mtp "
        "--sp_act_type bf16 --force_stream_sample 0 --force_score_context_attention 1",
        "--speculative-algorithm NEXTN --speculative-num-draft-tokens 4 --speculative-draft-model-path /mtp "
        "--port 8088",
        "--sp_model_type is left out: --speculative-draft-model-path has a config.json, which says it",
    ),
    (
        RTP + "--sp_type eagle --sp_model_type qwen35_moe_mtp --gen_num_per_cycle 4",
        "--speculative-algorithm NEXTN --speculative-num-draft-tokens 5 --port 8088",
        "",
    ),
    (
        RTP + "--sp_type eagle --sp_model_type qwen_2-eagle --sp_checkpoint_path /head",
        "--speculative-algorithm EAGLE --speculative-draft-model-path /head --port 8088",
        "",
    ),
    (RTP + "--tree_decode_config t.json", "--tree-decode-config t.json --port 8088", ""),
    (
        "SP_TYPE=eagle3 SP_CHECKPOINT_PATH=/head TREE_DECODE_CONFIG=t.json " + RTP + "--gen_num_per_cycle 2",
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path /head --tree-decode-config t.json "
        "--speculative-num-draft-tokens 3 --port 8088",
        "",
    ),
    (RTP + "--world_size 2", "--port 8088", "--world_size is left out: the number of ranks follows"),
]


@pytest.mark.parametrize(("theirs", "ours", "note"), CASES, ids=[case[0][-50:] for case in CASES])
def test_commands(theirs: str, ours: str, note: str) -> None:
    translation = translate(shlex.split(theirs))
    assert shlex.join(translation.words()) == f"runtime serve {ours}".strip()
    assert note in "\n".join(translation.notes)


@pytest.mark.parametrize("theirs", [case[0] for case in CASES])
def test_serve_takes_what_comes_out(theirs: str) -> None:
    serve_takes(theirs)


def test_a_pasted_command_with_line_ends() -> None:
    words = ["python", "-m", "sglang.launch_server", "\\", "\n", "--port", "1", "\\"]
    assert translate(words).words() == ["runtime", "serve", "--port", "1"]


def test_yaml_is_read_back() -> None:
    import yaml

    text = translate(
        shlex.split(SGLANG + "--model-path '/m: x' --tp 2 --disable-radix-cache --lora-paths a b")
    ).yaml()
    assert yaml.safe_load(text) == {
        "model-path": "/m: x",
        "tensor-parallel-size": 2,
        "disable-radix-cache": True,
        "lora-paths": ["a", "b"],
    }


@pytest.mark.parametrize("theirs", ["ls -l", "", "--model-path /m"])
def test_no_known_command(theirs: str) -> None:
    with pytest.raises(OptionsError, match="no command of SGLang, vLLM, llama.cpp"):
        translate(shlex.split(theirs))


def test_tables_of_vllm_name_options_of_ours() -> None:
    assert all(flag in by_flag() for flag in COMMON)
    assert all(ours in by_flag() for _, ours, _ in SAME)
    assert all(ours in by_flag() for pairs in SWITCHES.values() for ours, _ in pairs)
    theirs = [*COMMON, *(flag for flag, _, _ in SAME), *SWITCHES, *(flag for flag, _ in WITHOUT)]
    assert len(set(theirs)) == len(theirs)


word = st.one_of(
    st.sampled_from(sorted(by_flag())), st.text(max_size=6), st.sampled_from([flag for flag, _, _ in SAME])
)


@settings(max_examples=200, deadline=None)
@examples(st.sampled_from([SGLANG, VLLM, RTP]), st.lists(word, max_size=8))
def test_any_words_are_translated(command: str, words: list[str]) -> None:
    translation = translate([*command.split(), *words])
    translation.yaml()
    try:
        from_argv([word for word in translation.words()[2:] if word != "--config"])
    except OptionsError as error:
        assert all(error.problems)
