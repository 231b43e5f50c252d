"""Who may import whom: arrows point down only, actors do not know each other, torch stays on the rank side.

The rooms are those of docs/structure.svg, which docs/draw_structure.py makes of the same imports.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.shape import source

# The rooms, lowest floor first. A module may import modules of lower floors and of its own room.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "deferred_torch",
        "errors",
        "freed_memory",
        "gil",
        "huge_pages",
        "json_value",
        "log",
        "media_kind",
        "pocket",
        "regular_file",
        "shutdown",
    ),
    ("memory_file", "models/config", "parsing", "storage"),
    ("hub", "messages"),
    ("cache", "devices", "media", "service", "text"),
    ("grammar", "scheduling"),
    ("layers",),
    ("devices/ascend", "devices/cpu", "devices/cuda", "devices/null", "models"),
    ("options", "ranks"),
    (
        "diffusion_settings",
        "encoding_settings",
        "host_settings",
        "metrics",
        "nodes",
        "pdmux_settings",
        "weight_settings",
    ),
    ("transfer",),
    ("media_settings", "preparation", "settings"),
    ("model_card",),
    ("actors",),
    ("http",),
    ("admin", "routing", "rpc"),
    ("start",),
    ("core",),
    ("engine", "node", "server"),
    ("cli", "ray"),
    ("__main__",),
)
# tasks of the event loop that are linked by messages only
ACTORS = ("detokenizer", "events", "router", "scheduler", "storage", "tokenizer")
# what the ranks and other processes load; everything else belongs to the event-loop process
RANK_SIDE = (
    "runtime.ranks",
    "runtime.devices.ascend",
    "runtime.devices.cpu",
    "runtime.devices.cuda",
    "runtime.devices.torch_all_to_all",
    "runtime.devices.torch_collectives",
    "runtime.devices.torch_rearranged",
    "runtime.devices.torch_stages",
    "runtime.grammar.llguidance",
    "runtime.grammar.outlines",
    "runtime.grammar.xgrammar",
    "runtime.hub.convert_tokenizer",  # a process of its own
    "runtime.layers",
    "runtime.models",
    "runtime.text.transformers_process",  # a process of its own
    "runtime.storage.torch_stores",  # processes of their own
)
# of these rooms, what the event-loop process loads as well
TORCH_FREE = (
    *(
        f"runtime.devices.{name}.{file}"
        for name in ("ascend", "cpu", "cuda")
        for file in ("facts", "options")
    ),
    "runtime.models.config",
    "runtime.ranks.benchmark_results",
    "runtime.ranks.open_executor",
    "runtime.ranks.ring",
    "runtime.ranks.worker",
)
TORCH = {"torch", "torch_npu", "transformers"}


def _load_drawing() -> ModuleType:
    spec = spec_from_file_location("draw_structure", source.ROOT / "docs" / "draw_structure.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAWING = _load_drawing()
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or lies in one of these packages."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def own_imports(path: Path, *, lazy: bool = True) -> set[str]:
    """Modules of this package that a file imports."""
    return {target for target in source.imports(path, lazy=lazy) if within(target, ("runtime",))}


def test_every_room_has_a_floor() -> None:
    rooms = {DRAWING.room_of(source.module_name(path)) for path in source.files()}
    assert rooms - {"package"} <= FLOOR_OF.keys(), (
        f"give {rooms - {'package'} - FLOOR_OF.keys()} a floor in FLOORS"
    )


def test_arrows_point_down() -> None:
    upward: list[str] = []
    for path in source.files():
        room = DRAWING.room_of(source.module_name(path))
        for target in own_imports(path) if room != "package" else ():
            other = DRAWING.room_of(target)
            is_another = other not in (room, "package") and "." + other.replace("/", ".") in "." + target
            if is_another and FLOOR_OF[other] >= FLOOR_OF[room]:
                upward.append(f"{path} imports {target}, which does not stand below it")
    assert not upward, "\n".join(upward)


def test_no_circles() -> None:
    """Also within a room: files that import each other cannot be understood one after the other."""
    names = {source.module_name(path): path for path in source.files()}
    TopologicalSorter(
        {name: own_imports(path, lazy=False) & names.keys() - {name} for name, path in names.items()}
    ).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("name", ACTORS)
def test_actors_do_not_know_each_other(name: str) -> None:
    others = tuple(f"runtime.actors.{other}" for other in ACTORS if other != name)
    found = [t for t in own_imports(Path(f"runtime/actors/{name}.py")) if within(t, others)]
    assert not found, f"actors/{name}.py imports {found}: actors are linked by messages only"


def test_the_picture_has_the_arrows_of_this_package() -> None:
    arrows = set(re.findall(r'data-arrow="([^"]+)"', DRAWING.PICTURE.read_text(encoding="utf-8")))
    assert arrows == {f"{a} {b}" for a, b in DRAWING.read()[1]}, (
        "docs/structure.svg is of an older state: python docs/draw_structure.py"
    )


def test_torch_stays_on_the_rank_side() -> None:
    with_torch: list[str] = []
    for path in source.files():
        module = source.module_name(path)
        if not within(module, RANK_SIDE) or within(module, TORCH_FREE):
            roots = {target.split(".")[0] for target in source.imports(path, lazy=True)} & TORCH
            with_torch += [
                f"{module} belongs to the event-loop process, which never imports {r}" for r in roots
            ]
    assert not with_torch, "\n".join(with_torch)


def test_event_loop_modules_load_no_torch() -> None:
    """Follows what is imported in fact, third parties included."""
    modules = [source.module_name(path) for path in source.files()]
    chosen = [
        m for m in modules if (not within(m, RANK_SIDE) or within(m, TORCH_FREE)) and m != "runtime.__main__"
    ]
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(sorted({'torch', 'torch_npu', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *chosen], cwd=source.ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_reader_of_imports_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail."""
    (tmp_path / "x.py").write_text("import a.b\ndef f():\n    from torch import nn\n")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert source.imports(Path("x.py"), lazy=True) == {"a.b", "torch"}
    assert source.imports(Path("x.py"), lazy=False) == {"a.b"}
    assert isinstance(source.tree(Path("x.py")), ast.Module)
