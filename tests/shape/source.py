"""The source files of the package, parsed once, for the tests of its shape."""

import ast
import io
import tokenize
from collections.abc import Iterator
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
def text(path: Path) -> str:
    """The text of a file, which is given relative to the root."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(text(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a file."""
    return tuple(ast.walk(tree(path)))


@cache
def tokens(path: Path) -> tuple[tokenize.TokenInfo, ...]:
    """The tokens of a file, comments included."""
    return tuple(tokenize.generate_tokens(io.StringIO(text(path)).readline))


def prose(path: Path) -> Iterator[tokenize.TokenInfo]:
    """The comments and docstrings of a file."""
    for token in tokens(path):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and token.string.startswith('"""')
        ):
            yield token


def module_name(path: Path) -> str:
    """runtime/cli/__init__.py is runtime.cli."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path, *, lazy: bool) -> frozenset[str]:
    """Modules that a file imports; with `lazy` also those imported within functions. Imports for type
    checking are not imports."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: imports are absolute"
            found |= {_target(node.module, alias.name) for alias in node.names}
        pending += ast.iter_child_nodes(node)
    return frozenset(found)


def _target(module: str, name: str) -> str:
    """`from runtime.options import plan` imports runtime.options.plan; `from runtime.errors import
    StartError` runtime.errors."""
    path = ROOT.joinpath(*module.split("."), name)
    return (
        f"{module}.{name}" if path.with_suffix(".py").exists() or (path / "__init__.py").exists() else module
    )
