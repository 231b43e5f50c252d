"""Who may import whom: arrows point down only, and torch stays on the rank side."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shape import source

# The layers, lowest first. A module may import modules of lower layers, and of its own package. Prefixes; the longest one counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "runtime",
        "runtime.captured",
        "runtime.children",
        "runtime.compiled",
        "runtime.constraint",
        "runtime.errors",
        "runtime.expert_load",
        "runtime.moves",
        "runtime.pooling",
        "runtime.prompts",
    ),
    (
        "runtime.adapters",
        "runtime.occupation",
        "runtime.parsing",
        "runtime.sampling",
    ),
    ("runtime.request",),
    ("runtime.messages",),
    (
        "runtime.cache",
        "runtime.channels",
        "runtime.log",
        "runtime.models.checksums",
        "runtime.models.latent",
        "runtime.models.registry",
        "runtime.models.schemes",
        "runtime.models.sparse",
        "runtime.models.tasks",
        "runtime.service",
        "runtime.text",
        "runtime.wire",
    ),
    (
        "runtime.models.encoder_config",
        "runtime.models.quantization",
    ),
    (
        "runtime.models.config",
        "runtime.scheduling",
        "runtime.storage",
    ),
    ("runtime.models.adaptable",),
    (
        "runtime.options",
        "runtime.pocket",
    ),
    (
        "runtime.devices.alone",
        "runtime.devices.exchange",
        "runtime.devices.figures",
        "runtime.devices.host",
        "runtime.devices.meeting",
        "runtime.devices.operands",
        "runtime.devices.ring",
        "runtime.devices.scores",
        "runtime.devices.tiers",
        "runtime.loras",
        "runtime.metrics",
        "runtime.outputs",
        "runtime.records",
        "runtime.sessions",
    ),
    (
        "runtime.devices.base",
        "runtime.grammar",
    ),
    ("runtime.layers",),
    ("runtime.models",),
    ("runtime.devices.transfers",),
    (
        "runtime.devices.compiling",
        "runtime.devices.counting",
        "runtime.devices.decoding",
        "runtime.devices.dispatch",
    ),
    ("runtime.devices.pieces",),
    ("runtime.devices.loaded",),
    (
        "runtime.devices.hosted",
        "runtime.devices.rehearsal",
    ),
    ("runtime.devices.residence",),
    ("runtime.devices.runner",),
    (
        "runtime.devices.ascend",
        "runtime.devices.cpu",
        "runtime.devices.cuda",
        "runtime.devices.null",
    ),
    (
        "runtime.devices.measure",
        "runtime.devices.worker",
    ),
    (
        "runtime.actors",
        "runtime.http",
    ),
    (
        "runtime.blocking",
        "runtime.heartbeat",
        "runtime.keeping",
        "runtime.rpc",
        "runtime.settings",
        "runtime.supervisor",
        "runtime.vectors",
        "runtime.warmup",
    ),
    ("runtime.balance",),
    (
        "runtime.control",
        "runtime.controlled",
        "runtime.holdings",
    ),
    ("runtime.core",),
    (
        "runtime.engine",
        "runtime.server",
    ),
    ("runtime.cli",),
    ("runtime.__main__",),
)
SIBLINGS = ("runtime.actors", "runtime.devices")  # their members never import each other
SHARED = {
    "runtime.actors": (
        "runtime.actors.answers",
        "runtime.actors.counts",
    ),
    "runtime.devices": (
        "runtime.devices.alone",
        "runtime.devices.base",
        "runtime.devices.compiling",
        "runtime.devices.counting",
        "runtime.devices.decoding",
        "runtime.devices.dispatch",
        "runtime.devices.exchange",
        "runtime.devices.figures",
        "runtime.devices.host",
        "runtime.devices.hosted",
        "runtime.devices.loaded",
        "runtime.devices.meeting",
        "runtime.devices.operands",
        "runtime.devices.pieces",
        "runtime.devices.rehearsal",
        "runtime.devices.residence",
        "runtime.devices.ring",
        "runtime.devices.runner",
        "runtime.devices.scores",
        "runtime.devices.tiers",
        "runtime.devices.transfers",
    ),
}
RANK_SIDE = (
    "runtime.devices.ascend",
    "runtime.devices.compiling",
    "runtime.devices.counting",
    "runtime.devices.cpu",
    "runtime.devices.cuda",
    "runtime.devices.decoding",
    "runtime.devices.dispatch",
    "runtime.devices.hosted",
    "runtime.devices.loaded",
    "runtime.devices.measure",
    "runtime.devices.pieces",
    "runtime.devices.rehearsal",
    "runtime.devices.residence",
    "runtime.devices.runner",
    "runtime.devices.transfers",
    "runtime.devices.worker",
    "runtime.grammar.llguidance",
    "runtime.grammar.outlines",
    "runtime.grammar.xgrammar",
    "runtime.layers",
    "runtime.models",
)
TORCH_FREE = (
    "runtime.devices.worker",
    "runtime.models.adaptable",
    "runtime.models.checksums",
    "runtime.models.config",
    "runtime.models.encoder_config",
    "runtime.models.latent",
    "runtime.models.quantization",
    "runtime.models.registry",
    "runtime.models.schemes",
    "runtime.models.sparse",
    "runtime.models.tasks",
)
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
