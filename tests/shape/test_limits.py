"""Limits on size and form that keep the source readable, and forms that are not allowed at all."""

import ast
import subprocess
from collections.abc import Callable, Iterator
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
Rule = Callable[[Path], Iterator[str]]
FOLDERS = ("runtime", "tests", "bench", "pocket")


def functions(path: Path) -> Iterator[Function]:
    return (node for node in source.nodes(path) if isinstance(node, Function))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in source.nodes(path) if isinstance(node, ast.ClassDef))


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.body[0].lineno + 1


def files_are_short(path: Path) -> Iterator[str]:
    text = source.text(path).splitlines()
    if len(text) > MAX_FILE_LINES:
        yield f"{len(text)} lines: two concerns; split it"
    wide = [number for number, line in enumerate(text, 1) if len(line) > MAX_LINE_CHARS]
    if wide:
        yield f"lines {wide} are longer than {MAX_LINE_CHARS}"


def functions_are_short(path: Path) -> Iterator[str]:
    for function in functions(path):
        if lines(function) > MAX_FUNCTION_LINES:
            yield f"{function.name} has {lines(function)} lines; at most {MAX_FUNCTION_LINES}"


def classes_are_narrow(path: Path) -> Iterator[str]:
    for node in classes(path):
        methods = [child.name for child in node.body if isinstance(child, Function)]
        if len(methods) > MAX_METHODS and node.name not in WIDE:
            yield f"{node.name} has {len(methods)} methods; at most {MAX_METHODS}"
        if len(node.bases) > 1 and not ast.unparse(node.bases[-1]).startswith(
            ("Enum", "Generic", "Protocol")
        ):
            yield f"{node.name} has several bases"


def everything_is_annotated(path: Path) -> Iterator[str]:
    for function in functions(path):
        if function.returns is None:
            yield f"{function.lineno}: {function.name} has no return type"
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        if bare:
            yield f"{function.lineno}: {function.name} leaves {bare} without a type"


def public_functions(node: ast.AST) -> Iterator[Function]:
    """Public functions of a module or class, and the public methods of its public classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function) and not child.name.startswith("_"):
            yield child
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child)


def public_names_are_documented(path: Path) -> Iterator[str]:
    if not ast.get_docstring(source.tree(path)) and source.tree(path).body:
        yield "no docstring"
    for node in classes(path):
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{node.lineno}: {node.name} has no docstring"
    for function in public_functions(source.tree(path)):
        if not ast.get_docstring(function):
            yield f"{function.lineno}: {function.name} has no docstring"


def is_restricted(node: ast.Call) -> bool:
    """Whether a call unpickles tensors alone: torch's restricted unpickler runs no code."""
    return any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)


def no_forbidden_forms(path: Path) -> Iterator[str]:
    for node in source.nodes(path):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Global):
            yield f"{line}: no global state"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED_CALLS and not is_restricted(node):
            yield f"{line}: {ast.unparse(node.func)} is not allowed"
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(child, ast.Pass | ast.Continue) for child in node.body)
            if broad and silent:
                yield f"{line}: an error is swallowed"
    for target in source.imports(path, lazy=True):
        if target.split(".")[0] in BANNED_MODULES:
            yield f"imports {target}: data from elsewhere must not run code"


def names_say_what_a_thing_is(path: Path) -> Iterator[str]:
    if path.name in BANNED_FILES:
        yield "name it after what it is about"
    for node in classes(path):
        if any(word in node.name.lower() for word in BANNED_NAMES):
            yield f"{node.name} is named after its role in a pattern, not after what it is"


EVERYWHERE: tuple[Rule, ...] = (files_are_short, functions_are_short)
IN_THE_PACKAGE: tuple[Rule, ...] = (
    classes_are_narrow,
    everything_is_annotated,
    public_names_are_documented,
    no_forbidden_forms,
    names_say_what_a_thing_is,
)


@pytest.mark.parametrize(
    ("rule", "folders"),
    [*((rule, FOLDERS) for rule in EVERYWHERE), *((rule, ("runtime",)) for rule in IN_THE_PACKAGE)],
)
def test_rule(rule: Rule, folders: tuple[str, ...]) -> None:
    paths = [path for folder in folders for path in source.files(folder)]
    broken = [f"{path}: {what}" for path in paths for what in rule(path)]
    assert not broken, "\n".join(broken)


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
    ("code", "rule"),
    [
        ("def f(): return 1\n", everything_is_annotated),
        ("def f() -> None:\n    global x\n", no_forbidden_forms),
        ("import pickle\n", no_forbidden_forms),
        ("import torch\nw = torch.load('x')\n", no_forbidden_forms),
        ("import torch\nw = torch.load('x', weights_only=False)\n", no_forbidden_forms),
        ("try:\n    f()\nexcept Exception:\n    pass\n", no_forbidden_forms),
        ("class PageManager:\n    'x'\n", names_say_what_a_thing_is),
        ("class A(B, C):\n    'x'\n", classes_are_narrow),
        ("class A:\n    pass\n", public_names_are_documented),
        ("'x'\ndef f() -> None:\n    pass\n", public_names_are_documented),
        ("x = 1\n" * (MAX_FILE_LINES + 1), files_are_short),
        ("def f() -> None:\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1), functions_are_short),
    ],
)
def test_each_rule_can_fail(code: str, rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = Path(f"case_{abs(hash((code, tmp_path)))}.py")  # trees are cached by name
    (tmp_path / name).write_text(code)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert list(rule(name))
