"""GGUF files that are damaged, foreign or hostile: each is refused with its name and a reason."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from runtime.errors import ModelError
from runtime.models.config.gguf.container import find_gguf, read_gguf, split_paths
from runtime.models.config.gguf.tensors import sources
from runtime.models.config.model_config import read_config
from runtime.models.config.weight_files import check_weight_files


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


KEY = text("general.architecture") + struct.pack("<I", 8) + text("llama")
ROOM = bytes(512)
HOSTILE = {
    "empty": (b"", "damaged or cut short"),
    "something else": (b"PK\x03\x04" + ROOM, "does not begin with GGUF"),
    "version 1": (header(0, 0, 1) + ROOM, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + ROOM, "big-endian"),
    "cut in its counts": (b"GGUF\x03\x00\x00\x00\x01", "ends within its header"),
    "many tensors": (header(1 << 60, 0) + ROOM, "tensors, for which it is too short"),
    "many keys": (header(0, 1 << 62) + ROOM, "keys, for which it is too short"),
    "long name": (header(0, 1) + struct.pack("<Q", 1 << 40) + ROOM, "bytes in a name or text"),
    "long array": (
        header(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 30) + ROOM,
        "items in k, for which it is too short",
    ),
    "text behind the end": (
        header(0, 1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 40) + ROOM,
        "a text of k ends behind its end",
    ),
    "array of arrays": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + ROOM, "k is an array"),
    "unknown kind of key": (
        header(0, 1) + text("k") + struct.pack("<I", 77) + ROOM,
        "k has the unknown type",
    ),
    "no dimensions": (header(1, 0) + tensor("t", ()) + ROOM, "t has 0 dimensions"),
    "unknown type": (header(1, 0) + tensor("t", (32,), 4) + ROOM, "t has the unknown type 4"),
    "huge shape": (header(1, 0) + tensor("t", (1 << 40, 1 << 40)) + ROOM, "t has the shape"),
    "empty tensor": (header(1, 0) + tensor("t", (0,)) + ROOM, "t has the shape"),
    "behind the end": (header(1, 0) + tensor("t", (32,), 0, 1 << 20) + ROOM, "t ends at byte"),
    "unaligned": (header(1, 0) + tensor("t", (32,), 0, 7) + ROOM, "t lies at 7"),
    "half a block": (header(1, 0) + tensor("t", (31,), 2) + ROOM, "rows of 31 numbers"),
    "two of a name": (header(2, 0) + tensor("t", (8,)) * 2 + ROOM, "have the same name"),
    "alignment of 3": (
        header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 3) + ROOM,
        "no power of two",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_none_is_refused_by_name(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[case][0])
    with pytest.raises(ModelError, match=HOSTILE[case][1]) as caught:
        read_gguf(path)
    assert "model.gguf" in str(caught.value) and "download it again" in str(caught.value)


def write(path: Path, arch: str = "llama", **tensors: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for name, numbers in tensors.items():
        writer.add_tensor(name.replace("__", "."), numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", token_embd__weight=np.ones((4, 32), np.float32)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(whole) - 32, 7):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut.gguf is damaged or cut short"):
            read_gguf(cut)


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture clip, which is not served"):
        read_config(write(tmp_path / "a.gguf", "clip"))
    with pytest.raises(ModelError, match=r"no llama.block_count; convert the model again"):
        read_config(write(tmp_path / "b.gguf"))
    strange = write(tmp_path / "c.gguf", strange__weight=np.ones((4, 32), np.float32))
    with pytest.raises(ModelError, match=r"strange.weight in c.gguf belongs to nothing"):
        check_weight_files(strange)
    kind = gguf.GGMLQuantizationType.NVFP4
    writer = gguf.GGUFWriter(tmp_path / "d.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((2, 36), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"output.weight is of type NVFP4, which is not read"):
        list(sources(read_gguf(tmp_path / "d.gguf")))


def test_folders_and_split_files(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    first = write(tmp_path / "m-00001-of-00002.gguf", token_embd__weight=np.ones((4, 32), np.float32))
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf is missing"):
        split_paths(first)
    write(tmp_path / "m-00002-of-00002.gguf", output_norm__weight=np.ones(32, np.float32))
    (tmp_path / "mmproj-m.gguf").touch()
    assert find_gguf(tmp_path) == first
    assert set(read_gguf(first).tensors) == {"token_embd.weight", "output_norm.weight"}
    write(tmp_path / "m-00002-of-00002.gguf", token_embd__weight=np.ones((4, 32), np.float32))
    with pytest.raises(ModelError, match=r"token_embd.weight is in both"):
        read_gguf(first)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match="2 GGUF models"):
        find_gguf(tmp_path)
