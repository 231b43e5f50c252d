"""What peers print of their steps is read in both forms that there are."""

import os
from pathlib import Path

import pytest

from bench.cpu import batched_steps, llama_cpp

JSON = """main: n_kv_max = 1280
{"n_kv_max": 1280, "pp": 128, "tg": 24, "pl": 1, "n_kv": 152, "t_pp": 0.5, "t_tg": 1.2, "t": 1.7}
{"n_kv_max": 1280, "pp": 128, "tg": 24, "pl": 8, "n_kv": 1216, "t_pp": 4.0, "t_tg": 2.4, "t": 6.4}
"""
TABLE = """main: n_kv_max = 1280, n_batch = 2048, flash_attn = 0

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     24 |    1 |    152 |    0.500 |   256.00 |    1.200 |    20.00 |    1.700 |    89.41 |
|   128 |     24 |    8 |   1216 |    4.000 |   256.00 |    2.400 |    80.00 |    6.400 |   190.00 |

llama_print_timings:        load time =    1.00 ms
"""


@pytest.mark.parametrize("printed", [JSON, TABLE], ids=["json", "table"])
def test_both_forms(printed: str) -> None:
    assert batched_steps(printed) == {"1": 50.0, "8": 100.0}


def test_nothing_is_no_figure() -> None:
    with pytest.raises(ValueError, match="no figures: error: unknown model"):
        batched_steps("error: unknown model")


@pytest.mark.parametrize(("form", "printed"), [("--output-format", JSON), ("", TABLE)], ids=["json", "table"])
def test_programs_run_in_a_folder_of_their_own(
    form: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doubles of both programs, which leave a file where they run."""
    (tmp_path / "figures").write_text(printed)
    scripts = {
        "llama-batched-bench": f'case "$*" in --help) echo "options: -m {form}";; '
        f'*--output-format*) [ -n "{form}" ] || exit 1; touch left; cat {tmp_path}/figures;; '
        f"*) touch left; cat {tmp_path}/figures;; esac",
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
