"""What the source of the installed transformers says of its models: which classes there are, and the defaults
of fields that config.json may leave out. Torch-free: transformers itself is not imported."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonValue

TABLES = ("models/auto/modeling_auto.py", "models/auto/auto_mappings.py")


def package() -> Path:
    """The folder of the installed transformers. Raises ModelError where it is not installed."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModelError("transformers is not installed; install it, or leave --model-impl out")
    return Path(spec.origin).parent


@cache
def _text(path: Path) -> str:
    """A file's text; empty: there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def named_in(tables: str) -> frozenset[str]:
    """The classes in tables of models, whose names match a pattern. Raises ModelError as `package`."""
    source = _text(package() / TABLES[0])
    found = re.findall(rf"^{tables}\b.*?^\)", source, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'\(\s*"[^"]+",\s*"(\w+)"', "".join(found)))


def source_of(model_type: str, kind: str) -> str:
    """The source of a model type's configuration, processing or modeling (`kind`); empty: there is none.
    Raises ModelError as `package`."""
    root = package()
    modules = re.search(r"^SPECIAL_MODEL_TYPE.*?^\)", _text(root / TABLES[1]), re.MULTILINE | re.DOTALL)
    special = dict(re.findall(r'\("([^"]+)", "(\w+)"\)', modules[0] if modules else ""))
    name = special.get(model_type, model_type).replace("-", "_")
    return _text(root / "models" / name / f"{kind}_{name}.py")


def config_defaults(model_type: str) -> Fields:
    """Fields of the configuration of a model type and their defaults, of those that are plain values. Raises
    ModelError as `package`."""
    found = config_class(model_type)
    return {} if found is None else _fields(found)


def part_defaults(model_type: str, part: str) -> tuple[str, Fields]:
    """The model type of a part of a larger model (`part`: text_config), and its fields' defaults, where its
    config.json has none; "": it names none. Raises ModelError as `package`."""
    found = config_class(model_type)
    pairs = [
        pair
        for node in (ast.walk(found) if found is not None else ())
        if isinstance(node, ast.Dict)
        for pair in zip(node.keys, node.values, strict=True)
    ]
    value = next((value for key, value in pairs if key is not None and _literal(key) == part), None)
    if value is None:
        return "", {}
    given = {one.arg: _literal(one.value) for one in value.keywords} if isinstance(value, ast.Call) else {}
    kind, own = given.get("model_type"), given.get("init_kwargs")
    if kind is None:
        kind = _type_named(given_class(value), model_type)
    kind = kind if isinstance(kind, str) else ""
    return kind, config_defaults(kind) | (own if isinstance(own, dict) else {})


def given_class(value: ast.expr) -> str:
    """The class that a part's default is of: itself, or what a call names."""
    if not isinstance(value, ast.Call):
        return ast.unparse(value)
    return next((ast.unparse(one.value) for one in value.keywords if one.arg == "config_class"), "")


def _type_named(class_name: str, model_type: str) -> str:
    """The model type of a configuration class in the same file; "": it is in another one."""
    for node in _classes(model_type):
        if node.name == class_name:
            kind = _assigned(node, "model_type")
            return kind if isinstance(kind, str) else ""
    return ""


def config_class(model_type: str) -> ast.ClassDef | None:
    """The configuration class of a model type; None: transformers has none."""
    return next((node for node in _classes(model_type) if _assigned(node, "model_type") == model_type), None)


@cache
def _classes(model_type: str) -> tuple[ast.ClassDef, ...]:
    body = ast.parse(source_of(model_type, "configuration")).body
    return tuple(node for node in body if isinstance(node, ast.ClassDef))


def _assigned(node: ast.ClassDef, name: str) -> JsonValue:
    """What a class assigns to a name in its body."""
    for line in node.body:
        if isinstance(line, ast.Assign) and [ast.unparse(one) for one in line.targets] == [name]:
            return _literal(line.value)
    return None


def _fields(node: ast.ClassDef) -> Fields:
    found: Fields = {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
            value = _literal(line.value)
            if value is not None:
                found[line.target.id] = value
    return found


def _literal(node: ast.expr) -> JsonValue:
    """The value of a literal; None: it is none."""
    try:
        value: JsonValue = ast.literal_eval(node)
    except ValueError:
        return None
    return list(value) if isinstance(value, tuple) else value
