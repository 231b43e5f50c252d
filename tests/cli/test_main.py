"""The command line as a whole: commands, exit codes, one line for each problem."""

import socket
import subprocess
import sys

import pytest

from runtime.cli import COMMANDS, main


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["--help"], 0, "usage: runtime COMMAND", ""),
        ([], 2, "usage: runtime COMMAND", ""),
        (["--version"], 0, "runtime ", ""),
        (["sevre"], 2, "", "sevre is no command; did you mean serve?"),
        (["qqq"], 2, "", "qqq is no command; choose one of serve, "),
        (["check", "memroy"], 2, "", "memroy is none of explain, memory, doctor"),
        (["chat", "http://127.0.0.1:1"], 2, "", "give the server as --url http://127.0.0.1:1"),
        (["serve", "--help"], 0, "--model-path", ""),
        (["serve", "--help", "lora"], 0, "--enable-lora", ""),
        (["serve", "--help", "nothing"], 2, "", "there is no group nothing"),
        (["serve", "--prt", "1"], 2, "", "did you mean --port?"),
        (["translate", "vllm", "serve", "x", "--port", "1"], 0, "serve --model-path x --port 1", ""),
        (["translate", "vllm-router", "--worker-urls", "http://a"], 2, "", "put nginx in front of them"),
        (["serve", "--kv-events-config", "{bad"], 2, "", "--kv-events-config {bad is not JSON: "),
        (["serve", "--kv-events-config", "{bad"], 2, "", "give an object of publisher, endpoint, "),
        (
            ["serve", "--kv-events-config", '{"a": 1}'],
            2,
            "",
            "unknown field `a`; give an object of publisher, endpoint, ",
        ),
        (["serve", "--model-path", "/does/not/exist"], 2, "", "/does/not/exist"),
    ],
)
def test_commands(argv: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    printed = capsys.readouterr()
    assert out in printed.out and err in printed.err


def test_every_problem_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "x", "--page-size", "0", "--nonsense"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("runtime serve: ") for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_loads_no_torch(command: str) -> None:
    code = (
        f"import sys; from runtime.cli import main\ntry: main(['{command}', '--help'])\nexcept SystemExit: "
        "pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys(), 'slow imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_closed_standard_streams_are_opened_anew() -> None:
    code = (
        "import os, socket, sys; from runtime import cli, log; assert sys.stderr is None\n"
        "assert cli.main(['--version']) == 0; log.setup(); log.get('test').info('goes nowhere')\n"
        "assert socket.socket().fileno() > 2 and os.get_inheritable(2)"
    )
    ended = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code])
    assert ended.returncode == 0


@pytest.mark.parametrize("more", [[], ["--grpc-mode"]])
def test_a_port_that_is_taken_is_one_line(more: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = ["serve", "--device", "null", "--port", str(taken.getsockname()[1]), *more]
        ended = subprocess.run(
            [sys.executable, "-m", "runtime", *argv], capture_output=True, text=True, timeout=60
        )
    assert ended.returncode == 2
    assert (
        "cannot listen on 127.0.0.1" in ended.stderr
        and "--port" in ended.stderr
        and "Traceback" not in ended.stderr
    )
