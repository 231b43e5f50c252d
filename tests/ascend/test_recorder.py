"""Golden traces of a small piece of work."""

from pathlib import Path

import pytest
import torch
import torch_npu

from tests.ascend import recorder
from tests.ascend.recorder import compare, folded, recorded

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


def trace_of_two_layers(lengths: list[int]) -> str:
    x, weight = (
        torch.ones(2, 64, device="npu", dtype=torch.bfloat16),
        torch.ones(64, 64, device="npu", dtype=torch.bfloat16),
    )
    cache, mask = (
        torch.ones(4, 128, 64, device="npu", dtype=torch.bfloat16),
        torch.ones(2048, 2048, dtype=torch.bool, device="npu"),
    )
    pages = torch.zeros(2, 2, dtype=torch.int32, device="npu")
    cast = torch_npu.npu_format_cast(weight, 29)
    with recorded() as trace:
        for _ in range(2):
            q = torch_npu.npu_rms_norm(x, x[0])[0].mm(cast.t()).view(2, 4, 16)
            torch_npu.npu_fused_infer_attention_score(
                q,
                cache,
                cache,
                atten_mask=mask,
                block_table=pages,
                input_layout="TND",
                actual_seq_lengths=[1, 2],
                num_heads=4,
                actual_seq_lengths_kv=lengths,
                block_size=128,
                num_key_value_heads=4,
                scale=0.25,
                sparse_mode=3,
            )
        q.cpu()
    return trace.text()


def test_a_trace_is_compared_with_the_one_in_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WRITE_GOLDEN", raising=False)
    compare("two-layers", trace_of_two_layers([5, 200]))
    with pytest.raises(AssertionError, match=r"\+    npu.npu_fused.*actual_seq_lengths_kv=\[6,200\]"):
        compare("two-layers", trace_of_two_layers([6, 200]))


def test_a_trace_is_written_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FOLDER", tmp_path)
    with pytest.raises(AssertionError, match=r"\+a\(\)"):
        compare("new", "a()\n")
    monkeypatch.setenv("WRITE_GOLDEN", "1")
    compare("new", "a()\n")
    assert (tmp_path / "new.txt").read_text() == "a()\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("abc", ["a", "b", "c"]),
        ("aab", ["2 times:", "    a", "b"]),
        ("xababy", ["x", "2 times:", "    a", "    b", "y"]),
        ("aabaab", ["2 times:", "    2 times:", "        a", "    b"]),
    ],
)
def test_repeats_are_written_once(lines: str, expected: list[str]) -> None:
    assert folded(list(lines)) == expected
