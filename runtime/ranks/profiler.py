"""Where a rank's time goes, as torch sees it: a Chrome trace, to be opened in Perfetto."""

from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

from runtime.messages.ranks import Profile

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


class Recording:
    """Records from its creation until `write`."""

    def __init__(self, wish: Profile, rank: int) -> None:
        self._path = Path(wish.folder) / f"rank-{rank}.trace.json.gz"
        wanted = {ACTIVITIES[name] for name in wish.activities if name in ACTIVITIES} & supported_activities()
        self._profile = profile(
            activities=wanted or {ProfilerActivity.CPU},
            with_stack=wish.with_stack,
            record_shapes=wish.record_shapes,
        )
        self._profile.start()

    def write(self) -> None:
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
