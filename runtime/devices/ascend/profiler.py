"""Profiles of a rank with torch_npu's profiler: what the device computed, beside the calls of the host. Each
rank writes a folder, `<worker>_<time>_ascend_pt`, whose trace_view.json is a Chrome trace."""

import torch_npu
from torch_npu.profiler import ProfilerActivity

from runtime.messages.ranks import Profile

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.NPU}


class AscendRecording:
    """Recording (devices/profiles.py) of one NPU."""

    def __init__(self, command: Profile, rank: int) -> None:
        wanted = [ACTIVITIES[name] for name in command.activities if name in ACTIVITIES]
        self._profile = torch_npu.profiler.profile(
            activities=wanted or [ProfilerActivity.NPU],
            on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(
                command.folder, worker_name=f"rank-{rank}"
            ),
            with_stack=command.with_stack,
            record_shapes=command.record_shapes,
        )
        self._profile.start()

    def write(self) -> None:
        """Ends the profile and writes its folder."""
        self._profile.stop()
