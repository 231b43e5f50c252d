"""Kernels compiled for an H200, because the interpreter takes more than the compiler does; and the benches,
dry."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devices.cuda.torch_device import HAS_GPU

# instructions for a tile of 64 keys of a decode step: in bf16, in 8 bits, in bf16 where the last program
# merges, and where parts are listed as well. Conversion on bits and products in bf16 took 1,399 in 8 bits
LOOPS = (325, 544, 323, 323)
# instructions of loops of other forms: a prompt's tile of 64 keys, two of them, one with its masks where
# warps have roles, and 64 latents of 16 heads
FORMS = (353, 595, 438, 497)
# instructions of a block of 128 inputs, 64 weights for each thread: of unsigned codes by 16 rows and by 256,
# and of gpt-oss's experts, gated and not, by 16 slots and by 128
FRAGMENT_LOOPS = (247, 269, 471, 289, 494, 311)
# of loops of latent attention whose warps have roles, for 64 keys and 64 queries: the group that weighs, with
# its masks, and the one that only sums
LATENT_LOOPS = (614, 173)
SLACK = 1.05
GEMV_REGISTERS = 128  # of which a multiprocessor has room for four programs
# kernels between products that start before those ahead have ended
EARLY = ("add_rms_norm_kernel", "prepare_heads_kernel", "paged_attention_kernel")
# of towers' attention: 128 keys of heads of 80 numbers, of 72, of 64 and of 128
TOWER_LOOPS = (522, 509, 462, 517)
REGISTERS = 243  # of a thread, the most of any kernel

ROOT = Path(__file__).parents[3]


def check_early_starts(made: list[dict[str, Any]]) -> None:
    """Kernels that start early wait once, and let the next one start; products of few rows leave room for
    four programs on a multiprocessor."""
    early = [one for one in made if one["early"] != [0, 0]]
    few = *["gemv_kernel"] * 4, "norm_product_kernel", *EARLY
    assert [one["kernel"] for one in early] == [*few, "sum_rms_norm_kernel"]
    assert all(one["early"] == [1, 1] for one in early)
    assert all(one["registers"] <= GEMV_REGISTERS for one in early[:4]), early[:4]


def check_fragments(made: list[dict[str, Any]]) -> None:
    """Weights in fragments are multiplied by groups of warps also with few rows, and cost no more
    instructions than bits, subtraction and scale do."""
    assert len(made) == 6 and all(one["wgmma"] for one in made)
    found = [one["loops"][-1] for one in made]
    assert all(count <= SLACK * most for count, most in zip(found, FRAGMENT_LOOPS, strict=True)), found


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config) -> Path:
    """Kernels that earlier runs have compiled, by their sources and the compiler: `--cache-clear` ends it."""
    return pytestconfig.cache.mkdir("triton")


def compiled(names: list[str], cache: Path) -> list[dict[str, Any]]:
    """What ahead.py says of the kernels of launches that are named."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(cache)
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.cuda.ahead", "90", *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="a GPU compiles them itself")
def test_forms_of_attention_compile(cache: Path) -> None:
    """Forms that read with TMA, and the one whose warps have roles: without spills, by products of groups of
    warps, and with fewer instructions for a tile than the default, which takes 408 for 64 keys of a prompt
    and 547 for 32 latents."""
    made = [one for one in compiled(["forms"], cache) if "attention" in one["kernel"]]
    assert [one["wgmma"] for one in made] == [True, True, True, False]
    assert not [one for one in made if one["stack_bytes"] or one["shared_bytes"] > 227 << 10]
    found = [one["loops"][0] for one in made]
    assert all(0 < count <= SLACK * most for count, most in zip(found, FORMS, strict=True)), found


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="a GPU compiles them itself")
def test_latent_roles_compile(cache: Path) -> None:
    """Decodes of 16 and of 128 heads, and chunks: in the registers that two groups of warps may have without
    spills, and in one multiprocessor's shared memory."""
    made = [one for one in compiled(["latent_roles"], cache) if one["kernel"] == "latent_attention_kernel"]
    assert len(made) == 3 and all(one["wgmma"] for one in made)
    assert not [one for one in made if one["stack_bytes"] or one["shared_bytes"] > 227 << 10]
    assert {one["registers"] for one in made} == {168}  # of 12 warps, which share them as their roles say
    for one in made:
        short, long = one["loops"]
        assert short <= SLACK * LATENT_LOOPS[1] and long <= SLACK * LATENT_LOOPS[0], one["loops"]


@pytest.mark.skipif(HAS_GPU, reason="a GPU compiles them itself")
def test_attention_of_towers_compiles(cache: Path) -> None:
    """Large tiles by groups of warps; none spills, and heads of 72 numbers are read by 16 bytes, as those of
    80 are."""
    made = compiled(["towers"], cache)
    assert len(made) == 7 and not [one for one in made if one["stack_bytes"]], made
    large = [one for one in made if one["constants"]["M"] == "128"]
    assert len(large) == 4 and all(one["wgmma"] for one in large)
    found = [one["loops"][0] for one in large]
    assert all(0 < count <= SLACK * most for count, most in zip(found, TOWER_LOOPS, strict=True)), found
    assert all(one["shared_bytes"] <= 227 << 10 for one in made)


@pytest.mark.skipif(HAS_GPU, reason="a GPU compiles them itself")
def test_kernels_compile_for_a_card(cache: Path) -> None:
    names = ["llama", "narrow", "rows", "logits", "hopper", "adapted", "states", "fused"]
    names += ["few", "packings", "summed"]
    made = compiled(names, cache)
    assert {one["kernel"] for one in made} >= {
        "paged_attention_kernel",
        "merge_splits_kernel",
        "store_kv_kernel",
        "prepare_heads_kernel",
        "rms_norm_kernel",
        "add_rms_norm_kernel",
        "rotary_kernel",
        "act_and_mul_kernel",
        "sample_kernel",
        "mask_kernel",
        "copy_rows_kernel",
        "gemm_kernel",
        "add_splits_kernel",
        "quantize_rows_kernel",
        "quantize_groups_kernel",
        "shrink_kernel",
        "expand_kernel",
        "count_experts_kernel",
        "align_kernel",
        "sum_experts_kernel",
        "topk_kernel",
        "scan_kernel",
        "delta_kernel",
        "act_and_quantize_kernel",
        "begin_decodes_kernel",
        "sampling_inputs_kernel",
        "prepare_latents_kernel",
        "gemv_kernel",
        "list_work_kernel",
        "norm_product_kernel",
        "sum_rms_norm_kernel",
    }
    assert not [one for one in made if one["stack_bytes"] or one["shared_bytes"] > 227 << 10]
    attention = [one for one in made if one["kernel"] == "paged_attention_kernel"]
    assert [one["wgmma"] for one in attention] == [False, True, False, False, False]
    decode, _, narrow, merging, listed = attention
    check_early_starts(made)
    # of a tile of keys without masks: what the cache costs in 8 bits, and that merging costs the loop nothing
    found = [one["loops"][0] for one in (decode, narrow, merging, listed)]
    assert all(0 < count <= SLACK * most for count, most in zip(found, LOOPS, strict=True)), found
    assert {one["kernel"]: one["registers"] for one in made if one["registers"] > REGISTERS} == {}
    large = [one for one in made if one["kernel"] == "gemm_kernel" and int(one["constants"]["M"]) >= 64]
    assert len(large) == 8 and all(one["wgmma"] for one in large)
    check_fragments([one for one in made if one["constants"].get("KIND") in ("fragments4", "mxfp4")])
