"""Adapter folders that are broken in one way each, made from a good one."""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def write(folder: Path, modules: Mapping[str, tuple[int, int]], rank: int = 4, **config: Any) -> Path:
    """An adapter of zeros for `modules`, as (inputs, outputs); `config` overrides adapter_config.json."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8, **config})
    )
    header, end = Header(), 0
    for module, (inputs, outputs) in modules.items():
        for name, shape in (("A", [rank, inputs]), ("B", [outputs, rank])):
            begin, end = end, end + 4 * shape[0] * shape[1]
            key = f"base_model.model.model.{module}.lora_{name}.weight"
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    write_weights(folder, header, bytes(end))
    return folder


def write_weights(folder: Path, header: Header, data: bytes) -> None:
    """adapter_model.safetensors of this header and data."""
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def _config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def _field(name: str, value: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return change


def _tensors(change: Callable[[Header], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        data = (folder / "adapter_model.safetensors").read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        write_weights(folder, header, data[8 + length :])

    return rewrite


def _every(field: str, value: Any) -> Callable[[Path], None]:
    def change(header: Header) -> None:
        for entry in header.values():
            entry[field] = value

    return _tensors(change)


def _fifo(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _link(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


def _weights(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_model.safetensors").write_bytes(data)


def _cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 5)


# what is done to a good folder, by what is wrong with it afterwards
BROKEN: dict[str, Callable[[Path], object]] = {
    "config not JSON": _config("{"),
    "config not an object": _config("[]"),
    "config not UTF-8": _config('{"peft_type": "\udcff"}'),
    "config nested deeply": _config("[" * 100_000),
    "config with a number of 5,000 digits": _config('{"r": ' + "9" * 5000 + "}"),
    "r is 0": _field("r", 0),
    "r is negative": _field("r", -4),
    "r is text": _field("r", "4"),
    "r is huge": _field("r", 2**40),
    "alpha is huge": _field("lora_alpha", 1e300),
    "alpha is null": _field("lora_alpha", None),
    "rank of a module is 0": _field("rank_pattern", {"q_proj": 0}),
    "a pattern that never ends": _field("rank_pattern", {"(a|[a-z0-9._]+)+!": 4}),
    "a pattern of many repetitions": _field("rank_pattern", {".*" * 20 + "!": 4}),
    "a pattern that is none": _field("alpha_pattern", {"(": 4}),
    "a pattern nested deeply": _field("rank_pattern", {"(" * 5000 + ")" * 5000: 4}),
    "config is a FIFO": _fifo("adapter_config.json"),
    "config without an end": _link("adapter_config.json", "/dev/zero"),
    "weights are a FIFO": _fifo("adapter_model.safetensors"),
    "weights without an end": _link("adapter_model.safetensors", "/dev/zero"),
    "weights empty": _weights(b""),
    "weights of a huge header": _weights(b"\xff" * 64),
    "weights of a header cut short": _weights(struct.pack("<Q", 100) + b"{}"),
    "weights not UTF-8": _weights(struct.pack("<Q", 4) + b'{"\xff' + b"}"),
    "weights nested deeply": _weights(struct.pack("<Q", 100_000) + b'{"a":' * 20_000),
    "weights of a list": _weights(struct.pack("<Q", 2) + b"[]"),
    "weights cut short": _cut,
    "shape is a number": _every("shape", 5),
    "shape is negative": _every("shape", [-4, 64]),
    "shape is nothing": _every("shape", None),
    "offsets overlap": _every("data_offsets", [0, 4]),
    "offsets are beyond the file": _every("data_offsets", [0, 2**62]),
    "offsets run backwards": _every("data_offsets", [8, 0]),
    "type is unknown": _every("dtype", "X9"),
    "entries are numbers": _tensors(lambda header: header.update({name: 5 for name in header})),
    "a name with a null character": _tensors(lambda header: header.update({"\0": {}})),
}
