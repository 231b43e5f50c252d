"""The columns of the matrix of model families: what each runs on a tiny checkpoint, and how it can fail.

A check is given a Made. It returns whether anything was run; it raises Refused for what a start refuses, and
AssertionError, or whatever a rank raises, for what should work and does not.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import StartError
from runtime.models.config.lora_targets import lora_modules, lora_renames
from runtime.models.config.model_config import read_config
from runtime.models.loader import PREFIXES
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.ranks.open_executor import DEVICES
from runtime.server import check as check_start
from tests.devices import taped
from tests.devices.cpu.ranks import RankProcesses
from tests.devices.cpu.tp_rank import PROMPTS as PROMPTS_OF_RANKS
from tests.devices.drive import Planner, Row, page_copies, sampling, start
from tests.models.compare import Expected, expected_of, finish, in_company, random_prompts
from tests.models.layouts import LAYOUTS
from tests.models.make import make_checkpoint
from tests.ranks.lora_slots import decode_with_adapters

NUM_TOKENS = 12
PROMPTS = random_prompts(1, 9, 70, 41)  # one is longer than a chunk of a scan
SHARED = 20  # tokens of a prefix, whole pages
PAGE_SIZE = 4


class Refused(Exception):
    """A start refuses it; the sentence is the exception's text."""


class Made(NamedTuple):
    """A family's checkpoint, and a place for others that are made of it."""

    family: str
    folder: Path
    plain: Path  # in a layout that transformers reads: `folder` itself, mostly
    expected: Expected
    work: Path

    @classmethod
    def of(cls, family: str, work: Path) -> "Made":
        """Makes a row of make.py or of layouts.py in `work`."""
        plain = work / "plain"
        if family in LAYOUTS:
            make_checkpoint(LAYOUTS[family].base, plain, **LAYOUTS[family].sizes)
        else:
            make_checkpoint(family, plain)
        made = cls(family, plain, plain, expected_of(plain, PROMPTS, NUM_TOKENS), work)
        return made._replace(folder=made.in_layout(plain, "model"))

    @property
    def is_hybrid(self) -> bool:
        """Whether it has recurrent layers."""
        return read_config(self.folder).recurrent is not None

    def in_layout(self, plain: Path, name: str) -> Path:
        """The family's own layout of a checkpoint that transformers reads."""
        if self.family not in LAYOUTS:
            return plain
        copytree(plain, self.work / name)
        LAYOUTS[self.family].rewrite(self.work / name)
        return self.work / name

    def open(self, **options: Any) -> Planner:
        """A rank with this model. Raises Refused where it does not start."""
        try:
            executor, ready = start(self.folder, page_size=PAGE_SIZE, num_states=12, **options)
        except StartError as error:
            raise Refused(self.without_paths(error)) from None
        return Planner(executor, ready, PAGE_SIZE)

    def check(self, **options: object) -> None:
        """What a server checks before it acts. Raises Refused."""
        try:
            check_start(plan_for(from_values({"model_path": str(self.folder), "port": 0} | options)))
        except StartError as error:
            raise Refused(self.without_paths(error)) from None

    def without_paths(self, error: StartError) -> str:
        """The text of an error in one line, in the words that are the same for each model."""
        architecture = read_config(self.folder).architecture
        text = str(error).replace(str(self.folder), "the model").replace(architecture, "this architecture")
        return " ".join(text.split())


def alone(made: Made) -> bool:
    """Each prompt by itself, in one step."""
    planner = made.open()
    for slot, (prompt, tokens) in enumerate(zip(PROMPTS, made.expected.tokens, strict=True)):
        assert planner.generate(planner.row(slot, prompt, sampling()), NUM_TOKENS) == tokens, prompt
    return True


def company(made: Made) -> bool:
    """Sequences join while others decode."""
    assert in_company(made.open(), PROMPTS, NUM_TOKENS, chunk=1000) == made.expected.tokens
    return True


def chunks(made: Made) -> bool:
    """The same, with prompts in chunks that end anywhere."""
    assert in_company(made.open(), PROMPTS, NUM_TOKENS, chunk=7) == made.expected.tokens
    return True


