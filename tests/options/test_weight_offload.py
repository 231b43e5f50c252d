"""Weights in host memory: where it is possible, and the spec that ranks get."""

import pytest

from runtime.errors import OptionsError
from runtime.messages.memory import OffloadSpec
from runtime.options.plan import Plan
from tests.options.test_plan import plan


def cuda(words: str) -> Plan:
    return plan(f"--device cuda {words}")


@pytest.mark.parametrize(
    ("words", "spec"),
    [
        ("", None),
        ("--cpu-offload-gb 2", OffloadSpec(2**31, -1, 1, 1)),
        ("--cpu-offload-gb 1 --offload-prefetch-step 3", OffloadSpec(2**30, -1, 1, 3)),
        ("--offload-group-size 4 --offload-num-in-group 2", OffloadSpec(0, 4, 2, 1)),
    ],
)
def test_the_spec_of_the_ranks(words: str, spec: OffloadSpec | None) -> None:
    assert cuda(words).memory.offload == spec


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--device cpu --cpu-offload-gb 2", "as it computes in host memory; leave it out"),
        ("--device null --offload-group-size 2", "as it holds none"),
        ("--device npu --cpu-offload-gb 2", "in tiles that host memory cannot keep"),
        (
            "--device npu --enable-memory-saver --enable-weights-cpu-backup",
            "--enable-weights-cpu-backup: weights of npu",
        ),
        ("--device cuda --offload-group-size 0", "has no room for --offload-num-in-group 1"),
        ("--device cuda --offload-group-size 2 --offload-num-in-group 3", "raise it, or leave both out"),
        ("--device cuda --cpu-offload-gb 2 --enable-torch-compile", "as weights come and go"),
        ("--device cuda --cpu-offload-gb 2 --offload-group-size 3", "exclude one another"),
        ("--device cuda --enable-weights-cpu-backup", "does nothing without --enable-memory-saver"),
        (
            "--device npu --enable-memory-saver --speculative-algorithm NEXTN "
            "--enable-draft-weights-cpu-backup",
            "--enable-draft-weights-cpu-backup: weights of npu",
        ),
        (
            "--device cuda --enable-memory-saver --enable-draft-weights-cpu-backup",
            "does nothing without --speculative-algorithm",
        ),
        (
            "--device cuda --enable-memory-saver --speculative-algorithm NGRAM "
            "--enable-draft-weights-cpu-backup",
            "is of draft models, and NGRAM has none",
        ),
        (
            "--device cuda --offload-prefetch-step 3",
            "does nothing without --cpu-offload-gb or --offload-group-size",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(OptionsError, match=sentence):
        plan(words)


def test_giving_back_is_for_every_device() -> None:
    for device in ("cpu", "cuda", "npu", "null"):
        assert plan(f"--device {device} --enable-memory-saver").weights.enable_memory_saver
