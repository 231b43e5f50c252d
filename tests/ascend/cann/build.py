"""Builds the libraries that torch_npu needs from CANN, for a machine without it: `build()` gives the folder.

Every symbol that the wheel's own libraries need and that neither torch, libc nor the wheel defines must come
from CANN or NNAL (about 190). The C files implement, in host memory, those that matter; an assembly stub that
returns 0 stands for each of the others, so a name that a newer wheel adds cannot break the import. The
operator library gets a stub for each aclnn name that the wheel mentions.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCES = ("runtime.c", "streams.c", "hccl.c")
CORE = "ascendcl"  # holds every symbol; the others link to it
LINKED = (
    "hccl",
    "acl_op_compiler",
    "ge_runner",
    "graph",
    "acl_tdt_channel",
    "fmk_parser",
    "ascend_protobuf",
    "atb",
)
OPENED = ("nnopbase",)  # opened by name when first needed
SYSTEM_FOLDERS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib/aarch64-linux-gnu",
)
SYSTEM_NAMES = (
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
)
RETURN_0 = {"x86_64": "xorl %eax, %eax; ret", "aarch64": "mov x0, #0; ret"}


def run(*command: object) -> str:
    """Standard output of a command; raises if it fails."""
    return subprocess.run(
        [str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def package(name: str) -> Path:
    """The folder of an installed Python package."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"{name} is not installed in {sys.prefix}; ./dev test-ascend makes an environment that has it"
        )
    return Path(spec.submodule_search_locations[0])


def symbols(library: Path, *flags: str) -> Iterator[tuple[str, str]]:
    """Kind and name, without version, of dynamic symbols."""
    for line in subprocess.run(
        ["nm", "-D", *flags, str(library)], check=False, capture_output=True, text=True
    ).stdout.splitlines():
        kind, name = line.split()[-2:]
        yield kind, name.split("@")[0]


def missing_symbols(libraries: list[Path], torch: Path) -> set[str]:
    """Symbols that these libraries need and no installed library defines."""
    system = [
        path for folder in SYSTEM_FOLDERS for name in SYSTEM_NAMES if (path := Path(folder, name)).exists()
    ]
    python = [Path(sys.executable).resolve(), *Path(sys.base_prefix, "lib").glob("libpython3*.so*")]
    known = [*sorted((torch / "lib").glob("*.so*")), *system, *python, *libraries]
    defined = {name for library in known for _, name in symbols(library, "--defined-only")}
    # w may stay open
    wanted = {
        name for library in libraries for kind, name in symbols(library, "--undefined-only") if kind == "U"
    }
    return wanted - defined


def texts(library: Path, pattern: bytes) -> list[str]:
    """Whole strings in a library that match."""
    return sorted(
        {found.decode() for found in re.findall(rb"\0(" + pattern + rb")(?=\0)", library.read_bytes())}
    )


def optional_symbols(core: Path) -> set[str]:
    """Functions that torch_npu looks up by name and that may return 0 with nothing to report: setters and
    destroyers. Getters are written out in runtime.c; torch_npu names one that is absent when it is called."""
    return set(
        texts(
            core,
            rb"(?:aclrt|aclmdl|aclop|acl)(?:Ctx)?"
            rb"(?:Set|Reset|Destroy|Unuse|Use|DeviceEnable|DeviceDisable)[A-Za-z0-9]*",
        )
    )


def link(out: Path, name: str, *inputs: object) -> None:
    """Links a shared library lib<name>.so in `out`."""
    run(
        "gcc",
        "-O1",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-pthread",
        f"-Wl,-soname,lib{name}.so",
        "-o",
        out / f"lib{name}.so",
        *inputs,
    )


def link_to_core(out: Path, name: str, source: str) -> None:
    """Links a library of this C source that needs the core library."""
    path = out / f"{name}.c"
    path.write_text(source)
    link(out, name, path, f"-L{out}", "-Wl,--no-as-needed", f"-l{CORE}", "-Wl,-rpath,$ORIGIN")


def stub(name: str) -> str:
    """Assembly of a function that returns 0, or of a C++ table."""
    if name.startswith(("_ZTV", "_ZTI", "_ZTS")):  # C++ tables are data, not code
        head = f".data; .globl {name}; .type {name},@object; .size {name},256; .balign 16"
        return f"{head}; {name}: .zero 256; .text"
    return f".globl {name}; .type {name},@function; {name}: {RETURN_0[os.uname().machine]}"


def build_core(out: Path, missing: set[str]) -> set[str]:
    """Returns the names that are implemented."""
    objects, implemented = [], set()
    for source in SOURCES:
        objects.append(out / f"{source}.o")
        run("gcc", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-c", "-o", objects[-1], HERE / source)
        implemented |= {
            line.split()[-1] for line in run("nm", "--defined-only", "-g", objects[-1]).splitlines()
        }
    rest = out / "rest.S"
    rest.write_text(
        "\n".join(
            [".text", *map(stub, sorted(missing - implemented)), '.section .note.GNU-stack,"",@progbits', ""]
        )
    )
    link(out, CORE, *objects, rest, "-lrt")
    return implemented


def build_into(out: Path, wheel: Path) -> None:
    """Builds all simulated libraries for this wheel of torch_npu in `out`."""
    core = wheel / "lib" / "libtorch_npu.so"
    libraries = sorted(wheel.rglob("*.so"))
    implemented = build_core(out, missing_symbols(libraries, package("torch")) | optional_symbols(core))
    needed = {
        name
        for path in libraries
        for name in re.findall(r"NEEDED.*\[lib(.+?)\.so", run("readelf", "-d", path))
    }
    for name in (*(name for name in LINKED if name in needed), *OPENED):
        link_to_core(
            out,
            name,
            "extern int aclInit(const char *);\nvoid *cann_keep(void) { return (void *)aclInit; }\n",
        )
    operators = ["extern int cann_operator(const char *);"]
    for name in texts(core, rb"aclnn[A-Z][A-Za-z0-9_]+"):
        if name not in implemented:  # an operator is two calls; the first one counts
            asks = name.removesuffix("GetWorkspaceSize")
            answer = "0" if asks == name else f'cann_operator("{asks}")'
            operators.append(f"int {name}(void) {{ return {answer}; }}")
    link_to_core(out, "opapi", "\n".join(operators) + "\n")
    for part in ("opp/vendors", "runtime", "compiler"):  # torch_npu checks that these exist
        (out / "home" / part).mkdir(parents=True)


def build() -> Path:
    """The folder of the libraries, for this wheel and these sources; made once."""
    wheel = package("torch_npu")
    key = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in (*SOURCES, "build.py")))
    key.update((wheel / "version.py").read_bytes() + str(wheel).encode())
    out = ROOT / "build" / f"cann-{key.hexdigest()[:12]}"
    if not out.exists():
        if not shutil.which("gcc") or not shutil.which("nm"):
            raise SystemExit("the simulated CANN libraries need gcc and binutils (apt install gcc)")
        out.parent.mkdir(exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=out.parent))
        build_into(fresh, wheel)
        try:
            fresh.rename(out)
        except OSError:  # another process was first
            shutil.rmtree(fresh)
    return out
