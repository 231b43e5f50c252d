"""Profiles of the ranks: /start_profile and /stop_profile."""

from pathlib import Path
from tempfile import mkdtemp

from msgspec import structs

from runtime.actors.replica import Replica
from runtime.actors.replicas import Replicas
from runtime.errors import InvalidRequest
from runtime.messages.ranks import Profile


class Profiling:
    """One recording at a time, on the ranks of all replicas. Both methods raise Unavailable when ranks take
    no commands now."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._folder = ""
        self._generations: dict[int, int] = {}  # of recording ranks, by replica index

    def start(self, params: Profile) -> str:
        """All ranks begin to record. -> the folder of their files: one for each replica where there are
        several. Raises InvalidRequest while a profile is being recorded."""
        if self._recording():
            raise InvalidRequest("a profile is being recorded already; /stop_profile ends it")
        folder = params.folder or mkdtemp(prefix="runtime-profile-")
        self._generations.clear()
        owners = self._replicas.owners
        for replica in owners:
            part = folder if len(owners) == 1 else str(Path(folder) / f"replica-{replica.index}")
            replica.commands.profile(structs.replace(params, folder=part))
            if params.num_steps is None:
                self._folder = folder
                self._generations[replica.index] = replica.commands.generation
        return folder

    def stop(self) -> str:
        """The ranks write what they have recorded. -> the folder. Raises InvalidRequest when none is
        recording."""
        recording = self._recording()
        if not recording:
            raise InvalidRequest(
                "no profile is being recorded (ranks that are started again record nothing); /start_profile "
                "begins one"
            )
        for replica in recording:
            replica.commands.profile(Profile())
            del self._generations[replica.index]
        return self._folder

    def _recording(self) -> list[Replica]:
        """Replicas whose ranks record and have not been started again since."""
        return [
            replica
            for replica in self._replicas.owners
            if self._generations.get(replica.index) == replica.commands.generation
        ]
