"""What a rank imports before it loads a model."""

import gc
import inspect
import sys

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
    monkeypatch.setattr(open_executor, "USED_BY_STARTS", (*open_executor.USED_BY_STARTS, "colorsys"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)  # else all may be there
    import_device("cpu")
    assert seen and not any(seen)
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_what_is_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork that looked for it again would write to pages that it shares."""
    import_device("cpu")
    monkeypatch.setattr(open_executor, "import_module", None)
    import_device("cpu")


def test_an_unknown_device_leaves_collections_on() -> None:
    with pytest.raises(StartError, match="unknown; choose one of cpu"):
        import_device("abacus")
    assert gc.isenabled()


def test_places_of_frames_are_found_without_reading_sources() -> None:
    full = inspect.getframeinfo, inspect.getmodule
    with open_executor.reading_no_sources():
        frame = sys._getframe()
        info = inspect.getframeinfo(frame)
        assert (info.filename, info.lineno) == (__file__, frame.f_lineno - 1) and info.code_context is None
        assert inspect.getmodule(frame) is sys.modules[__name__]
        assert inspect.getmodule(StartError) is sys.modules["runtime.errors"]
    assert (inspect.getframeinfo, inspect.getmodule) == full
