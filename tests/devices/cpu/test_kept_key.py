"""The key of packed weights: it is another one where code or a layout that packs is another one."""

import ast
import copy
import shutil
from pathlib import Path

import pytest

from runtime.devices.cpu import kept_matrices
from runtime.devices.cpu.kernels import build
from runtime.devices.cpu.self_check import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no kernels are built")

PACKERS = {"pack", "pack_quantized", "pack_mxfp4", "packed", "pack_part"}  # functions that pack a matrix


def test_code_that_packs_is_part_of_the_key() -> None:
    root = Path(kept_matrices.runtime.__file__).parent
    sources = set(kept_matrices.packing_sources(root))
    for path in (root / "devices/cpu").glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        names = {alias.name for node in imports for alias in node.names if "cpu" in str(node.module)}
        if names & PACKERS and path.name != "self_check.py":  # which keeps nothing
            assert path in sources, path


@pytest.mark.parametrize(
    ("edited", "is_another"),
    [
        ("layers/linear.py", True),
        ("devices/cpu/matrices.py", True),
        ("models/loader.py", True),
        ("layers/sampling/sampler.py", False),
        ("devices/cpu/sampling.py", False),
        ("http/server.py", False),
    ],
)
def test_an_edit_of_code_is_another_key_where_it_may_pack(
    edited: str, is_another: bool, tmp_path: Path
) -> None:
    root, library = tmp_path / "runtime", load_library()
    assert library is not None
    shutil.copytree(
        Path(kept_matrices.runtime.__file__).parent, root, ignore=shutil.ignore_patterns("lib", "pocket")
    )
    before = kept_matrices.program_digest.__wrapped__(library, root)
    with (root / edited).open("a") as file:
        file.write("# edited")
    assert (kept_matrices.program_digest.__wrapped__(library, root) != before) is is_another


def test_another_layout_is_another_key(tmp_path: Path) -> None:
    library = load_library()
    assert library is not None
    folder = tmp_path / "kernels"
    shutil.copytree(build.FOLDER, folder, ignore=shutil.ignore_patterns("lib"))
    assert build.packing_digest(folder) == library.packing, "the kernels are not built of these sources"
    for name in build.PACKING:
        before = build.packing_digest(folder)
        with (folder / name).open("a") as file:
            file.write("// edited")
        assert build.packing_digest(folder) != before
    other = copy.copy(library)
    other.packing = build.packing_digest(folder)
    assert kept_matrices.program_digest(other) != kept_matrices.program_digest(library)
