"""--api-key-file: the keys of clients, with the names of their tenants, and names for keys that have none.

# comment
alice  KEY [KEY ...]      a line for each tenant; several keys while one takes the place of another
"""

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from re import fullmatch

from runtime import log
from runtime.errors import StartError
from runtime.messages.tenants import ADMINISTRATOR
from runtime.regular_file import read_regular, read_text

NAME = "[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}"
DIGEST = "key-"  # how names of unnamed keys begin
SECRET_BYTES = 32
MAX_BYTES = 16 * 2**20  # of a file that is read here


def names_of(keys: Iterable[str], secret: bytes) -> dict[str, str]:
    """Names by key for keys that have none. A name can be shown: without `secret` no key can be tried on
    it."""
    return {key: f"{DIGEST}{blake2b(key.encode(), key=secret, digest_size=8).hexdigest()}" for key in keys}


def read_key_file(path: Path) -> dict[str, str]:
    """Names by key. Raises StartError, which names the line and never a key."""
    try:
        text = read_text(path, MAX_BYTES)
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise StartError(f"--api-key-file {path} can't be read ({reason}); give a text file") from None
    if mode & 0o077:
        log.get("keys").warning("other users may read the keys; chmod 600", path=str(path))
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, *keys = line.split()
        if problem := _problem(name, keys, names):
            raise StartError(f"--api-key-file {path}, line {number}: {problem}")
        names |= dict.fromkeys(keys, name)
    if not names:
        raise StartError(f"--api-key-file {path} has no keys; add lines of a name and a key")
    return names


def read_secret(folder: Path | None) -> bytes:
    """The secret behind the names of unnamed keys: in the folder of stored objects, so that these find their
    owners again after a restart; without a folder a new one for each start."""
    secret = os.urandom(SECRET_BYTES)
    if folder is None:
        return secret
    path = folder / "tenants.secret"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            found = read_regular(path, MAX_BYTES)
            if len(found) == SECRET_BYTES:
                return found
            path.replace(path.with_suffix(".damaged"))
            log.get("keys").warning(
                "the secret of tenants' names was damaged; only the admin key sees what unnamed keys own"
            )
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        log.get("keys").warning(
            "names of unnamed keys are new after a restart", path=str(path), error=str(error)
        )
    return secret


def _problem(name: str, keys: list[str], names: dict[str, str]) -> str | None:
    """What is wrong with a line; `names` has the keys of the lines before."""
    if not fullmatch(NAME, name) or name == ADMINISTRATOR.name or name.startswith(DIGEST):
        return (
            f"a name has up to 64 letters, digits and _.@-, is not {ADMINISTRATOR.name} and does not begin "
            f"with {DIGEST}"
        )
    if not keys:
        return f"give a key behind the name {name}"
    if name in names.values():
        return f"{name} has a line already; write all keys of a tenant on one line"
    if len(set(keys)) < len(keys) or any(key in names for key in keys):
        return f"{name} has a key that stands here twice; give each tenant keys of its own"
    if not all("!" <= char <= "~" for key in keys for char in key):
        return f"the key of {name} has characters that headers can't carry; choose another one"
    return None
