"""Limits on size and form that keep the source readable, and forms that are not allowed at all."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shape import source

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_METHODS = 16
# classes that are wider because they are one thing
WIDE = {
    "Ranks": "one generation of processes, from start to end: its callbacks read the same few fields",
    "NullExecutor": "the Executor protocol has eleven methods",
    "Answer": "one state machine of an HTTP answer: whole, streamed or over a WebSocket",
}
MAX_LINE_CHARS = 110
MAX_FILE_BYTES = 1_000_000
LARGE_FILES = {"runtime/pocket/model.safetensors"}
BANNED_NAMES = ("manager", "handler", "helper", "mixin")
BANNED_FILES = ("utils.py", "common.py", "helpers.py", "misc.py")
BANNED_CALLS = {
    "torch.load",
    "asyncio.create_task",
    "asyncio.ensure_future",
    "eval",
    "exec",
    "loop.create_task",
}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
PATHS = pytest.mark.parametrize("path", source.files(), ids=str)
FOLDERS = ("runtime", "tests", "bench", "pocket")
EVERYWHERE = pytest.mark.parametrize(
    "path", [path for folder in FOLDERS for path in source.files(folder)], ids=str
)


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(source.tree(path)) if isinstance(node, Function))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(source.tree(path)) if isinstance(node, ast.ClassDef))


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.body[0].lineno + 1


@EVERYWHERE
def test_files_are_short(path: Path) -> None:
    text = (source.ROOT / path).read_text(encoding="utf-8").splitlines()
    assert len(text) <= MAX_FILE_LINES, f"{path} has {len(text)} lines: two concerns; split it"
    wide = [number for number, line in enumerate(text, 1) if len(line) > MAX_LINE_CHARS]
    assert not wide, f"{path}: lines {wide} are longer than {MAX_LINE_CHARS}"


@EVERYWHERE
def test_functions_are_short(path: Path) -> None:
    long = {f.name: lines(f) for f in functions(path) if lines(f) > MAX_FUNCTION_LINES}
    assert not long, f"{path}: {long} lines; at most {MAX_FUNCTION_LINES}"


@PATHS
def test_classes_are_narrow(path: Path) -> None:
    for node in classes(path):
        methods = [child.name for child in node.body if isinstance(child, Function)]
        assert len(methods) <= MAX_METHODS or node.name in WIDE, (
            f"{path}: {node.name} has {len(methods)} methods; at most {MAX_METHODS}"
        )
        assert len(node.bases) <= 1 or ast.unparse(node.bases[-1]).startswith(
            ("Enum", "Generic", "Protocol")
        ), f"{path}: {node.name} has several bases"


@PATHS
def test_everything_is_annotated(path: Path) -> None:
    for function in functions(path):
        assert function.returns is not None, f"{path}:{function.lineno}: {function.name} has no return type"
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not bare, f"{path}:{function.lineno}: {function.name} leaves {bare} without a type"


def public_functions(node: ast.AST) -> Iterator[Function]:
    """Public functions of a module or class, and the public methods of its public classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function) and not child.name.startswith("_"):
            yield child
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child)


@PATHS
def test_public_names_are_documented(path: Path) -> None:
    assert ast.get_docstring(source.tree(path)) or not source.tree(path).body, f"{path} has no docstring"
    for node in classes(path):
        assert node.name.startswith("_") or ast.get_docstring(node), (
            f"{path}:{node.lineno}: {node.name} has no docstring"
        )
    for function in public_functions(source.tree(path)):
        assert ast.get_docstring(function), f"{path}:{function.lineno}: {function.name} has no docstring"


@PATHS
def test_forms_that_are_not_allowed(path: Path) -> None:
    for node in ast.walk(source.tree(path)):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global), f"{where}: no global state"
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS, (
                f"{where}: {ast.unparse(node.func)} is not allowed"
            )
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(child, ast.Pass | ast.Continue) for child in node.body)
            assert not (broad and silent), f"{where}: an error is swallowed"
    banned = {target for target in source.imports(path, lazy=True) if target.split(".")[0] in BANNED_MODULES}
    assert not banned, f"{path} imports {banned}: data from elsewhere must not run code"


@PATHS
def test_names_say_what_a_thing_is(path: Path) -> None:
    assert path.name not in BANNED_FILES, f"{path}: name it after what it is about"
    for node in classes(path):
        found = [word for word in BANNED_NAMES if word in node.name.lower()]
        assert not found, f"{path}: {node.name} is named after its role in a pattern, not after what it is"


def test_no_large_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=source.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    sizes = {name: (source.ROOT / name).stat().st_size for name in listed if (source.ROOT / name).is_file()}
    assert not {
        name: size for name, size in sizes.items() if size > MAX_FILE_BYTES and name not in LARGE_FILES
    }


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("def f(): return 1\n", test_everything_is_annotated),
        ("def f() -> None:\n    global x\n", test_forms_that_are_not_allowed),
        ("import pickle\n", test_forms_that_are_not_allowed),
        ("import torch\nw = torch.load('x')\n", test_forms_that_are_not_allowed),
        ("try:\n    f()\nexcept Exception:\n    pass\n", test_forms_that_are_not_allowed),
        ("class PageManager:\n    'x'\n", test_names_say_what_a_thing_is),
        ("class A(B, C):\n    'x'\n", test_classes_are_narrow),
        ("class A:\n    pass\n", test_public_names_are_documented),
        ("'x'\ndef f() -> None:\n    pass\n", test_public_names_are_documented),
        ("x = 1\n" * (MAX_FILE_LINES + 1), test_files_are_short),
        ("def f() -> None:\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1), test_functions_are_short),
    ],
)
def test_each_limit_can_fail(
    code: str, check: pytest.Function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = Path(f"case_{abs(hash((code, tmp_path)))}.py")  # trees are cached by name
    (tmp_path / name).write_text(code)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        check(name)
