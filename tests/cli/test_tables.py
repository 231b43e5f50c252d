"""`runtime options` and `runtime translate` as commands."""

import io
import json

import pytest

from runtime.cli import main
from runtime.options.docs import markdown
from runtime.options.table import foreign_rows, rows


def test_options_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {row.flag}" in text for row in (*rows(), *foreign_rows()))
    assert main(["options", "lora"]) == 0 and "--port" not in capsys.readouterr().out
    assert main(["options", "nothing"]) == 2


def test_options_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "--json"]) == 0
    listed = {one["flag"]: one for one in json.loads(capsys.readouterr().out)}
    row = listed["--page-size"]
    assert row["note"].startswith("auto is 16 on CPU") and row["help"].startswith("Tokens in one page")
    assert {name: row[name] for name in ("aliases", "group", "type", "default", "choices", "status")} == {
        "aliases": [],
        "group": "memory",
        "type": "int >=1|auto",
        "default": "auto",
        "choices": None,
        "status": "works",
    }
    assert main(["options", "--status"]) == 0
    counts = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert sum(map(int, counts.values())) == len(listed)
    assert main(["options", "lora", "--json"]) == 0
    assert {one["group"] for one in json.loads(capsys.readouterr().out)} == {"lora"}
    assert main(["options", "nothing", "--json"]) == 2
    with pytest.raises(SystemExit):
        main(["options", "lora", "--schema"])
    capsys.readouterr()
    assert main(["options", "--schema"]) == 0 and "properties" in json.loads(capsys.readouterr().out)
    assert main(["options", "--markdown"]) == 0 and capsys.readouterr().out == markdown()


def test_translate(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = ["vllm", "serve", "/m", "--max-num-seqs", "8", "--swap-space", "4"]
    assert main(["translate", "--", *theirs]) == 0
    printed = capsys.readouterr()
    assert printed.out == "runtime serve --model-path /m --max-running-requests 8 --port 8000\n"
    assert printed.err.startswith("# --swap-space is left out")
    assert main(["translate", "--yaml", "--", *theirs]) == 0
    assert capsys.readouterr().out == 'model-path: "/m"\nmax-running-requests: 8\nport: 8000\n'
    assert main(["translate", "--json", "--", *theirs]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {
        "--model-path": "/m",
        "--max-running-requests": "8",
        "--port": "8000",
    }


def test_translate_takes_a_command_in_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "vllm serve '/m n' --port 1"]) == 0
    assert capsys.readouterr().out == "runtime serve --model-path '/m n' --port 1\n"


def test_translate_takes_a_command_without_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "CUDA_VISIBLE_DEVICES=1",
        "vllm",
        "serve",
        "/m",
        "--port",
        "1",
        "--otlp-traces-endpoint",
        "u:1",
    ]
    assert main(["translate", *command]) == 0
    printed = capsys.readouterr()
    assert printed.out == (
        "CUDA_VISIBLE_DEVICES=1 runtime serve --model-path /m --port 1 --enable-trace "
        "--otlp-traces-endpoint u:1\n"
    )
    assert main(["translate", "--only-working", "--yaml", *command]) == 0
    printed = capsys.readouterr()
    assert printed.out == 'model-path: "/m"\nport: 1\nenable-trace: true\notlp-traces-endpoint: "u:1"\n'
    assert "to set in the environment: CUDA_VISIBLE_DEVICES" in printed.err


def test_translate_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("# a script\npython -m sglang.launch_server \\\n  --port 1 # comment\n")
    )
    assert main(["translate"]) == 0 and capsys.readouterr().out == "runtime serve --port 1\n"
    script = "export HCCL_BUFFSIZE=400\nvllm serve '/a\n b' # two lines\necho done\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    assert main(["translate", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings == {"--hccl-buffer-mb": "400", "--model-path": "/a\n b", "--port": "8000"}
    monkeypatch.setattr("sys.stdin", io.StringIO('sglang "'))
    assert main(["translate"]) == 2 and "cannot be read" in capsys.readouterr().err


def test_translate_knows_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--", "ls"]) == 2 and "no command of SGLang" in capsys.readouterr().err
