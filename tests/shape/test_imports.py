"""Who may import whom: arrows point down only, and torch stays on the rank side."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shape import source

# The layers, lowest first. A module may import modules of lower layers, and of its own package. Prefixes; the longest one counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("runtime", "runtime.captured", "runtime.compiled", "runtime.errors", "runtime.expert_load", "runtime.constraint", "runtime.children",
     "runtime.moves",
     "runtime.pooling", "runtime.prompts"),
    ("runtime.sampling", "runtime.parsing", "runtime.adapters", "runtime.occupation"),
    ("runtime.request",),
    ("runtime.messages",),
    ("runtime.wire", "runtime.service", "runtime.text", "runtime.cache", "runtime.log", "runtime.channels",
     "runtime.models.checksums",
     "runtime.models.latent", "runtime.models.registry", "runtime.models.schemes", "runtime.models.sparse", "runtime.models.tasks"),
    ("runtime.models.encoder_config", "runtime.models.quantization"),
    ("runtime.models.config", "runtime.scheduling", "runtime.storage"),
    ("runtime.models.adaptable",),
    ("runtime.options", "runtime.pocket"),
    ("runtime.devices.operands",
     "runtime.metrics", "runtime.devices.ring", "runtime.devices.host", "runtime.devices.alone", "runtime.devices.exchange",
     "runtime.devices.figures", "runtime.devices.meeting", "runtime.devices.scores", "runtime.devices.tiers", "runtime.outputs",
     "runtime.records", "runtime.sessions", "runtime.loras"),
    ("runtime.devices.base", "runtime.grammar"),
    ("runtime.layers",),
    ("runtime.models",),
    ("runtime.devices.transfers",),
    ("runtime.devices.counting", "runtime.devices.decoding", "runtime.devices.dispatch",
     "runtime.devices.compiling"),
    ("runtime.devices.pieces",),
    ("runtime.devices.loaded",),
    ("runtime.devices.rehearsal", "runtime.devices.hosted"),
    ("runtime.devices.residence",),
    ("runtime.devices.runner",),
    ("runtime.devices.cpu", "runtime.devices.null", "runtime.devices.cuda", "runtime.devices.ascend"),
    ("runtime.devices.worker", "runtime.devices.measure"),
    ("runtime.actors", "runtime.http"),
    ("runtime.supervisor", "runtime.heartbeat", "runtime.keeping", "runtime.rpc", "runtime.warmup",
     "runtime.settings", "runtime.vectors", "runtime.blocking"),
    ("runtime.balance",),
    ("runtime.control", "runtime.controlled", "runtime.holdings"),
    ("runtime.core",),
    ("runtime.engine", "runtime.server"),
    ("runtime.cli",),
    ("runtime.__main__",),
)
SIBLINGS = ("runtime.actors", "runtime.devices")  # their members never import each other
SHARED = {"runtime.actors": ("runtime.actors.answers", "runtime.actors.counts"), "runtime.devices": (
    "runtime.devices.operands", "runtime.devices.compiling",
    "runtime.devices.alone", "runtime.devices.base", "runtime.devices.figures", "runtime.devices.host", "runtime.devices.ring",
    "runtime.devices.runner", "runtime.devices.loaded", "runtime.devices.rehearsal", "runtime.devices.decoding",
    "runtime.devices.dispatch", "runtime.devices.exchange", "runtime.devices.meeting", "runtime.devices.scores", "runtime.devices.tiers",
    "runtime.devices.transfers", "runtime.devices.counting", "runtime.devices.pieces", "runtime.devices.hosted",
    "runtime.devices.residence")}
RANK_SIDE = ("runtime.devices.counting", "runtime.devices.pieces", "runtime.devices.hosted", "runtime.devices.residence",
             "runtime.devices.runner", "runtime.devices.loaded", "runtime.devices.rehearsal", "runtime.devices.decoding",
             "runtime.devices.transfers", "runtime.devices.dispatch",
             "runtime.devices.worker", "runtime.devices.measure", "runtime.devices.cpu", "runtime.devices.cuda", "runtime.devices.ascend",
             "runtime.devices.compiling",
             "runtime.layers", "runtime.models", "runtime.grammar.xgrammar", "runtime.grammar.llguidance", "runtime.grammar.outlines")
TORCH_FREE = ("runtime.models.checksums",
              "runtime.models.config", "runtime.models.latent", "runtime.models.sparse", "runtime.models.registry",
              "runtime.models.tasks", "runtime.models.encoder_config", "runtime.models.schemes", "runtime.models.quantization",
              "runtime.models.adaptable",
              "runtime.devices.worker")
TORCH = {"torch", "torch_npu", "transformers"}

PATHS = pytest.mark.parametrize("path", source.files(), ids=str)


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def layer(module: str) -> int:
    matches = [(len(prefix), level) for level, prefixes in enumerate(LAYERS) for prefix in prefixes
               if module == prefix or (prefix != "runtime" and module.startswith(prefix + "."))]
    assert matches, f"{module} has no layer; give it one in LAYERS"
    return max(matches)[1]


def prefix_of(module: str) -> str:
    return max((prefix for prefixes in LAYERS for prefix in prefixes if within(module, (prefix,))), key=len)


@PATHS
def test_arrows_point_down(path: Path) -> None:
    module = source.module_name(path)
    for target in source.imports(path, lazy=True):
        if within(target, ("runtime",)) and prefix_of(target) != prefix_of(module):
            assert layer(target) < layer(module), f"{module} imports {target}, which stands above or beside it"


@PATHS
def test_siblings_do_not_know_each_other(path: Path) -> None:
    module = source.module_name(path)
    for family in SIBLINGS:
        if not module.startswith(family + ".") or module == "runtime.devices.worker":
            continue
        own = ".".join(module.split(".")[:3])
        strangers = [target for target in source.imports(path, lazy=True)
                     if target.startswith(family + ".") and not within(target, (own, *SHARED[family]))]
        assert not strangers, f"{module} imports {strangers}: members of {family} are linked by messages only"


@PATHS
def test_torch_stays_on_the_rank_side(path: Path) -> None:
    module = source.module_name(path)
    if within(module, RANK_SIDE) and not within(module, TORCH_FREE):
        return
    roots = {target.split(".")[0] for target in source.imports(path, lazy=True)}
    assert not roots & TORCH, f"{module} belongs to the event-loop process, which never imports {roots & TORCH}"


def test_event_loop_modules_load_no_torch() -> None:
    """Follows what is imported in fact, third parties included."""
    modules = [source.module_name(path) for path in source.files()]
    chosen = [m for m in modules if (not within(m, RANK_SIDE) or within(m, TORCH_FREE)) and m != "runtime.__main__"]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n" \
           "print(sorted({'torch', 'torch_npu', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *chosen], cwd=source.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_reader_of_imports_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail."""
    (tmp_path / "x.py").write_text("import a.b\ndef f():\n    from torch import nn\n")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert source.imports(Path("x.py"), lazy=True) == {"a.b", "torch"}
    assert source.imports(Path("x.py"), lazy=False) == {"a.b"}
    assert isinstance(source.tree(Path("x.py")), ast.Module)
