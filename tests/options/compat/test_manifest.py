"""Containers of manifests and compose files as commands of ours."""

import io

import pytest

from runtime.cli import main
from runtime.errors import OptionsError
from runtime.options.compat.manifest import containers

POD = """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      volumes:
        - {name: models, hostPath: {path: /data/models}}
        - {name: claim, persistentVolumeClaim: {claimName: x}}
      containers:
        - name: sidecar
          image: busybox
          command: [sleep, inf]
        - name: vllm
          image: vllm/vllm-openai:latest
          args: ["--model", "/models/qwen", "--tensor-parallel-size", "2", "--max-num-seqs", "64"]
          env:
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
            - {name: CUDA_VISIBLE_DEVICES, value: "0,1"}
          volumeMounts:
            - {name: models, mountPath: /models}
            - {name: claim, mountPath: /home/app/.cache/huggingface}
"""
SHELL = """
kind: Pod
spec:
  containers:
    - image: vllm/vllm-openai
      command: ["/bin/sh", "-c"]
      args: ["vllm serve a/b --port 9"]
"""
COMPOSE = """
services:
  web: {image: open-webui, ports: ["3000:8080"]}
  llamacpp:
    image: ghcr.io/ggml-org/llama.cpp:server
    ports: ["9090:8080"]
    volumes: ["./models:/models"]
    environment: {LLAMA_ARG_MODEL: /models/m.gguf, LLAMA_ARG_CTX_SIZE: 4096, LLAMA_ARG_N_PARALLEL: 2}
"""
LINES = """
services:
  sglang:
    image: lmsysorg/sglang:latest
    network_mode: host
    environment: [SGLANG_USE_MODELSCOPE=true]
    entrypoint: python3 -m sglang.launch_server
    command: --model-path a/b --port 30001
"""


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (
            POD,
            "CUDA_VISIBLE_DEVICES=0,1 runtime serve --model-path /data/models/qwen --tensor-parallel-size 2 "
            "--max-running-requests 64 --port 8000",
        ),
        (SHELL, "runtime serve --model-path a/b --port 9"),
        (
            COMPOSE,
            "runtime serve --model-path ./models/m.gguf --context-length 2048 --max-running-requests 2 "
            "--port 9090 --host 0.0.0.0",
        ),
        (LINES, "SGLANG_USE_MODELSCOPE=true runtime serve --model-path a/b --port 30001"),
    ],
)
def test_files(
    text: str, ours: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["translate"]) == 0
    assert capsys.readouterr().out == ours + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "kind: [",
        "spec:\n  containers: 3",
        "spec:\n  containers: [{image: 3}]",
        "services:\n  a: 3",
        "spec:\n  containers: [{image: a, env: [3]}]",
        "kind: Pod\n" + "[" * 5000,
        "kind: Pod\nspec:\n  containers: [{image: busybox}]",
        "kind: Pod\n",
    ],
)
def test_files_without_a_server(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["translate"]) == 2
    assert "runtime translate: " in capsys.readouterr().err


def test_a_file_that_is_too_long() -> None:
    with pytest.raises(OptionsError, match="too long"):
        containers("kind: Pod\n" + "#" * (1 << 20))
