"""A secret that several processes share, read from the file of an option or from an environment variable, and
the one that all nodes share."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from runtime import log
from runtime.errors import StartError
from runtime.regular_file import read_regular

MIN_BYTES = 16
MAX_BYTES = 4096


class SharedSecret(NamedTuple):
    """Where a secret comes from, and what errors say of it."""

    noun: str  # what errors call it
    option: str  # names a file
    variable: str  # of the environment, where the option is not given
    missing: str  # the beginning of the error where there is none
    holders: str  # who must have the same

    def read(self, file: str | None, environment: Mapping[str, str] = os.environ) -> bytes:
        """The secret, without white space around it. Raises StartError where there is none, or one that could
        be guessed; no error has any of it."""
        if file is None:
            value, source = environment.get(self.variable, "").encode(), self.variable
            if not value:
                places = f"give {self.option}, or {self.variable} in the environment"
                raise StartError(f"{self.missing}: {places}; {self._remedy}")
        else:
            value, source = self._read_file(Path(file)), f"{self.option} {file}"
        value = value.strip()
        if len(value) < MIN_BYTES:
            raise StartError(
                f"the {self.noun} of {source} has less than {MIN_BYTES} characters; {self._remedy}"
            )
        return value

    @property
    def _remedy(self) -> str:
        return f"make one with `openssl rand -hex 32`, the same for {self.holders}"

    def _read_file(self, path: Path) -> bytes:
        try:
            value = read_regular(path, MAX_BYTES)
            mode = path.stat().st_mode
        except OSError as error:
            raise StartError(
                f"{self.option} {path} can't be read ({error.strerror or error}); {self._remedy}"
            ) from None
        if mode & 0o077:
            log.get("start").warning(f"other users may read the {self.noun}; chmod 600", path=str(path))
        return value


NODES_SECRET = SharedSecret(
    noun="secret",
    option="--dist-secret-file",
    variable="RUNTIME_DIST_SECRET",
    missing="--nnodes above 1 needs a secret that all nodes share",
    holders="all nodes",
)
