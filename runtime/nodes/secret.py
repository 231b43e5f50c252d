"""The secret that all nodes share: --dist-secret-file, or the environment variable RUNTIME_DIST_SECRET."""

import os
from collections.abc import Mapping
from pathlib import Path

from runtime import log
from runtime.errors import StartError
from runtime.regular_file import read_regular

VARIABLE = "RUNTIME_DIST_SECRET"
MIN_BYTES = 16
MAX_BYTES = 4096
REMEDY = "make one with `openssl rand -hex 32`, the same for all nodes"


def read_secret(file: str | None, environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret, without white space around it. Raises StartError where there is none, or one that could be
    guessed; no error has any of it."""
    if file is None:
        secret, source = environment.get(VARIABLE, "").encode(), VARIABLE
        if not secret:
            raise StartError(
                "--nnodes above 1 needs a secret that all nodes share: give --dist-secret-file, or "
                f"{VARIABLE} in the environment; {REMEDY}"
            )
    else:
        secret, source = _read(Path(file)), f"--dist-secret-file {file}"
    secret = secret.strip()
    if len(secret) < MIN_BYTES:
        raise StartError(f"the secret of {source} has less than {MIN_BYTES} characters; {REMEDY}")
    return secret


def _read(path: Path) -> bytes:
    try:
        secret = read_regular(path, MAX_BYTES)
        mode = path.stat().st_mode
    except OSError as error:
        raise StartError(
            f"--dist-secret-file {path} can't be read ({error.strerror or error}); {REMEDY}"
        ) from None
    if mode & 0o077:
        log.get("nodes").warning("other users may read the secret; chmod 600", path=str(path))
    return secret
