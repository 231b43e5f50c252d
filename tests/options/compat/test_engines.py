"""Command lines of llama.cpp, Ollama, TGI and LMDeploy, containers, and variables, as ours."""

import re
import shlex

import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from runtime.errors import OptionsError
from runtime.messages.sampling import SamplingParams
from runtime.options.compat.container import System
from runtime.options.compat.engines import ollama
from runtime.options.compat.engines.table import Engine
from runtime.options.compat.fitting import fit
from runtime.options.compat.invocation import ENGINES
from runtime.options.compat.translate import translate
from runtime.options.compat.variables import FLAGS
from runtime.options.parse import from_argv
from runtime.options.table import by_flag, canonical
from tests.options.compat.lines import serve_takes

SGLANG = "python3 -m sglang.launch_server --model-path /m "
VLLM = "vllm serve /m --port 1 "
LLAMA = "llama-server -hf Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0 --port 1 "
QWEN = "--model-path Qwen/Qwen2.5-0.5B-Instruct --port 1"
TGI = "text-generation-launcher --model-id /m --port 1 "
LMDEPLOY = "lmdeploy serve api_server /m --server-port 1 "
TGI_IMAGE = "ghcr.io/huggingface/text-generation-inference:3.3.5 --model-id "

# their line; ours behind `runtime serve`, or the whole of it; part of a note
LINES: list[tuple[str, str, str]] = [
    # values in the words that the option knows
    (SGLANG + "--log-level WARN --dtype bf16", "--model-path /m --log-level warning --dtype bfloat16", ""),
    ("python -m rtp_llm.start_server --act_type bf16 --start_port 1", "--dtype bfloat16 --port 1", ""),
    (SGLANG + "--dtype int3", "--model-path /m", "--dtype int3 is left out: serve takes auto|bfloat16"),
    (SGLANG + "--page-size 0 --mem-fraction-static 9", "--model-path /m", "--page-size 0 is left out"),
    (SGLANG + "--api-key ''", "--model-path /m", "--api-key is left out, for serve says: --api-key is empty"),
    (SGLANG + "--ssl-keyfile-password x", "--model-path /m", "--ssl-keyfile-password is left out"),
    (
        SGLANG + "--tp 2 --attn-cp-size 2",
        "--model-path /m --tensor-parallel-size 2 --attention-context-parallel-size 2",
        "",
    ),
    (
        SGLANG + "--tool-server x",
        "--model-path /m --tool-server x",
        "this version refuses --tool-server: --only-working",
    ),
    (SGLANG + "--dllm-algorithm LowConfidence", "--model-path /m --dllm-algorithm LowConfidence", ""),
    (
        SGLANG + "--tp 4 --nnodes 2 --node-rank 1 --nccl-init-addr a:1 --dist-timeout 9",
        "--model-path /m --tensor-parallel-size 4 --nnodes 2 --node-rank 1 --dist-init-addr a:1 "
        "--dist-timeout 9",
        "",
    ),
    (SGLANG + "--moe-a2a-backend ascend_fuseep", "--model-path /m --moe-a2a-backend ascend_fuseep", "not"),
    (SGLANG + "--json-model-override-args {", "--model-path /m", "is left out: serve takes json"),
    # variables
    (
        "CUDA_VISIBLE_DEVICES=0,1 HF_HOME=$HOME/models HF_TOKEN=hf_secret " + SGLANG,
        'CUDA_VISIBLE_DEVICES=0,1 HF_HOME="$HOME/models" runtime serve --model-path /m',
        "HF_TOKEN is read from the environment here too",
    ),
    (
        "ASCEND_RT_VISIBLE_DEVICES=3 " + SGLANG,
        "ASCEND_RT_VISIBLE_DEVICES=3 runtime serve --model-path /m",
        "",
    ),
    (
        "SGLANG_NPU_USE_MLAPO=1 SGLANG_USE_FIA_NZ=1 SGLANG_NPU_USE_MULTI_STREAM=0 HCCL_SOCKET_IFNAME=lo "
        + SGLANG,
        "HCCL_SOCKET_IFNAME=lo runtime serve --npu-mla-prolog --npu-nz-cache --model-path /m",
        "",
    ),
    ("SGLANG_USE_MODELSCOPE=true " + SGLANG, "SGLANG_USE_MODELSCOPE=true runtime serve --model-path /m", ""),
    ("SGLANG_SET_CPU_AFFINITY=1 " + SGLANG, "--model-path /m", "its counterpart here: --numa-node"),
    ("VLLM_LOGGING_LEVEL=DEBUG " + VLLM, "--log-level debug --model-path /m --port 1", ""),
    (
        "VLLM_ATTENTION_BACKEND=FLASHINFER " + VLLM,
        "--attention-backend flashinfer --model-path /m --port 1",
        "",
    ),
    (
        "VLLM_ATTENTION_BACKEND=NONSENSE " + VLLM,
        "--model-path /m --port 1",
        "NONSENSE is left out: serve takes",
    ),
    ("VLLM_USE_V1=1 VLLM_FOO=2 " + VLLM, "--model-path /m --port 1", "VLLM_USE_V1 is left out: there is one"),
    ("VLLM_API_KEY=secret " + VLLM, "--model-path /m --port 1", "write the key to a file for --api-key-file"),
    ("OMP_NUM_THREADS=4 " + VLLM, "--num-threads 4 --model-path /m --port 1", ""),
    # vLLM
    ("vllm serve --port 1 /m", "--model-path /m --port 1", ""),
    (VLLM + "--task embed", "--model-path /m --port 1 --is-embedding", ""),
    (VLLM + "--task classify", "--model-path /m --port 1", "--task is left out: a model that classifies"),
    (
        VLLM + """--allowed-origins '["https://a.b"]'""",
        "--model-path /m --port 1 --cors-origins https://a.b",
        "",
    ),
    (
        VLLM + "-tp 2 --enable-expert-parallel",
        "--model-path /m --port 1 --tensor-parallel-size 2 --expert-parallel-size tp",
        "",
    ),
    (VLLM + "--tokenizer-mode mistral", "--model-path /m --port 1", "--tokenizer-mode mistral is left out"),
    # llama.cpp
    (LLAMA, QWEN, "Qwen/Qwen2.5-0.5B-Instruct is the same model as it was published"),
    ("./build/bin/llama-server -m a.gguf", "--model-path a.gguf --port 8080", ""),
    ("llama-server -m a.gguf -ngl 0", "--model-path a.gguf --device cpu --port 8080", ""),
    (LLAMA + "-ngl 99 -fa -t 8", QWEN + " --num-threads 8", "-ngl 99 is left out: all layers"),
    (LLAMA + "-c 16384", QWEN + " --context-length 16384", ""),
    (LLAMA + "-c 0 -np -1", QWEN, "-c 0 is left out"),
    (
        LLAMA + "-c 16384 -np 4",
        QWEN + " --context-length 4096 --max-running-requests 4",
        "that of one sequence: 16384 divided by 4",
    ),
    (
        LLAMA + "--temp 0.7 --top-k 20 --min-p 0 -n 512 -n -1 --repeat-penalty 99",
        QWEN + """ --preferred-sampling-params '{"temperature": 0.7, "top_k": 20, "min_p": 0, """
        """"max_new_tokens": 512}'""",
        "--repeat-penalty 99 is left out: requests may not have this value",
    ),
    (LLAMA + "-ctk q8_0 -ctv q8_0", QWEN + " --kv-cache-dtype fp8_e4m3", ""),
    (LLAMA + "-ctk q4_0", QWEN, "-ctk q4_0 is left out: pages are of the model's dtype"),
    (LLAMA + "-a small,tiny --api-key k1,k2", QWEN + " --served-model-name small --api-key k1 k2", ""),
    (LLAMA + "--chat-template llama3", QWEN + " --chat-template llama-3", ""),
    (LLAMA + "--chat-template megrez", QWEN, "--chat-template megrez is left out: the model's own"),
    (LLAMA + "-lv 5 --log-jsonl", QWEN + " --log-level debug --log-format json", ""),
    (LLAMA + "--embedding --pooling mean", QWEN + " --is-embedding --pooling mean", ""),
    (LLAMA + "--pooling rank", QWEN, "--pooling rank is left out"),
    (LLAMA + "--mlock --metrics --quux", QWEN, "--quux is left out: it is unknown here"),
    (
        LLAMA + "-md d.gguf --draft-p-min 0.5",
        QWEN + " --speculative-algorithm STANDALONE --speculative-draft-model-path d.gguf",
        "--draft-p-min is left out: how many drafts are made follows from how many are accepted",
    ),
    (
        LLAMA + "--spec-type ngram-simple --draft-max 7",
        QWEN + " --speculative-algorithm NGRAM --speculative-num-draft-tokens 8",
        "",
    ),
    (LLAMA + "-hft hf_secret", QWEN, "-hft is left out: set HF_TOKEN in the environment"),
    ("llama-cli -m a.gguf -p 'I believe'", "--model-path a.gguf --port 8080", "`runtime chat` talks"),
    ("LLAMA_ARG_CTX_SIZE=4096 " + LLAMA, "--context-length 4096 " + QWEN, ""),
    # Ollama
    ("ollama serve", "--port 11434", "no model is named"),
    ("OLLAMA_HOST=0.0.0.0 ollama serve", "--host 0.0.0.0 --port 11434", ""),
    ("OLLAMA_HOST=http://[::1]:80/ ollama serve", "--host ::1 --port 80", ""),
    (
        "OLLAMA_NUM_PARALLEL=4 OLLAMA_MAX_QUEUE=64 OLLAMA_CONTEXT_LENGTH=8192 OLLAMA_KV_CACHE_TYPE=q8_0 "
        "OLLAMA_ORIGINS=https://a.b,https://c.d OLLAMA_DEBUG=1 OLLAMA_KEEP_ALIVE=24h ollama serve",
        "--max-running-requests 4 --max-queued-requests 64 --context-length 8192 --kv-cache-dtype fp8_e4m3 "
        "--cors-origins https://a.b https://c.d --log-level debug --port 11434",
        "--keep-alive is left out: the model stays loaded",
    ),
    ("ollama run qwen3", "--model-path Qwen/Qwen3-8B --port 11434", "qwen3 is Qwen/Qwen3-8B on the hub"),
    (
        "OLLAMA_NUM_PARALLEL=2 ollama run llama3.2:1b-instruct-q4_K_M 'why?' --verbose",
        "--max-running-requests 2 --model-path meta-llama/Llama-3.2-1B-Instruct --port 11434",
        "`runtime chat` talks",
    ),
    ("ollama run somebodys/model", "--model-path MODEL --port 11434", "the hub's name of somebodys/model"),
    (
        "ollama run hf.co/unsloth/Qwen3-4B-GGUF:Q4_K_M",
        "--model-path unsloth/Qwen3-4B --port 11434",
        "as it was published",
    ),
    # TGI
    (
        TGI + "--speculate 3",
        "--model-path /m --port 1 --speculative-algorithm NGRAM --speculative-num-draft-tokens 4",
        "",
    ),
    ("text-generation-launcher --model-id a/b", "--model-path a/b --port 3000", "--port 3000 is text-gen"),
    (
        TGI + "--num-shard 2 --max-total-tokens 4096 --max-batch-total-tokens 65536 "
        "--max-batch-prefill-tokens 4096 --max-concurrent-requests 128",
        "--model-path /m --port 1 --tensor-parallel-size 2 --context-length 4096 --max-total-tokens 65536 "
        "--chunked-prefill-size 4096 --max-queued-requests 128",
        "/generate has SGLang's form here",
    ),
    (TGI + "--quantize awq", "--model-path /m --port 1 --quantization awq", ""),
    (
        TGI + "--quantize bitsandbytes-nf4",
        "--model-path /m --port 1",
        "--quantize bitsandbytes-nf4 is left out",
    ),
    (TGI + "--cuda-graphs 0", "--model-path /m --port 1 --disable-cuda-graph", ""),
    (TGI + "--cuda-graphs 1,2,4", "--model-path /m --port 1 --cuda-graph-bs 1 2 4", ""),
    (TGI + "--lora-adapters a/b,c/d", "--model-path /m --port 1 --lora-paths a/b c/d", ""),
    (TGI + "--json-output --ngrok", "--model-path /m --port 1 --log-format json", "--ngrok is left out"),
    (
        "MODEL_ID=a/b NUM_SHARD=2 PORT=80 text-generation-launcher",
        "--model-path a/b --tensor-parallel-size 2 --port 80",
        "",
    ),
    # LMDeploy
    ("lmdeploy serve api_server a/b", "--model-path a/b --port 23333", "--port 23333 is LMDeploy's default"),
    (
        LMDEPLOY + "--tp 2 --session-len 8192 --max-batch-size 64 --cache-block-seq-len 64 --dtype float16",
        "--model-path /m --port 1 --tensor-parallel-size 2 --context-length 8192 --max-running-requests 64 "
        "--page-size 64 --dtype float16",
        "",
    ),
    (
        LMDEPLOY + "--log-level WARN --api-keys a b",
        "--model-path /m --port 1 --log-level warning --api-key a b",
        "",
    ),
    (LMDEPLOY + "--quant-policy 8", "--model-path /m --port 1 --kv-cache-dtype fp8_e4m3", ""),
    (LMDEPLOY + "--quant-policy 4", "--model-path /m --port 1", "--quant-policy 4 is left out"),
    (
        LMDEPLOY + "--cache-max-entry-count 0.8",
        "--model-path /m --port 1",
        "a part of what the weights leave",
    ),
    (LMDEPLOY + "--tool-call-parser qwen2d5", "--model-path /m --port 1 --tool-call-parser qwen25", ""),
    (LMDEPLOY + "--dp 2", "--model-path /m --port 1 --data-parallel-size 2", ""),
    # containers
    (
        "docker run --runtime nvidia --gpus all -v ~/.cache/huggingface:/home/app/.cache/huggingface --env "
        "HUGGING_FACE_HUB_TOKEN=hf_secret -p 8000:8000 --ipc=host vllm/vllm-openai:latest --model a/b",
        "--model-path a/b --port 8000 --host 0.0.0.0",
        "HUGGING_FACE_HUB_TOKEN is read from the environment here too",
    ),
    (
        "sudo docker run -d --rm --gpus '\"device=0,2\"' -v /data:/models:ro -p 127.0.0.1:9000:8000 -p "
        "29500:29500 "
        "vllm/vllm-openai:v0.11.0 --model /models/qwen --lora-modules a=/models/a",
        "CUDA_VISIBLE_DEVICES=0,2 runtime serve --model-path /data/qwen --lora-paths a=/data/a --port 9000 "
        "--host 127.0.0.1",
        "-p 29500:29500 is left out",
    ),
    (
        "docker run --gpus all --shm-size 1g -p 8080:80 -v $PWD/data:/data " + TGI_IMAGE + "a/b",
        'HF_HUB_CACHE="$PWD/data" runtime serve --model-path a/b --port 8080 --host 0.0.0.0',
        "-p 8080:80 is --host 0.0.0.0 --port 8080",
    ),
    (
        "docker run -e MODEL_ID=/data/m -v /srv:/data ghcr.io/huggingface/text-generation-inference",
        "HF_HUB_CACHE=/srv runtime serve --model-path /srv/m --port 80",
        "",
    ),
    (
        "docker run --gpus all -p 30000:30000 -v /w:/w --ipc=host lmsysorg/sglang:latest python3 -m "
        "sglang.launch_server --model-path /w/m --host 0.0.0.0 --port 30000",
        "--model-path /w/m --host 0.0.0.0 --port 30000",
        "",
    ),
    (
        "docker run --network=host lmsysorg/sglang python3 -m sglang.launch_server --model-path a/b",
        "--model-path a/b --port 30000",
        "",
    ),
    (
        "docker run -p 8080:8080 -v /path/to/models:/models ghcr.io/ggml-org/llama.cpp:server-cuda -m "
        "/models/a.gguf -c 512 --host 0.0.0.0 --port 8080 -ngl all",
        "--model-path /path/to/models/a.gguf --context-length 512 --host 0.0.0.0 --port 8080",
        "",
    ),
    (
        "docker run -d -v ollama:/home/app/.ollama -p 11434:11434 -e OLLAMA_NUM_PARALLEL=2 --name ollama "
        "ollama/ollama",
        "--max-running-requests 2 --port 11434 --host 0.0.0.0",
        "",
    ),
    (
        "docker exec -it ollama ollama run llama3.2",
        "--model-path meta-llama/Llama-3.2-3B-Instruct --port 11434",
        "",
    ),
    (
        "podman run --device nvidia.com/gpu=all -p 23333:23333 openmmlab/lmdeploy:latest lmdeploy serve "
        "api_server a/b",
        "--model-path a/b --port 23333 --host 0.0.0.0",
        "",
    ),
    (
        "export model=a/b ; volume=$PWD/data ; docker run -p 8080:80 -v ${volume}:/data "
        + TGI_IMAGE
        + "$model",
        'HF_HUB_CACHE="$PWD/data" runtime serve --model-path a/b --port 8080 --host 0.0.0.0',
        "",
    ),
    (
        "TP=2 ; vllm serve $MODEL -tp $TP --port 1",
        '--model-path "$MODEL" --tensor-parallel-size 2 --port 1',
        "",
    ),
    (
        "docker run lmsysorg/sglang bash -lc 'FOO=1 python3 -m sglang.launch_server --model-path a/b "
        "--port 1'",
        "--model-path a/b --port 1",
        "FOO is left out",
    ),
    (
        "docker run --entrypoint python3 --gpus 1 vllm/vllm-openai -m vllm.entrypoints.openai.api_server "
        "--model a/b",
        "--model-path a/b --port 8000",
        "--gpus 1 is left out",
    ),
]


