"""AlignSound on a rank: one pass of a Whisper over a whole transcription."""

import numpy as np
import torch

from runtime.devices.base import Device
from runtime.layers.upload import upload_int64
from runtime.messages.media import AlignSound, RowsEncoded
from runtime.models.base import Model
from runtime.models.vision.slices import finish
from runtime.models.whisper import Whisper
from runtime.models.whisper_alignment import alignment
from runtime.ranks.encoded_media import EncodedMedia, encoder_of

NO_SCORES = np.empty(0, np.float32)


def align(device: Device, model: Model, kept: EncodedMedia | None, command: AlignSound) -> RowsEncoded:
    """How well each token goes with each position of the sound, which is encoded where its encoding is not
    `kept`. All ranks call it together; what the model cannot do is an error of the answer."""
    encoder = encoder_of(model)
    if not isinstance(model, Whisper) or encoder is None or device.scatters_tokens:
        fault = "times of words are not known with the model and the options of this server; take segment"
        return RowsEncoded(id=command.id, rows=NO_SCORES, error=fault)
    with torch.inference_mode():
        rows = None if kept is None else kept.find(command.media.id)
        sound = finish(encoder.slices([command.media]))[0] if rows is None else rows
        scores = alignment(
            model,
            device.head_ranks,
            upload_int64(command.token_ids.astype(np.int64), device.torch_device),
            sound.view(-1, model.hidden_size),
            command.heads,
            num_given=command.num_given,
            num_positions=command.num_positions,
            filter_width=command.filter_width,
        )
    return RowsEncoded(id=command.id, rows=scores.cpu().numpy().ravel(), num_rows=len(scores))
