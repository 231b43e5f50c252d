"""The ranks of another node, seen from node 0: messages and signals go through the node's link."""

from collections.abc import Callable
from signal import SIGKILL

from runtime.actors.rank_process import Rank, Replies
from runtime.errors import RankDied


class RemoteProcess:
    """The process of a rank on another node, as Process: signals are sent there, and its end is reported."""

    pid = 0  # a number of another machine would mean nothing here

    def __init__(self, signal: Callable[[int], None]) -> None:
        """`signal` sends the process a signal."""
        self.returncode: int | None = None
        self._signal = signal

    def poll(self) -> int | None:
        """The exit code, when it was reported."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. For a process whose end was reported: nothing waits here."""
        assert self.returncode is not None, "its end was reported"
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Has the node send a signal, unless the process has ended."""
        if self.returncode is None:
            self._signal(sig)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(SIGKILL)


class RemoteRank(Rank):
    """A rank of another node."""

    def __init__(self, index: int, process: RemoteProcess, replies: Replies) -> None:
        super().__init__(index, process, replies)
        self._process = process
        self._node_reason = ""  # why its node is gone, or has not started it

    def end(self, exit_code: int, node_reason: str = "") -> None:
        """The process has ended; `node_reason`: with its node."""
        self._process.returncode, self._node_reason = exit_code, node_reason

    def death(self) -> RankDied:
        """The error that describes the end of the process, or of the node."""
        if not self._node_reason:
            return super().death()
        return RankDied(self.index, None, self._node_reason, is_with_node=True)
