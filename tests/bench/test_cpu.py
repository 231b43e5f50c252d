"""What peers print of their steps is read."""

import os
from pathlib import Path

import pytest

from bench.cpu import batched_steps, llama_cpp

TABLE = """main: n_kv_max = 1280, n_batch = 2048, flash_attn = 0

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     24 |    1 |    152 |    0.500 |   256.00 |    1.200 |    20.00 |    1.700 |    89.41 |
|   128 |     24 |    8 |   1216 |    4.000 |   256.00 |    2.400 |    80.00 |    6.400 |   190.00 |

llama_print_timings:        load time =    1.00 ms
"""


def test_a_table_becomes_milliseconds() -> None:
    assert batched_steps(TABLE) == {"1": 50.0, "8": 100.0}


def test_nothing_is_no_figure() -> None:
    with pytest.raises(ValueError, match="no figures: error: unknown model"):
        batched_steps("error: unknown model")


@pytest.mark.parametrize("to_stderr", ["", ">&2"], ids=["stdout", "stderr"])
def test_programs_run_in_a_folder_of_their_own(
    to_stderr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doubles of both programs, which leave a file where they run."""
    (tmp_path / "figures").write_text(TABLE)
    scripts = {
        "llama-batched-bench": f"touch left; cat {tmp_path}/figures {to_stderr}",
        "llama-bench": "touch left; echo '[{\"avg_ts\": 123.46}]'",
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    before = set(os.listdir())
    found = llama_cpp(Path("."), Path("model.gguf"), [1, 8])
    assert found == {"step_ms": {"1": 50.0, "8": 100.0}, "prefill_tokens_s": 123.5}
    assert set(os.listdir()) == before