@pytest.mark.parametrize(("theirs", "ours", "note"), LINES, ids=[line[0][-60:] for line in LINES])
def test_lines(theirs: str, ours: str, note: str) -> None:
    translation = serve_takes(theirs)
    assert translation.line() == (ours if "runtime serve" in ours else f"runtime serve {ours}".strip())
    assert note in "\n".join(translation.notes)
    assert "secret" not in translation.line() + "\n".join(translation.notes)


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        ("python -m sglang_router.launch_router --worker-urls http://a", "put nginx in front of them"),
        ("sglang-router launch --workers http://a", "docs/deploy.md has its configuration"),
        ("vllm-router --service-discovery", "spreads requests over several servers"),
        ("lmdeploy serve proxy --server-port 8000", "lmdeploy serve proxy spreads requests"),
        ("ollama pull llama3.2", "ollama pull starts no server; give the command with serve or run"),
        ("vllm bench serve", "vllm bench starts no server"),
        ("docker run hello-world", "no command of SGLang, vLLM, llama.cpp"),
        ("docker run", "no command of SGLang"),
    ],
)
def test_what_starts_no_server(theirs: str, problem: str) -> None:
    with pytest.raises(OptionsError, match=re.escape(problem)):
        translate(shlex.split(theirs))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_tables_name_options_of_ours(engine: Engine) -> None:
    for flag, option in engine.options.items():
        assert flag == canonical(flag)
        ours = [option.flag, *(name for name, _ in option.sets)]
        ours += [name for value in option.values.values() if isinstance(value, tuple) for name, _ in value]
        assert all(name in by_flag() for name in ours if name), flag
        assert not option.sampling or option.sampling in SamplingParams.__struct_fields__, flag
        assert option.flag or option.sets or option.sampling or option.note, flag
    assert all(flag in engine.options for flag in engine.variables.values())


