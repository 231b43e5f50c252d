"""What `runtime serve` refuses before anything acts, `runtime check explain` refuses in the same words and
with the same exit code; so do `check memory` and the library."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from runtime import Engine, asgi, server
from runtime.cli import main
from runtime.errors import StartError
from runtime.options import facts
from runtime.start import class_problem
from tests.models.make import make_checkpoint
from tests.models.make_pooled import make_pooled

# a command line, in which {names} are files and folders of the fixture, and words of the refusal
REFUSED: tuple[tuple[str, str], ...] = (
    ("--nonsense", "--nonsense is no flag"),
    ("--port 70000", "--port 70000 is not possible"),
    ("--host 203.0.113.7", "cannot listen on 203.0.113.7"),
    ("--host no.such.name.invalid", "cannot listen on no.such.name.invalid"),
    ("--config {nowhere}", "--config"),
    ("--profile nosuch", "--profile nosuch is neither"),
    ("--load-format private", "take auto, or the format that the folder has"),
    ("--speculative-num-draft-tokens 3", "does nothing without --speculative-algorithm"),
    # the model
    ("--model-path {nowhere}", "does not exist"),
    ("--model-path {file}", "is a file"),
    ("--model-path {empty}", "config.json"),
    ("--model-path {broken_config}", "config.json"),
    ("--model-path {no_weights}", "has no weights"),
    ("--model-path {cut_weights}", "is damaged or cut short"),
    ("--model-path {some_weights}", "files are missing"),
    ("--model-path {twice}", "is in both"),
    ("--model-checksum {nowhere}", "--model-checksum"),
    ("--model-checksum {file}", "is no list of SHA-256 checksums"),
    ("--model-checksum", "takes the checksums of the hub"),
    ('--json-model-override-args {{"hidden_size":-1}}', "hidden_size"),
    ("--context-length 10000000", "is beyond the model's"),
    ("--tp 99", "tensor"),
    ("--quantization awq", "awq"),
    ("--quantization fp8 --device npu", "npu"),
    ("--attention-backend flashmla", "--attention-backend flashmla"),
    ("--max-total-tokens 1", "--max-total-tokens 1"),
    ("--device cuda --offload-group-size 2", "--offload-group-size 2 with --offload-num-in-group 1 keeps"),
    # text
    ("--tokenizer-path {empty}", "has no tokenizer.json"),
    ("--tokenizer-path {broken_tokenizer}", "can't be read"),
    ("--tool-call-parser nosuch", "--tool-call-parser nosuch is unknown"),
    ("--reasoning-parser nosuch", "--reasoning-parser nosuch is unknown"),
    ("--chat-template nosuch", "--chat-template nosuch is none of"),
    ("--chat-template {broken_template}", "template"),
    ("--hf-chat-template-name nosuch", "--hf-chat-template-name nosuch"),
    ("--completion-template nosuch", "--completion-template nosuch is none of"),
    ("--completion-template {file}", "must have {prefix} and {suffix}"),
    ('--preferred-sampling-params {{"temprature":1}}', "--preferred-sampling-params"),
    ("--warmups generate,nosuch", "--warmups nosuch does not exist"),
    # adapters
    ("--enable-lora --max-lora-rank 8 --lora-target-modules all -m {gemma3n}", "adapters of"),
    ("--lora-paths x={nowhere}", "--lora-paths x"),
    ("--lora-paths x={empty}", "--lora-paths x"),
    ("--enable-lora --lora-target-modules nosuch --max-lora-rank 8", "--lora-target-modules names nosuch"),
    # models
    ("--pipeline-parallel-size 2 -m {zamba2}", "blocks that layers share are given the embeddings"),
    ("--pipeline-parallel-size 2 -m {longcat}", "what experts return is added behind the next layer"),
    ("--tp-size 2 --dp-size 2 --enable-dp-attention -m {bert}", "sees whole texts; take replicas"),
    ("--tp-size 2 --ep-size 2 -m {longcat}", "this model's experts are on all ranks, split"),
    ("--tp-size 2 --ep-size 2 -m {gpt_oss}", "this model's experts are on all ranks, split"),
    ("--tp-size 2 --ep-size 2 -m {nemotron_h}", "this model's experts are on all ranks, split"),
    ("--device cuda -m {deepseek_v32}", "index_topk"),
    ("--mamba-backend flashinfer -m {mamba}", "--mamba-backend flashinfer is not possible on cpu"),
    # this machine
    ("--numa-node 9999", "--numa-node 9999 is no node"),
    ("--ssl-certfile {nowhere}", "TLS cannot start"),
    ("--ssl-certfile {file}", "TLS cannot start"),
    ("--ssl-keyfile {file}", "--ssl-keyfile does nothing without --ssl-certfile"),
    ("--api-key-file {nowhere}", "--api-key-file"),
    ("--api-key-file {blank}", "has no keys"),
    ("--crash-dump-folder {file}", "cannot be written to"),
    ("--log-requests --log-requests-target {file}/below", "cannot be written to"),
    ("--export-metrics-to-file --export-metrics-to-file-dir {file}", "cannot be written to"),
    ("--file-storage-path {file}", "can't be used"),
    ("--enable-custom-logit-processor --logit-processors no_such_module:X", "can't be loaded"),
    ("--enable-custom-logit-processor --logit-processors runtime.errors", "give package.module:Class"),
    ("--enable-hierarchical-cache -m {mamba}", "no layer of this model attends"),
    ("--grammar-backend outlines", "--grammar-backend outlines needs the package no_such_package"),
    (
        "--enable-hierarchical-cache --hicache-storage-backend dynamic "
        '--hicache-storage-backend-extra-config {{"module":"no_such_module:X"}}',
        "the storage backend no_such_module:X",
    ),
    ("--enable-custom-logit-processor --logit-processors json.nosuch:X", "can't be loaded"),
    (
        "--enable-custom-logit-processor --logit-processors runtime.errors:X",
        "runtime.errors:X can't be loaded",
    ),
    (
        "--enable-hierarchical-cache --hicache-storage-backend file --hicache-storage-backend-extra-config "
        '{{"nosuch":1}}',
        "nosuch",
    ),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files and folders by the names that command lines have for them."""
    root = tmp_path_factory.mktemp("refusals")
    found = {name: root / name for name in ("nowhere", "file", "empty", "blank", "broken_template")}
    found["file"].write_text("neither this nor that\n")
    found["blank"].write_text("# nothing\n")
    found["broken_template"].write_text("{% for x %}")
    found["empty"].mkdir()
    whole = make_checkpoint("qwen2", root / "whole", shard_size="20KB")
    found["bert"] = make_pooled("bert", "embed", root / "bert")
    found["mamba"] = make_checkpoint("mamba2", root / "mamba")
    for family in ("gemma3n", "zamba2", "deepseek_v32", "gpt_oss", "nemotron_h", "longcat"):
        found[family] = make_checkpoint(family, root / family)
    for name in ("broken_config", "no_weights", "cut_weights", "some_weights", "twice", "broken_tokenizer"):
        found[name] = Path(shutil.copytree(whole, root / name))
    shards = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(shards) > 1
    (found["broken_config"] / "config.json").write_text("{")
    (found["broken_tokenizer"] / "tokenizer.json").write_text("{")
    (found["some_weights"] / shards[0]).unlink()
    with (found["cut_weights"] / shards[0]).open("r+b") as file:
        file.truncate((found["cut_weights"] / shards[0]).stat().st_size - 1)
    index = found["twice"] / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[1], "again.safetensors"))
    shutil.copy(found["twice"] / shards[0], found["twice"] / "again.safetensors")
    for path in found["no_weights"].glob("*.safetensors*"):
        path.unlink()
    return found


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done by starts that were not refused: none may be."""
    done: list[str] = []

    def act(name: str) -> Callable[..., None]:
        def acted(*_: object, **__: object) -> None:
            done.append(name)
            raise AssertionError(f"{name} was called: nothing was refused")

        return acted

    monkeypatch.setattr("runtime.cli.end_at_once_on_signals", lambda: None)
    # processes of ranks, which end with a refusal: tests/actors/test_early_ranks.py
    monkeypatch.setattr("runtime.actors.early_ranks.open_early", lambda plan, early: None)
    monkeypatch.setattr(server, "run", lambda plan, ranks: anyio.run(server.main, plan, ranks))
    for name in ("listen", "open_stored_objects"):
        monkeypatch.setattr(server, name, act(name))
    monkeypatch.setattr("runtime.core.RequestLogs", act("RequestLogs"))
    monkeypatch.setitem(facts.GRAMMAR_PACKAGES, "outlines", "no_such_package")
    return done


def words_of(line: str, files: dict[str, Path]) -> list[str]:
    words = [word.format(**files) for word in line.split()]
    return ["--port", "0", *words] if "--port" not in words else words


@pytest.mark.parametrize(("line", "refusal"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_check_refuses_what_a_server_refuses(
    line: str, refusal: str, files: dict[str, Path], acts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words, ended = words_of(line, files), []
    commands = [["serve"], ["check", "explain"]]
    if REFUSED.index((line, refusal)) % 6 == 0:
        commands.append(["check", "memory"])
    for command in commands:
        code = main([*command, *words])
        printed = capsys.readouterr()
        ended.append((code, printed.err.replace(f"runtime {command[0]}: ", "")))
        assert not printed.out
    assert ended[0][0] == 2 and refusal in ended[0][1]
    assert all(one == ended[0] for one in ended)
    assert not acts


@pytest.mark.parametrize(
    "options",
    [
        {"tool_call_parser": "nosuch"},
        {"numa_node": [9999]},
        {"model_path": "{cut_weights}"},
        {"tokenizer_path": "{empty}"},
        {"warmups": "nosuch"},
    ],
    ids=str,
)
def test_the_library_refuses_the_same(
    options: dict[str, object], files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        name: value.format(**files) if isinstance(value, str) else value for name, value in options.items()
    }
    with pytest.raises(StartError) as caught:
        Engine(**given)
    words = [
        word
        for name, value in given.items()
        for word in ("--" + name.replace("_", "-"), *map(str, value if isinstance(value, list) else [value]))
    ]
    assert main(["check", "--port", "0", *words]) == 2
    assert capsys.readouterr().err == f"runtime check: {caught.value}\n"


def test_modules_are_found_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "pack" / "plain.py").write_text("import os\nX = 1\nclass Y: pass\nraise SystemExit")
    (tmp_path / "pack" / "inner" / "deep.py").write_text("from os import path as Z\n")
    (tmp_path / "pack" / "star.py").write_text("from os import *\n")
    (tmp_path / "pack" / "few.py").write_text("class Y: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, name in (("plain", "X"), ("plain", "Q"), ("inner.deep", "Z"), ("star", "Q"), ("few", "Y")):
        assert class_problem(f"pack.{module}", name) == "", (module, name)
    assert class_problem("pack.few", "X") == "AttributeError: module 'pack.few' has no attribute 'X'"
    assert class_problem("pack.gone", "X") == "ModuleNotFoundError: No module named 'pack.gone'"
    assert "pack" not in sys.modules


@pytest.mark.anyio
async def test_a_mounted_application_refuses_the_same() -> None:
    with pytest.raises(StartError, match="--tool-call-parser nosuch is unknown"):
        async with asgi(tool_call_parser="nosuch").lifespan():
            raise AssertionError("it started")


def test_a_port_that_is_taken_and_a_device_that_is_missing_are_notes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be otherwise when a server starts, or where it does; `serve` refuses the port."""
    monkeypatch.setattr(facts, "ACCELERATORS", (("cuda", "no_such_device*", lambda: True),))
    monkeypatch.setattr("runtime.cli.end_at_once_on_signals", lambda: None)
    # processes of ranks, which end with a refusal: tests/actors/test_early_ranks.py
    monkeypatch.setattr("runtime.actors.early_ranks.open_early", lambda plan, early: None)
    monkeypatch.setattr(server, "run", lambda plan, ranks: anyio.run(server.main, plan, ranks))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["check", "explain", "--diff", "--port", port, "--device", "cuda"]) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
        assert main(["serve", "--port", port, "--device", "null"]) == 2
        refusal = capsys.readouterr().err.replace("runtime serve: ", "note: ").strip()
    assert notes[0] == refusal and f"cannot listen on 127.0.0.1:{port}" in refusal
    assert notes[1].startswith("note: --device cuda is not on this machine")


def test_a_process_refuses_as_this_one_does(files: dict[str, Path]) -> None:
    words = ["--port", "0", "--model-path", str(files["cut_weights"])]
    ended = [
        subprocess.run(
            [sys.executable, "-m", "runtime", *command, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for command in (["serve"], ["check", "explain"])
    ]
    assert [one.returncode for one in ended] == [2, 2]
    assert len({one.stderr.partition(": ")[2] for one in ended}) == 1 and "cut short" in ended[0].stderr
