"""Logit processors: classes that the operator names at the start (--logit-processors) and requests choose by
name.

    class Shy:
        # `params`: custom_params of the request; raise ValueError for wrong ones
        def __init__(self, params: dict) -> None: ...
        def __call__(self, tokens: list[int], prompt_len: int, logits: Tensor) -> Tensor: ...

`tokens` are all of the sequence so far, `logits` its float32 row [V] after penalties and biases and before a
grammar's mask; the result is of the same shape and may be the same tensor, changed. One object serves one
sequence; after a preemption or a rank's death a new one is made, so what it knows must follow from its
arguments. Code never comes with a request.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from runtime import log
from runtime.errors import StartError
from runtime.json_value import JsonDict
from runtime.layers.sampling.sampler import clean
from runtime.messages.steps import Admit


class Processor(Protocol):
    """What a named class makes of its parameters."""

    def __call__(self, tokens: list[int], prompt_len: int, logits: Tensor) -> Tensor: ...


class Active:
    """A slot with a processor."""

    def __init__(self, processor: Processor | None, admit: Admit) -> None:
        """`processor` None: it could not be made."""
        self.processor = processor
        self.tokens: list[int] = admit.history.tolist()
        self.prompt_len = admit.prompt_len

    def apply(self, row: Tensor, drafts: list[int]) -> None:
        """Changes a row of logits, in place, behind `drafts` that follow the tokens so far. What the
        processor raises ends its request, and no other."""
        if self.processor is None:
            return
        try:
            with torch.inference_mode():
                tokens = [*self.tokens, *drafts] if drafts else self.tokens
                row.copy_(self.processor(tokens, self.prompt_len, row.clone()))
        except Exception:
            log.get("processors").exception(
                "a logit processor failed", processor=type(self.processor).__name__, exc_info=True
            )
            self.processor = None


class Processors:
    """The classes, and the slots that use them."""

    def __init__(self, class_paths: list[str]) -> None:
        """`class_paths`: package.module:Class. Raises StartError."""
        self.classes: dict[str, Callable[[JsonDict], Processor]] = {}
        self.slots: dict[int, Active] = {}
        for path in class_paths:
            module, _, name = path.partition(":")
            try:
                self.classes[name] = getattr(import_module(module), name)
            except Exception as error:  # whatever the module does when it is imported
                raise StartError(
                    f"--logit-processors {path} can't be loaded ({type(error).__name__}: {error}); "
                    "give package.module:Class of a module that Python finds (for your own file set "
                    "PYTHONPATH=FOLDER)"
                ) from None

    def admit(self, admit: Admit) -> None:
        """Forgets what the slot held."""
        self.slots.pop(admit.slot, None)
        # none: another rank chooses the tokens
        if (request := admit.sampling.processor) is None or not self.classes:
            return
        try:
            processor = self.classes[request.name](request.params)
        except Exception:
            log.get("processors").exception(
                "a logit processor does not take its parameters", processor=request.name, exc_info=True
            )
            processor = None
        self.slots[admit.slot] = Active(processor, admit)

    def apply(
        self, logits: Tensor, slots: list[int], contexts: dict[int, list[int]], *, is_own: bool
    ) -> Tensor:
        """The logits with the rows of slots that have a processor changed; in a copy, unless `is_own`.
        `contexts`: by row of logits, drafts that the sequence has at that place."""
        indices = [index for index, slot in enumerate(slots) if slot in self.slots]
        if not indices:
            return logits
        logits = logits if is_own else logits.clone()
        for index in indices:
            self.slots[slots[index]].apply(logits[index], contexts.get(index, []))
        return clean(logits)

    def took(self, slots: list[int], tokens: list[list[int]]) -> list[int]:
        """The tokens that a step brings to each of `slots`. -> places of slots whose tokens mean nothing,
        because their processor failed"""
        failed = []
        for index, (slot, taken) in enumerate(zip(slots, tokens, strict=True)):
            if (active := self.slots.get(slot)) is not None:
                active.tokens.extend(taken)
                if active.processor is None:
                    failed.append(index)
        return failed
