"""How far a start is: what /health says while it goes on, and the line on the terminal or in the log. So for
ranks that are started again."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

import anyio

from runtime.admin.progress_line import REDRAW_S, Amount, ProgressLine, duration
from runtime.messages.ranks import LoadPhase, LoadProgress
from runtime.models.config.model_config import ModelConfig
from runtime.service import Health, State

Phase = Literal["download", "checksums", LoadPhase, "delivery", "warm-up"]
# in the order of a start -> what is said of it
PHASES: dict[Phase, str] = {
    "download": "downloading the model",
    "checksums": "comparing checksums",
    "process": "starting ranks",
    "device": "opening the device",
    "weights": "loading weights",
    "packing": "packing weights",
    "compile": "compiling layers",
    "profile": "profile run",
    "pages": "allocating pages",
    "delivery": "waiting for weights (/update_weights_from_disk)",
    "warm-up": "warming up",
}
ORDER = {phase: index for index, phase in enumerate(PHASES)}
IN_BYTES = ("download", "weights")
SERVER = (-1, -1)  # in place of a replica and a rank: what the server does itself


@dataclass(frozen=True, slots=True)
class Stage:
    """A phase, and how much of it is done."""

    phase: Phase
    done: int
    total: int  # 0: not known
    begin_s: float  # when it began; in bytes, when the first of them was reported
    first: int  # what was done then

    @property
    def fraction(self) -> float:
        """The part of this phase that is done; 0 where the total is not known."""
        return self.done / self.total if self.total else 0.0

    def progress(self, now_s: float) -> str:
        """How far it is, for people."""
        if not self.total:
            seconds = now_s - self.begin_s
            return duration(seconds) if seconds >= 1 else ""
        if self.phase in IN_BYTES:
            return str(Amount.measured(self.done, self.total, self.first, now_s - self.begin_s))
        return f"{self.done} of {self.total}"


class StartProgress:
    """What the server and its ranks do until they are ready. Of ranks that are in different phases, the one
    that is furthest behind counts."""

    def __init__(self, is_quantizing: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """`is_quantizing`: weights are quantized as they are loaded."""
        self._clock = clock
        self._stages: dict[tuple[int, int], Stage] = {}
        self._texts = PHASES | ({"weights": "loading and quantizing weights"} if is_quantizing else {})
        self._begun = anyio.Event()

    @classmethod
    def of_model(cls, model: ModelConfig) -> "StartProgress":
        """For the start of a server of this model."""
        return cls(is_quantizing=model.quantization is not None and model.quantization.is_online)

    def update(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        """What the server does itself now."""
        self._put(SERVER, phase, done, total)

    def rank(self, replica: int, report: LoadProgress) -> None:
        """What a rank of a replica does now. When it is ready, it counts no more."""
        if report.phase == "ready":
            self._stages.pop((replica, report.rank), None)
        else:
            self._put((replica, report.rank), report.phase, report.done, report.total)

    def end(self) -> None:
        """The server has nothing more to do itself."""
        self._stages.pop(SERVER, None)

    @property
    def stage(self) -> Stage | None:
        """The stage that is furthest behind; None: nothing is being started."""
        return min(self._stages.values(), key=lambda one: (ORDER[one.phase], one.fraction), default=None)

    @property
    def event(self) -> str:
        """What is being done, for people; empty: nothing."""
        return "" if (stage := self.stage) is None else self._texts[stage.phase]

    @property
    def detail(self) -> str:
        """What is being done and how far it is, for people; empty: nothing."""
        if (stage := self.stage) is None:
            return ""
        progress = stage.progress(self._clock())
        return f"{self.event}: {progress}" if progress else self.event

    def health(self, state: State) -> Health:
        """What /health says in this state."""
        if (stage := self.stage) is None:
            return Health(state)
        return Health(state, self.detail, stage.phase, round(stage.fraction, 3))

    async def run(self) -> NoReturn:
        """Shows it whenever something is being started."""
        line = ProgressLine("start", self._clock)
        while True:
            await self._begun.wait()
            while (stage := self.stage) is not None:
                line.show(self.event, stage.progress(self._clock()))
                await anyio.sleep(REDRAW_S)
            line.end()
            self._begun = anyio.Event()

    def _put(self, source: tuple[int, int], phase: Phase, done: int, total: int) -> None:
        old = self._stages.get(source)
        is_same = old is not None and old.phase == phase and bool(old.total) == bool(total)
        begin_s, first = (old.begin_s, old.first) if old is not None and is_same else (self._clock(), done)
        self._stages[source] = Stage(phase, done, total, begin_s, first)
        self._begun.set()
