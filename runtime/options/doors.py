"""Rules on what stands at the HTTP server's doors: keys and paths."""

from collections.abc import Mapping
from typing import Any


def keys_fit_a_header(said: Mapping[str, Any]) -> str | None:
    """The keys themselves are not told."""
    for name in ("api_key", "admin_api_key"):
        keys = (said[name],) if isinstance(said[name], str) else said[name] or ()
        if any(not key or not all("!" <= char <= "~" for char in key) for key in keys):
            flag = "--" + name.replace("_", "-")
            return f"{flag} is empty, or has spaces or characters beyond ASCII, which headers can't carry; choose another key"
    return None


def root_path_is_a_path(said: Mapping[str, Any]) -> str | None:
    path = said["fastapi_root_path"]
    if path and (not path.startswith("/") or path.endswith("/")):
        return f"--fastapi-root-path {path} must begin with / and not end with it; give a path like /llm"
    return None
