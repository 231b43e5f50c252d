"""What a rank imports before it loads a model."""

import gc

import pytest

from runtime.errors import StartError
from runtime.ranks import open_executor
from runtime.ranks.open_executor import import_device


def test_imports_are_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while they are made nor later; what comes then is."""
    seen: list[bool] = []
    really = open_executor.import_module

    def importing(name: str) -> object:
        seen.append(gc.isenabled())
        return really(name)

    monkeypatch.setattr(open_executor, "import_module", importing)
    import_device("cpu")
    assert seen and not any(seen)
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_an_unknown_device_leaves_collections_on() -> None:
    with pytest.raises(StartError, match="unknown; choose one of cpu"):
        import_device("abacus")
    assert gc.isenabled()
