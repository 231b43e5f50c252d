"""The example of docs/architecture.md, SmolLM 3, is what the registry has: each of its lines stands in the
source, so that who follows the page writes what works. test_llama.py runs the family itself."""

import re
from pathlib import Path

import runtime

SOURCE = Path(runtime.__file__).parent / "models" / "config"
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_each_line_stands_in_the_source() -> None:
    found = re.search(r"```python\n(\"SmolLM3\".*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, "the page has no example of a family"
    lines = [line.strip() for line in found[1].splitlines() if line.strip()]
    known = {
        line.strip()
        for name in ("registry.py", "families.py")
        for line in (SOURCE / name).read_text().splitlines()
    }
    assert len(lines) > 10 and [line for line in lines if line not in known] == []
