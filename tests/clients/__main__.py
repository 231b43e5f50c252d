"""`./dev test-clients [NAME ...]`: runs client libraries against a server of the embedded model.

Each script gets an environment of its own in .venv-clients, made by pip or npm from the pinned versions of
its head, and the server's address in RUNTIME_URL. It prints a line for what it has exercised. The table on
stdout says what came of each; the exit status is 1 where one failed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.clients.catalogue import FOLDER, Client, clients
from tests.e2e.serving import serve

ENVIRONMENTS = FOLDER.parents[1] / ".venv-clients"
INSTALL_S, RUN_S = 1800, 300
# what a script asks for in its head -> options of runtime serve
SERVERS: dict[str, tuple[str, ...]] = {
    "pocket": ("--model-path", "pocket"),
    "embedder": ("--model-path", "pocket", "--is-embedding"),
    # Coding agents send prompts of twenty thousand tokens, which the embedded model cannot read: this
    # template renders their last messages only, and the length is there for their max_tokens.
    "agents": (
        "--model-path",
        "pocket",
        "--chat-template",
        str(FOLDER / "last_question.jinja"),
        "--tool-call-parser",
        "hermes",
        "--preferred-sampling-params",
        '{"temperature": 0}',
        "--json-model-override-args",
        '{"max_position_embeddings": 65536}',
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a client: `error` is empty when it passed, `done` has the lines that it printed."""

    client: Client
    error: str
    done: tuple[str, ...]
    seconds: float


class InstallError(Exception):
    """A client could not be installed; the text is the end of the installer's output."""


def install(client: Client) -> Path:
    """Makes the environment of a client, unless it is there with the same versions. Raises InstallError."""
    folder = ENVIRONMENTS / client.name
    stamp, wanted = folder / "installed.txt", "\n".join(client.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.is_python:
        call([sys.executable, "-m", "venv", str(folder)], folder)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        if client.requirements:
            call([*pip, *client.requirements], folder)
    else:
        call(["npm", "install", "--no-audit", "--no-fund", "--prefix", ".", *client.requirements], folder)
    stamp.write_text(wanted)
    return folder


def call(command: Sequence[str], folder: Path) -> None:
    """Runs an installer. Raises InstallError."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from None
    if done.returncode:
        raise InstallError("\n".join((done.stdout + done.stderr).strip().splitlines()[-5:]))


def run(client: Client, command: Sequence[str], url: str) -> Outcome:
    """Runs a client's script in a new folder that is also its home, so that no settings of the user count."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"RUNTIME_URL": url, "HOME": home, "PWD": home, "PYTHONWARNINGS": "ignore"}
        environment.pop("PYTHONPATH", None)
        try:
            done = subprocess.run(
                command,
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=RUN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(client, f"not done in {RUN_S} s", (), time.monotonic() - began)
    error = "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")
    lines = tuple(line.removeprefix("ok: ") for line in done.stdout.splitlines() if line.startswith("ok: "))
    if not error and not lines:
        error = "it exercised nothing"
    return Outcome(client, error, lines, time.monotonic() - began)


def try_client(client: Client, url: str) -> Outcome:
    """Installs and runs a client."""
    try:
        folder = install(client)
    except InstallError as error:
        return Outcome(client, f"not installed: {error}", (), 0)
    if client.is_python:
        return run(client, [str(folder / "bin" / "python"), "-P", str(client.path)], url)
    # node looks for packages beside the script
    script = shutil.copy(client.path, folder)
    return run(client, ["node", script], url)


def main() -> int:
    """Tries the named clients, or all; returns the exit status."""
    known = clients()
    parser = argparse.ArgumentParser(prog="./dev test-clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = parser.parse_args().names or list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no such client: {', '.join(unknown)}; known are {', '.join(known)}")
    failed = 0
    print("| client | versions | exercised | result |\n|---|---|---|---|", flush=True)
    with ExitStack() as stack:
        files = stack.enter_context(tempfile.TemporaryDirectory())
        urls: dict[str, str] = {}
        for client in (known[name] for name in names):
            if client.server not in urls:
                server = serve(*SERVERS[client.server], "--file-storage-path", f"{files}/{client.server}")
                urls[client.server] = stack.enter_context(server).url
            outcome = try_client(client, urls[client.server])
            versions = ", ".join(f"{name} {version}" for name, version in client.versions.items())
            result = "failed" if outcome.error else f"passed in {outcome.seconds:.0f} s"
            print(f"| {client.name} | {versions} | {'; '.join(outcome.done)} | {result} |", flush=True)
            if outcome.error:
                failed += 1
                print(outcome.error, file=sys.stderr)
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
