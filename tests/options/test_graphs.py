"""Options of graphs, on devices with and without."""

from pathlib import Path

import msgspec
import pytest

from runtime import settings
from runtime.errors import OptionsError
from runtime.messages.ranks import CompileConfig
from runtime.models.config.altup_config import GlobalHeads
from runtime.models.config.model_config import read_config
from runtime.options.facts import DEVICES, MachineFacts
from runtime.options.parse import from_argv
from runtime.options.plan import Plan
from runtime.options.resolve import resolve
from runtime.settings import start_rank

MACHINE = MachineFacts(cores=8, memory_bytes=2**36, entropy=1)
WITHOUT = DEVICES["cpu"]
WITH = msgspec.structs.replace(WITHOUT, graph_max_running=32)
MODEL = read_config(str(Path(__file__).parents[2] / "runtime" / "pocket"))


def plan(words: str, *, has_graphs: bool = True) -> Plan:
    return resolve(from_argv(words.split()), MODEL, WITH if has_graphs else WITHOUT, MACHINE)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("", [1, 2, 4, 8, 16, 24, 32]),
        ("--max-running-requests 6", [1, 2, 4, 6]),
        ("--cuda-graph-max-bs 9", [1, 2, 4, 8, 9]),
        ("--cuda-graph-bs 3 5", [3, 5]),
        ("--disable-cuda-graph", []),
    ],
)
def test_sizes_that_the_ranks_get(words: str, sizes: list[int]) -> None:
    assert start_rank(plan(words), MODEL).graph_sizes == sizes


def test_padding() -> None:
    assert (
        start_rank(plan(""), MODEL).graph_pads
        and not start_rank(plan("--disable-cuda-graph-padding"), MODEL).graph_pads
    )


def test_a_device_without_graphs_needs_none() -> None:
    assert start_rank(plan("--disable-cuda-graph", has_graphs=False), MODEL).graph_sizes == []
    assert plan("", has_graphs=False).why["cuda_graph_max_bs"].reason == "cpu captures no graphs"


@pytest.mark.parametrize(
    ("words", "has_graphs", "problem"),
    [
        ("--cuda-graph-bs 1 2", False, "--cuda-graph-bs: cpu captures no graphs"),
        (
            "--cuda-graph-max-bs 8 --disable-cuda-graph-padding",
            False,
            "--cuda-graph-max-bs and --disable-cuda-graph-padding: cpu captures no graphs",
        ),
        (
            "--cuda-graph-bs 1 --disable-cuda-graph",
            True,
            "--cuda-graph-bs and --disable-cuda-graph contradict each other",
        ),
    ],
)
def test_what_cannot_be_meant(words: str, has_graphs: bool, problem: str) -> None:
    with pytest.raises(OptionsError) as refused:
        plan(words, has_graphs=has_graphs)
    assert problem in str(refused.value)


CARD = msgspec.structs.replace(DEVICES["cuda"], chunk_tokens=200)


def on_card(words: str) -> Plan:
    return resolve(from_argv(["--device", "cuda", *words.split()]), MODEL, CARD, MACHINE)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--no-enable-piecewise-cuda-graph", []),
        ("--disable-cuda-graph", []),
        ("--offload-group-size 2 --piecewise-cuda-graph-max-tokens 40", [16, 32, 40]),
        ("--piecewise-cuda-graph-tokens 7 100", [7, 100]),
        ("--max-running-requests 8", [16, 32, 64, 96, 128, 160, 192, 208]),
        ("--enable-piecewise-cuda-graph --piecewise-cuda-graph-max-tokens 70", [16, 32, 64, 70]),
        ("--enable-piecewise-cuda-graph --piecewise-cuda-graph-tokens 7 100", [7, 100]),
    ],
)
def test_tokens_of_steps_in_pieces(words: str, sizes: list[int]) -> None:
    assert start_rank(on_card(words), MODEL).piecewise_sizes == sizes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--enable-piecewise-cuda-graph --disable-cuda-graph", "contradict each other"),
        (
            "--piecewise-cuda-graph-tokens 64 --disable-cuda-graph",
            "--piecewise-cuda-graph-tokens: there are no piecewise graphs (--disable-cuda-graph)",
        ),
        (
            "--enable-piecewise-cuda-graph --piecewise-cuda-graph-tokens 8 400 --max-running-requests 8",
            "400 is more than any step has (208",
        ),
    ],
)
def test_what_pieces_cannot_be(words: str, problem: str) -> None:
    with pytest.raises(OptionsError) as refused:
        on_card(words)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        ("", CompileConfig()),
        ("--enable-torch-compile", CompileConfig(max_rows=32)),
        (
            "--enable-torch-compile --torch-compile-max-bs 4 --enable-torch-compile-debug-mode",
            CompileConfig(max_rows=4, explains=True),
        ),
        (
            "--enable-piecewise-cuda-graph --piecewise-cuda-graph-compiler inductor",
            CompileConfig(is_piecewise=True),
        ),
    ],
)
def test_what_is_compiled(words: str, compiled: CompileConfig) -> None:
    assert start_rank(on_card(words), MODEL).compiled == compiled
    assert compiled.is_enabled == bool(words)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--enable-torch-compile --disable-cuda-graph", "only captured steps are compiled"),
        (
            "--enable-torch-compile --tensor-parallel-size 2",
            "--enable-torch-compile is not possible with several ranks; leave it out",
        ),
        ("--torch-compile-max-bs 4", "--enable-torch-compile"),
        ("--device cpu --enable-torch-compile", "--enable-torch-compile"),
    ],
)
def test_what_cannot_be_compiled(words: str, problem: str) -> None:
    with pytest.raises(OptionsError) as refused:
        resolve(
            from_argv(["--device", "cuda", *words.split()]),
            MODEL,
            DEVICES["cpu"] if "cpu" in words else CARD,
            MACHINE,
        )
    assert problem in str(refused.value)


def test_shared_keys_and_long_heads_are_seen() -> None:
    """Layers that read another's keys are not compiled, and kernels are asked for the longest heads."""
    shared = msgspec.structs.replace(MODEL, kv_sources=tuple(range(MODEL.num_layers)))
    with pytest.raises(OptionsError, match="not possible with layers that share keys and values"):
        resolve(from_argv(["--device", "cuda", "--enable-torch-compile"]), shared, CARD, MACHINE)
    heads = GlobalHeads(head_dim=512, num_kv_heads=1, shares_values=False)
    assert msgspec.structs.replace(MODEL, global_heads=heads).longest_head == 512


def test_traces_of_captures_have_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    assert start_rank(on_card(""), MODEL).trace_folder == ""
    assert start_rank(on_card("--enable-profile-cuda-graph"), MODEL).trace_folder == str(
        tmp_path / "runtime-captures-"
    )
