"""What options say to ranks on NVIDIA's cards."""

import pytest

from tests.options.test_plan import plan


@pytest.mark.parametrize(
    ("words", "memory"),
    [
        ("", "off"),
        ("--tp 2", "try"),
        ("--tp 2 --enable-torch-symm-mem", "on"),
        ("--tp 2 --no-enable-torch-symm-mem", "off"),
        ("--tp 2 --nnodes 2 --dist-init-addr h:1", "off"),
    ],
)
def test_small_sums_go_through_memory_that_cards_share(words: str, memory: str) -> None:
    assert plan(f"--device cuda {words}").device_options["symm_mem"] == memory
    if "enable" not in words:
        assert plan(words).parallel.enable_torch_symm_mem is False


def test_ranks_get_the_variables_of_their_libraries() -> None:
    assert plan("--device cuda --tp 2").rank_environment == {}
    assert plan("--device cuda --enable-nccl-nvls").rank_environment == {"NCCL_NVLS_ENABLE": "1"}


@pytest.mark.parametrize("words", ["", "--kernel-fusion off", "--kernel-fusion all"])
def test_how_far_kernels_are_joined(words: str) -> None:
    assert plan(f"--device cuda {words}").device_options["kernel_fusion"] == (words.split() or ["safe"])[-1]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("", {}),
        ("--gemv-max-rows 8", {"gemv_rows": 8}),
        ("--enable-pdl", {"starts_early": True}),
        ("--enable-decode-work-list", {"lists_work": True}),
    ],
)
def test_what_no_card_has_run_is_asked_for(words: str, changed: dict[str, int]) -> None:
    options = plan(f"--device cuda {words}").device_options
    none = {"gemv_rows": 1, "starts_early": False, "lists_work": False}
    assert {name: options[name] for name in none} == none | changed