def test_tables_of_variables_name_options_of_ours() -> None:
    assert all(flag in by_flag() for flag, _ in FLAGS.values())
    assert all(name.count("/") == 1 for name in ollama.HUB.values())


@pytest.mark.parametrize("system", [name for name, engine in ENGINES.items() if engine.options])
def test_every_value_of_a_table_is_one_that_serve_takes(system: System) -> None:
    """A line with all options, for each of the words of their tables."""
    command = {
        "llama_cpp": "llama-server",
        "ollama": "ollama run qwen3",
        "tgi": "text-generation-launcher",
        "lmdeploy": "lmdeploy serve api_server /m",
    }[system]
    options = ENGINES[system].options
    for flag, option in options.items():
        values = [value for value in option.values.values() if value is not None]
        if option.flag and not isinstance(next(iter(values), ""), tuple):
            assert all(fit(by_flag()[option.flag], value) is not None for value in values), flag
    words = {flag: ["", "1", "x", *option.values] for flag, option in options.items()}
    for i in range(max(map(len, words.values()))):
        serve_takes(" ".join([command, *(f"{flag} {some[i % len(some)]}" for flag, some in words.items())]))


STARTS = (
    "llama-server",
    "ollama run",
    TGI,
    LMDEPLOY,
    "docker run -p 1:2",
    "docker run vllm/vllm-openai",
    "A=$B B=1",
)
word = st.one_of(
    st.sampled_from(sorted({flag for engine in ENGINES.values() for flag in engine.options})),
    st.sampled_from(
        ["-v", "/a:/b", "--gpus", "bash", "-c", "-p", "8080:80", "ollama/ollama", "$A", "x.gguf"]
    ),
    st.text(max_size=4),
)


@settings(max_examples=100, deadline=None)
@examples(st.sampled_from(STARTS), st.lists(word, max_size=8))
def test_any_words_are_translated_to_what_serve_takes(start: str, words: list[str]) -> None:
    try:
        translation = translate([*start.split(), *words], only_working=True)
    except OptionsError as error:
        assert all(error.problems)
        return
    translation.yaml()
    assert shlex.split(translation.line())
    from_argv(translation.words()[2:])
