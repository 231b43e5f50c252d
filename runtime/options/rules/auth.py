"""Rules on what stands at the server's doors: keys and paths, and which doors there are."""

from collections.abc import Mapping
from typing import Any

from runtime.options.table import by_name

# what only HTTP has: web pages, proxies, files, metrics, chats and other routes that gRPC does not serve
HTTP_ONLY = (
    "fastapi_root_path",
    "cors_origins",
    "file_storage_path",
    "stream_interval",
    "stream_output",
    "enable_cache_report",
    "chat_template",
    "hf_chat_template_name",
    "completion_template",
    "reasoning_parser",
    "tool_call_parser",
    "sampling_defaults",
    "multi_item_scoring_delimiter",
    "ssl_keyfile_password",
)


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


def grpc_serves_no_http(said: Mapping[str, Any]) -> str | None:
    """What would do nothing is not taken in silence."""
    table = by_name()
    idle = [table[name].flag for name in HTTP_ONLY if said["grpc_mode"] and said[name] != table[name].default]
    return f"{', '.join(idle)}: no effect on gRPC; leave that out, or --grpc-mode" if idle else None
