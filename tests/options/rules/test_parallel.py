"""How models are divided, and what ranks compute while they exchange something."""

import pytest
from msgspec import structs

from runtime.errors import OptionsError
from runtime.options.facts import DEVICES
from runtime.options.parse import from_argv
from runtime.options.plan import Plan
from runtime.options.resolve import resolve
from tests.options.test_plan import MACHINE, Model, Recurrent, Sparse


def planned(words: str, model: type[Model]) -> Plan:
    return resolve(from_argv(words.split()), model, DEVICES["cpu"], MACHINE)


@pytest.mark.parametrize(
    "words", ["--tp 3", "--tp 5", "--tp 8 --ep-size 1", "--tp 4 --ep-size 4 --ep-num-redundant-experts 2"]
)
def test_ranks_need_not_divide(words: str) -> None:
    """Neither 8 heads with 4 of keys and values, nor an inner size of 36; 6 experts with copies of two."""
    assert planned(words, Sparse).parallel.tensor_parallel_size > 2


class Shared(Sparse):
    moe = structs.replace(Sparse.moe, shared_size=36)


@pytest.mark.parametrize(
    ("words", "model", "sentence"),
    [
        ("--tp 2 --enable-two-batch-overlap", Model, ""),
        ("--tp 2 --tbo-token-distribution-threshold 0 --enable-two-batch-overlap", Sparse, ""),
        ("--enable-two-batch-overlap", Model, "does nothing with one rank"),
        (
            "--tp 2 --enable-two-batch-overlap --enable-lora --max-lora-rank 8 --lora-target-modules all",
            Model,
            "",
        ),
        ("--tp 2 --pp-size 2 --enable-two-batch-overlap", Model, ""),
        ("--tp 2 --enable-two-batch-overlap", Recurrent, ""),
        ("--tp 2 --attn-cp-size 2 --enable-two-batch-overlap", Model, ""),
        ("--tp 2 --enable-symm-mem --enable-two-batch-overlap --device cuda", Model, "--enable-symm-mem"),
        ("--tp 2 --tbo-token-distribution-threshold 0.3", Model, "--enable-two-batch-overlap"),
        ("--tp 2 --moe-a2a-backend deepep --enable-single-batch-overlap", Shared, ""),
        ("--tp 2 --moe-a2a-backend deepep --enable-single-batch-overlap", Sparse, "this model has none"),
        ("--tp 2 --enable-single-batch-overlap", Shared, "--moe-a2a-backend"),
    ],
)
def test_rules_about_overlap(words: str, model: type[Model], sentence: str) -> None:
    if not sentence:
        assert planned(words, model).parallel.tensor_parallel_size == 2
        return
    with pytest.raises(OptionsError) as caught:
        planned(words, model)
    assert any(sentence in problem for problem in caught.value.problems)
