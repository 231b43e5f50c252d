"""The tokens of a prompt that stand for a video and for what sounds in it (Qwen2.5-Omni, Qwen3-Omni):
frames and sounds of the same time have the same positions, and stand near each other."""

from math import ceil

import numpy as np
from msgspec import Struct, structs

from runtime.messages.media import TokenGrid
from runtime.text.media_prompts import Prepared


class SoundMarks(Struct, frozen=True, kw_only=True):
    """Tokens around a sound, and where frames stand among those of the sound of their video."""

    start_id: int
    end_id: int
    chunk_positions: int  # as in OmniEncoder


def with_sound(video: Prepared, sound: Prepared, marks: SoundMarks) -> Prepared:
    """A video whose tokens have those of its sound among them. Each token of the sound is one position."""
    length = len(sound.token_ids)
    frames, rows, columns = (getattr(video.token_grids[0], name) for name in ("frames", "rows", "columns"))
    size = rows * columns
    begins = [start_of(index * video.frame_step, length, marks.chunk_positions) for index in range(frames)]
    shares_positions = marks.chunk_positions > 0  # of a mark of the video and the one of the sound next to it
    ids, frame_places, sound_places = [marks.start_id], list[int](), list[int]()
    grids = [TokenGrid(0, 1, 1, 1, back=1, advance=0)] if shares_positions else []
    done = 0  # tokens of the sound that stand before
    for index, begin in enumerate(begins):
        sound_places += range(len(ids), len(ids) + begin - done)
        ids += sound.token_ids[done:begin]
        done = begin
        time = int(np.float32(index) * np.float32(video.frame_step))
        is_last = index == frames - 1 and done == length
        behind = max(time + 1, rows, columns) - done if is_last else 0
        grids.append(TokenGrid(len(ids), 1, rows, columns, back=done, time=time, advance=behind))
        frame_places += range(len(ids), len(ids) + size)
        ids += video.token_ids[:size]
    sound_places += range(len(ids), len(ids) + length - done)
    ids += sound.token_ids[done:]
    if shares_positions:
        grids.append(TokenGrid(len(ids), 1, 1, 1, advance=0))
    ids.append(marks.end_id)
    return structs.replace(
        video,
        token_ids=ids,
        positions=np.array(frame_places, np.int32),
        token_grids=tuple(grids),
        inner=(structs.replace(sound, positions=np.array(sound_places, np.int32)),),
    )


def start_of(position: float, length: int, chunk: int) -> int:
    """How many of the `length` tokens of a sound stand before a frame at this position: those of earlier
    chunks, or without chunks those that begin before it."""
    return min(int(position // chunk) * chunk if chunk else ceil(position), length)
