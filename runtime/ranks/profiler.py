"""Profiles of a rank with torch.profiler: a Chrome trace, which Perfetto opens."""

from pathlib import Path

import torch

from runtime.messages.ranks import Profile

ACTIVITIES = {"CPU": "CPU", "GPU": "CUDA"}  # of requests -> members of torch.profiler.ProfilerActivity


class TorchRecording:
    """Recording (devices/profiles.py) of a rank whose device has none of its own."""

    def __init__(self, command: Profile, rank: int) -> None:
        self._path = Path(command.folder) / f"rank-{rank}.trace.json.gz"
        profiler = torch.profiler  # here, because ranks on the CPU defer it (deferred_torch.py)
        kinds = profiler.ProfilerActivity
        wanted = {getattr(kinds, ACTIVITIES[name]) for name in command.activities if name in ACTIVITIES}
        self._profile = profiler.profile(
            activities=wanted & profiler.supported_activities() or {kinds.CPU},
            with_stack=command.with_stack,
            record_shapes=command.record_shapes,
        )
        self._profile.start()

    def write(self) -> None:
        """Ends the profile and writes its trace. Raises OSError."""
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
