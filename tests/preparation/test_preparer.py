"""Files prepared in a process of their own: the same as in this one, and a child that ends takes its own file
with it alone."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from runtime.errors import InternalFault, InvalidRequest
from runtime.media import forks
from runtime.messages.media import Media, MediaKind, SharedMemory, TokenGrid
from runtime.models.config.media_config import MediaConfig
from runtime.models.config.model_config import read_config
from runtime.preparation import preparer as module
from runtime.preparation.messages import Answer, Question
from runtime.preparation.packed import COPIED_BYTES, read_prepared, write_prepared
from runtime.preparation.preparer import Preparer
from runtime.text.media_prompts import MediaProcessor, Prepared
from runtime.text.open_media import open_processor
from runtime.text.vocabulary import Vocabulary
from tests.models.make_media import make_qwen_vl
from tests.models.make_qwen3_vl import make_qwen3_vl

RNG = np.random.default_rng(0)


def media(kind: MediaKind = MediaKind.IMAGE, frames: int = 1, height: int = 40, width: int = 48) -> Media:
    values = RNG.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    times = tuple([index / 2 for index in range(frames)])
    return Media(kind=kind, param="field", digest=bytes(32), values=values, frame_times_s=times)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[MediaProcessor, Preparer]]:
    """A model's processor in this process, and elsewhere."""
    config, vocabulary = read_config(folder), Vocabulary.load(folder)
    here = open_processor(folder, config.media, vocabulary)
    assert here is not None and config.media is not None
    one = Preparer(here, folder, config.media, vocabulary, {}, dict(os.environ))
    try:
        yield here, one
    finally:
        one.close()


def same(one: Prepared, other: Prepared) -> bool:
    arrays = [(one.values, other.values), (one.positions, other.positions)]
    fields = (
        "kind",
        "digest",
        "token_ids",
        "grid",
        "token_grids",
        "frame_step",
        "replaced",
        "around",
        "joined",
    )
    return (
        all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays)
        and all(getattr(one, name) == getattr(other, name) for name in fields)
        and len(one.parts) == len(other.parts)
        and len(one.inner) == len(other.inner)
        and all(map(same, (*one.parts, *one.inner), (*other.parts, *other.inner)))
    )


def test_a_file_is_prepared_as_here(tmp_path: Path) -> None:
    """Images and videos, for whose texts the child asks the server; refusals name the field."""
    make_qwen3_vl(tmp_path)
    with opened(tmp_path) as (here, there):
        assert there.placeholder_ids == here.placeholder_ids
        for one in (media(), media(MediaKind.VIDEO, 3), media(MediaKind.VIDEO, 4)):
            assert same(there.prepare(one), here.prepare(one))
        assert there._known, "answers go with later files"
        with pytest.raises(InvalidRequest, match="field: this model takes images and videos, and no sounds"):
            sound = msgspec.structs.replace(media(), kind=MediaKind.AUDIO, values=np.ones(9, np.float32))
            there.prepare(sound)


def test_memory_that_a_file_came_in_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_qwen_vl(tmp_path, "2.5")
    one = media(height=400, width=600)
    fd = os.memfd_create("x")
    os.write(fd, one.values.tobytes())
    shared = msgspec.structs.replace(one, memory=SharedMemory(fd, one.values))
    with opened(tmp_path) as (here, there):
        with monkeypatch.context() as patched:
            patched.setattr(module.os, "memfd_create", None)
            assert same(there.prepare(shared), here.prepare(one))
        other = msgspec.structs.replace(shared, values=media().values)
        assert same(there.prepare(other), here.prepare(other)), "the memory is of another array"


def test_a_child_that_is_killed_fails_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a process that is killed is started again."""
    make_qwen3_vl(tmp_path)
    with opened(tmp_path) as (here, there):
        one = media()
        there.prepare(one)
        first = there._process
        assert first is not None
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")

        def kill(question: Question) -> Answer:
            """While it waits for the tokens of a moment's time."""
            for pid in map(int, children.read_text().split()):  # others may wait for files
                os.kill(pid, signal.SIGKILL)
            return Answer([1])

        with monkeypatch.context() as patched, pytest.raises(InternalFault, match="field: the process"):
            patched.setattr(there, "_answer", kill)
            there.prepare(media(MediaKind.VIDEO, 3))
        assert there._process is first and same(there.prepare(one), here.prepare(one))
        first.kill()
        first.wait()
        assert same(there.prepare(one), here.prepare(one)) and there._process is not first


def children_of(one: Preparer) -> list[int]:
    assert one._process is not None
    pid = one._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_children_prepare_many_small_files(tmp_path: Path) -> None:
    """Until they end. One may not have been heard to wait yet when the next file comes, which then has
    another."""
    make_qwen_vl(tmp_path, "2")
    small, large = media(), media(height=1100, width=1000)
    with opened(tmp_path) as (here, there):
        seen: set[int] = set()
        for _ in range(40):  # more than a child may have open files
            there.prepare(small)
            seen.update(children_of(there))
        assert len(seen) < 10
        assert same(there.prepare(large), here.prepare(large))
        with pytest.raises(InvalidRequest, match="too narrow"):
            there.prepare(media(height=1, width=900))
        waiting = children_of(there)
        for child in waiting:
            os.kill(child, signal.SIGKILL)
        until_s = time.monotonic() + 30
        while children_of(there) and time.monotonic() < until_s:
            time.sleep(0.001)
        assert not children_of(there), "a killed child ends"
        assert same(there.prepare(small), here.prepare(small)), "children that died while they waited"
        assert not seen.union(waiting).intersection(children_of(there))


@pytest.mark.parametrize("size", [3, COPIED_BYTES])
def test_all_fields_come_through(size: int) -> None:
    part = Prepared(
        kind=MediaKind.IMAGE,
        digest=b"p" * 32,
        values=np.zeros((0, 4), np.float32),
        token_ids=[],
        positions=np.zeros(0, np.int32),
    )
    one = Prepared(
        kind=MediaKind.VIDEO,
        digest=b"d" * 32,
        values=RNG.standard_normal((2, size), np.float32),
        token_ids=[5, 6, 7],
        positions=np.array([1, 2], np.int32),
        grid=(2, 3, 4),
        token_grids=(TokenGrid(0, 1, 5, 6, back=2),),
        frame_step=1.5,
        replaced=(3, 4),
        around=("before", "behind"),
        joined={(1, 2): 9},
        parts=(part,),
        inner=(part, part),
    )
    fd, head_at = write_prepared(one)
    found = read_prepared(fd, head_at)
    os.close(fd)
    assert same(found, one) and not found.values.flags.writeable


def test_every_encoder_is_a_message() -> None:
    """Configurations of encoders are decoded as what they were."""
    for kind in get_args(MediaConfig):
        msgspec.msgpack.Decoder(kind)


def test_the_process_gives_way_to_the_server(tmp_path: Path) -> None:
    make_qwen_vl(tmp_path, "2")
    with opened(tmp_path) as (_, there):
        there.prepare(media())
        assert there._process is not None
        nice = os.getpriority(os.PRIO_PROCESS, there._process.pid)
        assert nice == min(os.getpriority(os.PRIO_PROCESS, 0) + forks.NICENESS, 19)
