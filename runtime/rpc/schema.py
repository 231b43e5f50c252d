"""Reads runtime.proto, as much of the language as it uses, so that nothing generated lies about: message
types are made at start."""

import re
from functools import cache
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

SOURCE = Path(__file__).with_name("runtime.proto")
PACKAGE = "runtime.v1"
SERVICE = f"{PACKAGE}.Runtime"
SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "float": FieldDescriptorProto.TYPE_FLOAT,
}
LABELS = {"repeated": FieldDescriptorProto.LABEL_REPEATED}
_MESSAGE = re.compile(r"message (\w+) {(.*?)}", re.DOTALL)
_FIELD = re.compile(r"(?:(optional|repeated) )?(?:map<(\w+), (\w+)>|(\w+)) (\w+) = (\d+);")
_METHOD = re.compile(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);")

Method = tuple[str, str, bool, str]  # name, what it takes, whether it gives several, what it gives


def read(source: str) -> tuple[FileDescriptorProto, list[Method]]:
    """Raises ValueError for what is not understood."""
    text = re.sub(r"//.*", "", source)
    file = FileDescriptorProto(name="runtime.proto", package=PACKAGE, syntax="proto3")
    for name, body in _MESSAGE.findall(text):
        message = file.message_type.add(name=name)
        for field in _FIELD.finditer(body):
            _add(message, *field.groups())
        if rest := _FIELD.sub("", body).strip():
            raise ValueError(f"message {name}: {rest}")
    methods = [(name, takes, bool(several), gives) for name, takes, several, gives in _METHOD.findall(text)]
    service = file.service.add(name="Runtime")
    for name, takes, several, gives in methods:
        service.method.add(
            name=name, input_type=_full(takes), output_type=_full(gives), server_streaming=several or None
        )
    return file, methods


def _add(
    message: DescriptorProto,
    label: str | None,
    key: str | None,
    value: str | None,
    kind: str | None,
    name: str,
    number: str,
) -> None:
    field = message.field.add(
        name=name,
        number=int(number),
        json_name=_camel(name),
        label=LABELS.get(
            label or "", FieldDescriptorProto.LABEL_REPEATED if key else FieldDescriptorProto.LABEL_OPTIONAL
        ),
    )
    if key and value:  # a map is a list of pairs
        pair = message.nested_type.add(name=f"{_camel(name)[0].upper()}{_camel(name)[1:]}Entry")
        pair.options.map_entry = True
        _add(pair, None, None, None, key, "key", "1")
        _add(pair, None, None, None, value, "value", "2")
        kind = f"{message.name}.{pair.name}"
    assert kind is not None
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, _full(kind)
    if label == "optional":  # a oneof with a single field records presence
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _full(name: str) -> str:
    return f".{PACKAGE}.{name}"


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


@cache
def load() -> tuple[dict[str, type[Message]], list[Method]]:
    """The message types by name, and the methods of the service."""
    file, methods = read(SOURCE.read_text(encoding="utf-8"))
    pool = DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}, methods
