"""Kernels of attention by name: a device has its own, and an error says what the others would take."""

import pytest

from runtime.options.backends import BACKENDS, why_not
from runtime.options.facts import DEVICES
from runtime.options.table import by_name


def test_devices_attend_with_their_own() -> None:
    for facts in DEVICES.values():
        assert why_not(facts.attention_backend, None, facts) is None and facts.attention_backend in BACKENDS
    assert set(BACKENDS) <= set(by_name()["attention_backend"].choices or ())


@pytest.mark.parametrize(("name", "phase", "device", "reason"), [
    ("triton", None, "cpu", "not possible on cpu"), ("fa3", "decode", "cuda", "package"), ("aiter", None, "cuda", "not possible on cuda"),
    ("flex_attention", None, "cuda", "no adapter here yet"), ("cutlass_mla", "prefill", "cuda", "has no prefill"),
    ("torch_native", None, "npu", "ascend")])
def test_errors_say_what_is_missing(name: str, phase: str | None, device: str, reason: str) -> None:
    assert reason in (why_not(name, phase, DEVICES[device]) or "")
