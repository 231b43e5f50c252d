"""The name under which the package is installed: `runtime` is the import and the command, `runtime-serve` the
distribution, for PyPI has another package of the name `runtime`."""

NAME = "runtime-serve"


def install_line(extra: str) -> str:
    """The command that installs what an optional feature needs, for errors and remedies."""
    return f"pip install '{NAME}[{extra}]'"

