"""Limits of the exchange of experts on Atlas A2 and A3: figures of CANN's formula worked out by hand."""

import pytest

from runtime.devices.ascend.soc import SOCS, ExpertLayout, Name, soc_named

R1 = ExpertLayout(hidden=7168, top_k=8, num_experts=256, num_ranks=32)
QWEN = ExpertLayout(hidden=4096, top_k=8, num_experts=128, num_ranks=16)


@pytest.mark.parametrize(
    ("soc", "layout", "buffer_mb", "tokens"),
    [
        # 2 * (8 * 32 * 14848 + 9 * 14336) bytes a token
        ("a3", R1, 650, 86),
        ("a3", R1, 400, 53),
        ("a3", R1, 200, 26),
        ("a3", R1, 100_000, 512),
        # 2 * (8 * 16 * 8704 + 9 * 8192) bytes a token
        ("a3", QWEN, 400, 176),
        # 2 * 32 * 8 * 7168 * 2 bytes a token, behind 4 MiB
        ("a2", R1, 400, 56),
        ("a2", R1, 100_000, 256),
        ("a2", R1, 1, 0),
    ],
)
def test_tokens_that_a_buffer_holds(soc: Name, layout: ExpertLayout, buffer_mb: int, tokens: int) -> None:
    found = SOCS[soc]
    assert found.dispatched(layout, buffer_mb) == tokens
    if 0 < tokens < found.max_tokens:
        assert found.buffer_mb(layout, tokens) <= buffer_mb < found.buffer_mb(layout, tokens + 1)


@pytest.mark.parametrize(
    ("soc", "changes", "is_taken"),
    [
        ("a2", {}, True),
        ("a3", {}, True),
        ("a2", {"hidden": 512}, True),
        ("a3", {"hidden": 512}, False),
        ("a2", {"hidden": 7680}, False),
        ("a3", {"hidden": 7680}, True),
        ("a2", {"hidden": 7152}, False),
        ("a2", {"num_ranks": 24}, False),
        ("a3", {"num_ranks": 24}, True),
        ("a3", {"num_ranks": 1}, False),
        ("a3", {"top_k": 17}, False),
        ("a3", {"num_experts": 2048}, False),
    ],
)
def test_sizes(soc: Name, changes: dict[str, int], is_taken: bool) -> None:
    layout = ExpertLayout(**{name: getattr(R1, name) for name in R1.__struct_fields__} | changes)
    assert SOCS[soc].takes(layout) == is_taken
    assert (SOCS[soc].dispatched(layout, 4000) > 0) == is_taken


@pytest.mark.parametrize(
    ("reported", "name"),
    [("Ascend910B3", "a2"), ("Ascend910B4-1", "a2"), ("Ascend910_9391", "a3"), ("Ascend310P3", None)],
)
def test_names_of_the_driver(reported: str, name: str | None) -> None:
    soc = soc_named(reported)
    assert (soc and soc.name) == name
