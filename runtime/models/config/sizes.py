"""Bounds of the numbers in config.json that say how large a model is: far beyond any model, and small enough
that reading the file takes neither time nor memory."""

from typing import Annotated as A

from msgspec import Meta

Layers = A[int, Meta(gt=0, le=4096)]
Heads = A[int, Meta(gt=0, le=2**16)]
Experts = A[int, Meta(gt=0, le=2**16)]
Width = A[int, Meta(gt=0, le=2**24)]  # of hidden states, of a head, of a latent
Tokens = A[int, Meta(gt=0, le=2**22)]  # of a vocabulary
Positions = A[int, Meta(gt=0, le=2**31 - 1)]
