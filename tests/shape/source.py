"""The source files of the package, parsed once, for the tests of its shape."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "runtime"


@cache
def files(folder: str = "runtime") -> tuple[Path, ...]:
    """Python files of a folder of the repository, relative to its root."""
    return tuple(
        sorted(
            path.relative_to(ROOT)
            for path in (ROOT / folder).rglob("*.py")
            if "__pycache__" not in path.parts
        )
    )


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    """runtime/cli/__init__.py is runtime.cli."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, lazy: bool) -> set[str]:
    """Modules that a file imports; with `lazy` also those imported within functions. Imports for type
    checking are not imports."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: imports are absolute"
            found |= {_target(node.module, alias.name) for alias in node.names}
        pending += ast.iter_child_nodes(node)
    return found


def _target(module: str, name: str) -> str:
    """`from runtime.options import plan` imports runtime.options.plan; `from runtime.errors import
    StartError` runtime.errors."""
    path = ROOT.joinpath(*module.split("."), name)
    return (
        f"{module}.{name}" if path.with_suffix(".py").exists() or (path / "__init__.py").exists() else module
    )
