"""What an NPU answers to the right and wrong calls of calls*.py: `python -m tests.ascend.answers FILE`, which
`runtime check doctor --device npu --record FILE` runs.

FILE is a fixture for test_answers.py, which says where a real CANN disagrees with the tables. It has a line
of JSON for the machine and one for each call. Calls are made by a process of their own: one that breaks its
device, or dies, is written down, and another process goes on after it. Calls that are wrong because of values
in device memory are left out on a real device, whose kernels do not check them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# wrong because of values: page ids, slots, experts, lengths of groups. Parts of reasons.
VALUES = (
    "slot lies outside",
    "pages .* in a cache of 4",
    "points outside",
    "outside 0 .. 1",
    "outside 0 .. 3",
    "outside 0 .. 5",
    "outside 1 .. 1024",
    "outside -1 .. 5",
    "below 0",
    "for 6 rows",
    "upper half",
    "ends at",
)
BROKEN = 3  # exit status of a process whose device can do no more


def calls() -> Iterator[tuple[Any, int | None]]:
    """Each case with its right call (None) and with its wrong ones."""
    from tests.ascend.calls import ATTENTION, CACHE, NORMS, SAMPLING
    from tests.ascend.calls_latents import LATENTS
    from tests.ascend.calls_linears import EXPERTS, LINEARS
    from tests.ascend.calls_tiling import TILING

    is_simulated = "SIM_CANN_LIBRARIES" in os.environ
    for case in (*ATTENTION, *CACHE, *NORMS, *SAMPLING, *LINEARS, *EXPERTS, *LATENTS, *TILING):
        yield case, None
        for at, (reason, _) in enumerate(case.wrong):
            if is_simulated or reason not in VALUES:
                yield case, at


def described(case: Any, at: int | None) -> dict[str, Any]:
    """How a line names a call. `wrong`: a part of the reason; None: the call is right."""
    return {"operator": case.name, "wrong": None if at is None else case.wrong[at][0], "source": case.source}


def answer(case: Any, at: int | None) -> tuple[str, str]:
    """taken, refused (when it was called) or failed (on the device), and the first line of the message."""
    import torch

    try:
        case.call({} if at is None else case.wrong[at][1]())
    except Exception as error:  # whatever a library raises is its answer
        return "refused", f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        return "failed", str(error).partition("\n")[0]
    return "taken", ""


def call_from(first: int) -> int:
    """Calls all from that number on, and prints a line for each. Returns an exit status."""
    import torch
    import torch_npu

    assert torch_npu  # brings the operators
    torch.npu.config.allow_internal_format = True
    for number, (case, at) in enumerate(calls()):
        if number >= first:
            found, message = answer(case, at)
            print(json.dumps(described(case, at) | {"answer": found, "message": message}), flush=True)
            if found == "failed":
                return BROKEN
    return 0


def machine() -> dict[str, Any]:
    """The NPU and the versions of what answers."""
    import torch_npu

    home = Path(os.environ.get("ASCEND_HOME_PATH", ""))
    infos = [path.read_text() for path in sorted(home.glob("*/ascend_toolkit_install.info"))]
    return {
        "npu": torch_npu.npu.get_device_name(),
        "torch_npu": torch_npu.__version__,
        "cann": infos[0].split() if infos else [],
        "is_simulated": "SIM_CANN_LIBRARIES" in os.environ,
    }


def child(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs this module in a process of its own; what goes wrong there is seen on stderr."""
    return subprocess.run(
        [sys.executable, "-m", "tests.ascend.answers", *words], stdout=subprocess.PIPE, text=True
    )


def record(file: Path) -> None:
    """Writes the fixture. Raises RuntimeError if there is no NPU to ask."""
    about = child("--machine")
    if about.returncode:
        raise RuntimeError("torch_npu finds no NPU: see what it said above")
    names = child("--names").stdout.splitlines()
    lines: list[str] = []
    while len(lines) < len(names):
        ended = child("--from", str(len(lines)))
        made = ended.stdout.splitlines()
        lines += made
        if ended.returncode not in (0, BROKEN) and len(lines) < len(names):
            died = json.loads(names[len(lines)]) | {"answer": "died", "message": f"status {ended.returncode}"}
            lines.append(json.dumps(died))
        elif not made:
            raise RuntimeError("a process ended well without a call: see what it said above")
    file.write_text("\n".join([about.stdout.strip(), *lines]) + "\n")
    print(f"{file}: {len(lines)} calls; {len(disagreements(file))} answers are not those of the tables")


def disagreements(file: Path) -> list[dict[str, Any]]:
    """The answers of a fixture that are not those of the tables: right calls that are not taken, and wrong
    ones that are. What only the emulation refuses counts for nothing."""
    answers = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    return [
        given
        for given in answers
        if (given["wrong"] is None) != (given["answer"] == "taken")
        and "emulated" not in (given["wrong"] or "")
    ]


def main(words: list[str]) -> int:
    """Runs one of the forms."""
    if words == ["--machine"]:
        print(json.dumps(machine()))
    elif words == ["--names"]:
        for case, at in calls():
            print(json.dumps(described(case, at)))
    elif words[:1] == ["--from"]:
        return call_from(int(words[1]))
    else:
        record(Path(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
