"""Token ids by which the prefix cache knows images, videos and sounds.

In a prompt all tokens of an image are the same placeholder. In the tokens of a sequence each one that takes a
row of the image's encoding has a media key instead: 30 bits of a hash of the image's digest and of the row,
above all ids of vocabularies. So prompts with equal images share pages, and others share none from the first
token of an image on; a page is found by its tokens and all before them.
"""

from array import array
from hashlib import shake_256

import numpy as np

from runtime.messages.media import MediaInput
from runtime.messages.requests import Request

FIRST_KEY = 1 << 30  # the least media key; ids of tokens are below it


def media_keys(media: MediaInput) -> np.ndarray:
    """The keys of the tokens that take a row, int32 [rows]."""
    numbers = np.frombuffer(shake_256(media.digest).digest(4 * len(media.positions)), np.uint32)
    return ((numbers & np.uint32(FIRST_KEY - 1)) | np.uint32(FIRST_KEY)).astype(np.int32)


def cache_ids(request: Request) -> "array[int]":
    """The prompt as the prefix cache knows it."""
    ids = array("i", request.prompt_ids)
    if request.media:
        view = np.frombuffer(ids, np.int32)
        for media in request.media:
            view[media.start + media.positions] = media_keys(media)
    return ids
