"""Command lines of the reference's documents, and what an unknown option most likely is."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.errors import OptionsError
from runtime.options.compat.suggest import foreign, unknown
from runtime.options.parse import from_argv, from_values
from runtime.options.table import by_flag, rows

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "reference_commands.json").read_text())


@pytest.mark.parametrize("command", REFERENCE["commands"], ids=lambda command: command["words"][13:60])
def test_a_command_of_the_documents_is_accepted_or_refused_by_name(command: dict[str, Any]) -> None:
    """One sentence for each flag that is refused, which begins with it, and none about another one."""
    words = command["words"].split()
    if "refused" not in command:
        assert from_argv(words).sources
        return
    with pytest.raises(OptionsError) as caught:
        from_argv(words)
    assert [problem.split()[0] for problem in caught.value.problems] == command["refused"]


def test_the_config_file_of_the_documents(tmp_path: Path) -> None:
    (file := tmp_path / "config.yaml").write_text(yaml.safe_dump(REFERENCE["config"]))
    parsed = from_argv(["--config", str(file)])
    assert parsed.options.parallel.tensor_parallel_size == 2 and parsed.options.logs.log_requests
    assert any("--enable-metrics" in f"--{notice}" for notice in parsed.notices)


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--gpu-memory-utilization", "--mem-fraction-static"),
        ("--gpu_memory_utilization", "--mem-fraction-static"),
        ("--gpu-memory-utilisation", "--mem-fraction-static"),
        ("--gpu-mem-utilization", "--mem-fraction-static"),
        ("--max-model-len", "--context-length"),
        ("--max-model-length", "--context-length"),
        ("--max-num-seqs", "--max-running-requests"),
        ("--max-num-seq", "--max-running-requests"),
        ("--max-num-batched-tokens", "--chunked-prefill-size"),
        ("--block-size", "--page-size"),
        ("--enforce-eager", "--disable-cuda-graph"),
        ("--no-enable-prefix-caching", "--disable-radix-cache"),
        ("--no-enable-chunked-prefill", "--chunked-prefill-size -1"),
        ("--enable-expert-parallel", "--expert-parallel-size tp"),
        ("--enable-prefix-caching", "it is what happens anyway"),
        ("--swap-space", "it has no place here"),
        ("--seed", "--random-seed"),
        ("--ctx-size", "--context-length"),
        ("-c", "--context-length"),
        ("--num-shard", "--tensor-parallel-size"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--prt", "--port"),
        ("--qqqqqq", "`runtime options` lists all"),
    ],
)
def test_an_unknown_flag_says_what_is_meant(flag: str, ours: str) -> None:
    with pytest.raises(OptionsError) as caught:
        from_argv([flag, "1"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{flag} is ") and ours in problem


def test_names_of_the_library_say_it_too() -> None:
    with pytest.raises(
        OptionsError, match="gpu_memory_utilization is vLLM's; here it is --mem-fraction-static"
    ):
        from_values({"gpu_memory_utilization": 0.9})
    with pytest.raises(OptionsError, match="prt is no option of this runtime; did you mean port[?]"):
        from_values({"prt": 1})


@pytest.mark.parametrize("row", rows()[::12], ids=lambda row: row.flag)
def test_a_slip_in_our_own_names_finds_them(row: Any) -> None:
    """A letter too few in a name of ours is not taken for another server's."""
    middle = len(row.flag) // 2
    slip = row.flag[:middle] + row.flag[middle + 1 :]
    if slip not in by_flag() and slip not in foreign():
        assert "did you mean --" in unknown(slip, "flag"), unknown(slip, "flag")


def test_what_others_call_ours_exists_here() -> None:
    """Each flag of ours that a suggestion names is in the table."""
    named = {word for one in foreign().values() for word in one.ours.split() if word.startswith("--")}
    assert named <= by_flag().keys()
