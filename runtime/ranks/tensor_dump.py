"""Files of what layers compute (--debug-tensor-dump-output-folder): one safetensors file for each step of
each rank, FOLDER/rank-0/pass-00001.safetensors, with the outputs of all layers by their names, and

    token_ids, positions    of the step's tokens, which are the rows of the other tensors
    NAME.0, NAME.1          of a layer whose output is several tensors

Steps of a start that compute nothing for a request are not among them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import log
from runtime.devices.base import ForwardBatch
from runtime.errors import StartError
from runtime.messages.diagnosis import TensorDump
from runtime.regular_file import check_regular

BLOCK = re.compile(r"(?:.*\.)?layers\.(\d+)(\..*)?")  # a block, and what is in it


class TensorFiles:
    """The files of one rank."""

    def __init__(self, rank: int, dump: TensorDump) -> None:
        """Makes the folder, and reads what was recorded. Raises StartError."""
        self.folder = Path(dump.folder) / f"rank-{rank}"
        self.layers = None if dump.layers is None else set(dump.layers)
        self.prompts_only = dump.prompts_only
        self.injects = dump.injects
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(
                f"--debug-tensor-dump-output-folder {dump.folder} can't be made ({error})"
            ) from None
        self.recorded = read_recorded(dump.recorded)
        self.count = 0
        self.is_over = False  # a file could not be written
        self.tensors: dict[str, Tensor] | None = None  # of the step that is computed; None: it is not kept
        self.is_recorded = False  # the step has the tokens of the recorded one

    def wants(self, name: str) -> bool:
        """Whether a layer's output is kept, or replaced by what was recorded."""
        found = BLOCK.fullmatch(name)
        is_injected = self.injects and found is not None and not found[2]
        return is_injected or self.layers is None or (found is not None and int(found[1]) in self.layers)

    def begin(self, batch: ForwardBatch) -> None:
        """A step begins."""
        tokens = batch.token_ids.cpu()
        recorded = self.recorded.get("token_ids")
        self.is_recorded = self.injects and recorded is not None and torch.equal(tokens, recorded)
        self.tensors = None
        if not (self.is_over or (self.prompts_only and batch.is_decode)):
            self.tensors = {"token_ids": tokens, "positions": batch.positions.cpu()}

    def see(self, name: str, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Keeps the output of a layer. -> what the next layers get"""
        if self.tensors is not None:
            self._keep(name, output)
        found = BLOCK.fullmatch(name)
        if not self.is_recorded or found is None or found[2] or not isinstance(output, Tensor):
            return output
        injected = self.recorded.get(name)
        return output if injected is None else injected.to(output.device, output.dtype)

    def _keep(self, name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        assert self.tensors is not None
        found = BLOCK.fullmatch(name)
        if self.layers is not None and not (found is not None and int(found[1]) in self.layers):
            return
        parts: Sequence[Tensor] = (output,) if isinstance(output, Tensor) else output
        for index, part in enumerate(part for part in parts if isinstance(part, Tensor)):
            key = name if isinstance(output, Tensor) else f"{name}.{index}"
            # a copy: layers write to what others returned
            self.tensors[key] = part.detach().to("cpu", copy=True).contiguous()

    def end(self) -> None:
        """Writes the file of the step. A disk that takes no more ends the files, not the rank."""
        if self.tensors is None:
            return
        self.count += 1
        path = self.folder / f"pass-{self.count:05d}.safetensors"
        try:
            save_file(self.tensors, path)
        except (OSError, SafetensorError):
            path.unlink(missing_ok=True)
            self.is_over = True
            log.get("tensor_dump").exception(
                "a file of tensors could not be written; no more are", exc_info=True
            )
        self.tensors = None


def read_recorded(path: str) -> dict[str, Tensor]:
    """The tensors of a file of another run; {}: there is none. Raises StartError."""
    if not path:
        return {}
    try:
        check_regular(path)
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StartError(
            f"--debug-tensor-dump-input-file {path} can't be read ({error}); give a file that "
            "--debug-tensor-dump-output-folder made"
        ) from None
    if "token_ids" not in tensors:
        raise StartError(
            f"--debug-tensor-dump-input-file {path} has no token_ids; give a file that "
            "--debug-tensor-dump-output-folder made"
        )
    return tensors