def compute_prefix(planner: Planner, row: Row) -> int:
    """Prefills the row of slot 0. -> the state slot that has its state after SHARED tokens; 0: none has."""
    kept = 9 if planner.has_states else 0
    planner.keeps = [(1, kept, -1)] if kept else []
    planner.run([], [(row, SHARED)])
    planner.prefill(row)
    return kept


def prefix(made: Made) -> bool:
    """A sequence continues from pages, and from a kept state, of another one, which goes on."""
    made.check()
    planner = made.open()
    first = planner.row(0, PROMPTS[3], sampling())
    kept = compute_prefix(planner, first)
    other = PROMPTS[3][:SHARED] + [5, 6, 7]
    second = planner.row(1, other, sampling(), prefix=first, shared=SHARED, state_from=kept)
    finish(planner, [second], [first], NUM_TOKENS, chunk=1000)
    assert first.tokens[first.prompt_len :] == made.expected.tokens[3]
    assert second.tokens[second.prompt_len :] == made.expected.reference.greedy(other, NUM_TOKENS)
    return True


def preempted(made: Made) -> bool:
    """A sequence loses its pages, and comes back in a slot that another one had, while a third goes on."""
    planner = made.open()
    first, second = (planner.row(slot, PROMPTS[slot + 2], sampling()) for slot in (0, 1))
    finish(planner, [first, second], [], NUM_TOKENS // 2, chunk=1000)
    again = planner.row(0, second.tokens, sampling())
    missing = NUM_TOKENS - (len(second.tokens) - second.prompt_len)
    third = planner.row(1, PROMPTS[1], sampling())
    planner.prefill(third)
    finish(planner, [again], [third], missing, chunk=7)
    assert again.tokens[second.prompt_len :] == made.expected.tokens[3]
    found = third.tokens[third.prompt_len :]
    assert found == made.expected.reference.greedy(PROMPTS[1], len(found))
    return True


@cache
def rank_processes() -> RankProcesses:
    """Two ranks of this process, which stay for all rows."""
    return RankProcesses()


def close_ranks() -> None:
    """Ends what `rank_processes` has started."""
    rank_processes().close()


def two_ranks(made: Made) -> bool:
    """Greedy tokens of two ranks, which have half of the weights each."""
    made.check(tp_size=2)
    first, second = (models[0] for models in rank_processes().run(2, [made.folder], made.work))
    for prompt, tokens in zip(PROMPTS_OF_RANKS[:2], first["tokens"], strict=False):
        found = tokens[len(prompt) :]
        assert len(found) > 8 and found == made.expected.reference.greedy(prompt, len(found))
    assert second["last"] == first["last"], "the second rank knows the tokens as well"
    return True


def host_tier(made: Made) -> bool:
    """Pages of a prefix go to host memory, and come back as other pages of another sequence."""
    made.check(enable_hierarchical_cache=True, disable_hybrid_swa_memory=True)
    if made.is_hybrid:
        made.check(enable_hierarchical_cache=True, hicache_storage_backend="file")
    fds = [os.memfd_create(name) for name in ("host pages", "host states")]
    try:
        options = {"host_ratio": 1.0, "state_ratio": 0.5, "max_total_tokens": 256}
        planner = made.open(host_fds=fds[:1], state_fds=fds[1:], **options)
        first = planner.row(0, PROMPTS[3], sampling())
        kept = compute_prefix(planner, first)
        hosts = [9, 2, 31, 4, 17]
        planner.page_copies = page_copies(saves=dict(zip(first.pages[:5], hosts, strict=True)))
        planner.run([], [])
        planner.free = first.pages + planner.free  # the next to be written are others
        second = planner.row(1, PROMPTS[3], sampling(), state_from=kept)
        second.pages, second.computed = [planner.free.pop() for _ in hosts], SHARED
        assert not set(second.pages) & set(first.pages)
        planner.page_copies = page_copies(loads=dict(zip(hosts, second.pages, strict=True)))
        assert planner.generate(second, NUM_TOKENS) == made.expected.tokens[3]
        planner.executor.close()
    finally:
        for fd in fds:
            os.close(fd)
    return True


def on_grid(weight: Tensor) -> Tensor:
    """Numbers of [-127, 127] times a power of two, and 128 times it in each row and column: codes of 8 bits
    with a scale a row stand for them exactly, whichever dimension is that of the rows."""
    if weight.ndim < 2:
        return weight
    scale = 2.0 ** torch.ceil(torch.log2(weight.abs().amax() / 127))
    codes = torch.round(weight / scale)
    for dim in (-1, -2):
        codes.scatter_(dim, codes.argmax(dim, keepdim=True), 128)
    return codes * scale


def quantized(made: Made) -> bool:
    """Weights that 8 bits hold exactly, quantized while they are loaded: tokens are transformers' own."""
    made.check(torchao_config="int8wo")
    plain = copytree(made.plain, made.work / "grid")
    tensors = {name: on_grid(tensor) for name, tensor in load_file(plain / "model.safetensors").items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    expected = expected_of(plain, PROMPTS[3:], NUM_TOKENS)
    grid = made._replace(folder=made.in_layout(plain, "grid in layout"))
    whole, planner = grid.open(), grid.open(quantization="torchao:int8wo")
    bytes_of = [one.executor.ready.weights_bytes for one in (whole, planner)]  # type: ignore[attr-defined]
    assert bytes_of[1] < bytes_of[0], "nothing was quantized"
    assert planner.generate(planner.row(0, PROMPTS[3], sampling()), NUM_TOKENS) == expected.tokens[0]
    return True


def graphs(made: Made) -> bool:
    """Decode steps through captured graphs, on the double; of hybrids also steps with prompts, in pieces."""
    made.check(device="cuda", enable_piecewise_cuda_graph=made.is_hybrid)
    sizes = [16, 64] if made.is_hybrid else []
    DEVICES["taped"] = taped.__name__
    try:
        planner = made.open(device="taped", graph_sizes=[2, 4], piecewise_sizes=sizes, max_len=128)
    finally:
        del DEVICES["taped"]
    found = in_company(planner, PROMPTS, NUM_TOKENS, chunk=1000, pause=2)
    assert found == made.expected.tokens
    assert planner.executor.tapes.replays > 10, "no graph was used"  # type: ignore[attr-defined]
    return True


def adapter_targets(made: Made) -> tuple[str, ...]:
    """Last names of the checkpoint's modules that adapters may change, wherever they stand."""
    config = read_config(made.folder)
    modules, renames = lora_modules(config), lora_renames(config)
    found: dict[str, list[bool]] = defaultdict(list)
    for name, tensor in load_file(made.plain / "model.safetensors").items():
        if name.endswith(".weight") and tensor.ndim == 2 and ".experts." not in name:
            path = name.removesuffix("weight")
            for prefix in PREFIXES:
                path = path.removeprefix(prefix)
            for theirs, ours in renames:
                path = path.replace(theirs, ours)
            found[name.split(".")[-2]].append(path.removesuffix(".") in modules)
    return tuple(leaf for leaf, can_change in found.items() if all(can_change))


def adapters(made: Made) -> bool:
    """Sequences with two LoRA adapters and without one, together: the tokens of merged weights."""
    made.check(enable_lora=True, max_lora_rank=6, lora_target_modules=["all"])
    if made.plain != made.folder:
        return False  # transformers has no such model, so nothing to merge into
    targets = adapter_targets(made)
    assert targets, "adapters are taken, and no module of the checkpoint is one that they may change"
    decode_with_adapters(made.folder, made.work / "adapters", 3, targets=targets)
    return True


CHECKS: dict[str, Callable[[Made], bool]] = {
    "alone": alone,
    "company": company,
    "chunks": chunks,
    "prefix": prefix,
    "preempted": preempted,
    "two ranks": two_ranks,
    "host tier": host_tier,
    "8 bits": quantized,
    "graphs": graphs,
    "LoRA": adapters,
}
