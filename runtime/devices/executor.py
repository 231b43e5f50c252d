"""The interface between a rank's main loop (ranks/worker.py) and what computes its steps. Torch-free.

Torch devices share one Executor, ranks/torch_executor.TorchExecutor; the null device has its own.
"""

from collections.abc import Callable
from typing import Protocol

from runtime.messages.constraint import Grammar
from runtime.messages.experts import ReadExperts
from runtime.messages.lora import LoadAdapter
from runtime.messages.media import AlignSound, Encode, EncodeRows, RowsEncoded
from runtime.messages.memory import ChangeMemory, MemoryReport, UpdateWeights
from runtime.messages.ranks import Captured, CaptureUnit, CountExperts, ExpertCounts, Profile, RankReady
from runtime.messages.steps import GroupSteps, StepPlan, StepResult


class Pending(Protocol):
    """Work that was launched: a step, or a reading of the expert counts. The device may still compute it
    while the host launches what follows."""

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> StepResult | ExpertCounts | None:
        """Waits for the work, in any thread and any number of times. None at once on ranks that do not
        report."""
        ...


class Executor(Protocol):
    """One rank's share of the model on one device. ranks/open_executor.py makes it, with its weights loaded
    and its memory allocated."""

    ready: RankReady  # what was loaded and allocated

    def launch(self, plan: StepPlan) -> Pending:
        """Launches one step; the device computes steps in the order of their launches."""
        ...

    def launch_group(self, step: GroupSteps) -> Pending:
        """Launches one step of all attention groups, of which this rank is in one. Without a plan of its own
        it takes part in what all ranks compute, and reports nothing."""
        ...

    def encode(self, command: Encode) -> None:
        """Launches the encoding of images, or a slice of it. Steps that are launched later take rows of what
        is complete."""
        ...

    def encode_rows(self, command: EncodeRows | AlignSound) -> RowsEncoded:
        """Encodes a file, or aligns a sound with what was said, and waits for the rows. An input that the
        model does not take is an error in the answer."""
        ...

    def capture(self, size: int, unit: CaptureUnit = "sequences") -> Captured:
        """Captures steps of a size (messages/ranks.py, Capture). All ranks capture the same sizes between the
        same steps."""
        ...

    def profile(self, command: Profile) -> None:
        """Starts a new profile, or writes the current one if the command names no folder."""
        ...

    def prepare_grammar(self, grammar: Grammar | None, done: Callable[[], None]) -> None:
        """Begins to compile a grammar in the background, or with None to load the compiler; returns at once.
        `done` is called, in any thread, when a launch no longer waits for it."""
        ...

    def load_adapter(self, command: LoadAdapter) -> None:
        """Reads an adapter to host memory. May be called in any thread while steps run. Raises ModelError."""
        ...

    def count_experts(self, command: CountExperts) -> Pending:
        """Reads how the tokens of the steps launched so far spread over experts. All ranks do it between the
        same steps."""
        ...

    def read_experts(self, command: ReadExperts) -> Callable[[], None]:
        """-> what reads the weights of experts that are to move here. It is called once, in any thread while
        steps run, and raises ModelError, OSError, MemoryError."""
        ...

    def move_experts(self) -> None:
        """Takes the placements of the last ReadExperts into use. All ranks do it between the same steps.
        Raises ModelError where the weights have changed since, as then all ranks do."""
        ...

    def change_memory(self, command: ChangeMemory) -> MemoryReport:
        """Releases and resumes parts of the device's memory, while no step is running. Raises an error that
        leaves the rank unusable; others are in the report."""
        ...

    def update_weights(self, command: UpdateWeights) -> MemoryReport:
        """Loads the weights of another checkpoint, or checks whether it could, while no step is running.
        Raises an error that leaves the rank unusable; others are in the report."""
        ...

    def close(self) -> None:
        """Ends what the rank shares with others: collectives and copies of pages."""
        ...
