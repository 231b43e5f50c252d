"""Hostile queries, headers, methods and keys, and what administrators' requests say wrong."""

from tests.hostile.case import ADMIN_KEY, BAD, CHAT, OK, OK_OR_BAD, USER_KEY, Case, chat, dump

# Query strings, headers and methods.
HEADERS = (
    *(
        Case(f"query-{name}-{value[:12]}", f"/v1/files?{name}={value}", b"", status, method="GET")
        for name, values, status in (
            ("limit", ("-1", "0", "x", "%C2%B2", "9" * 5000, "1e3", "%00", "1" + "0" * 30), BAD),
            ("after", ("%00", "..%2f..", "%ff", "x" * 5000), (200, 400, 404)),
            ("order", ("x", "%00"), OK_OR_BAD),
            ("purpose", ("%00", "x"), OK_OR_BAD),
        )
        for value in values
    ),
    Case("query-10000-fields", "/v1/models?" + "a=1&" * 10_000, b"", (200, 400, 414, 431), method="GET"),
    Case("header-70000-bytes", "/v1/models", b"", (431,), method="GET", headers={"x": "y" * 70_000}),
    Case(
        "header-3000-of-them",
        "/v1/models",
        b"",
        (200, 431),
        method="GET",
        headers={f"x-{i}": "y" for i in range(3_000)},
    ),
    *(
        Case(f"header-{name}-{value[:12]!r}", CHAT, chat(), status, headers={name: value})
        for name, value, status in (
            ("x-request-timeout", "nan", BAD),
            ("x-request-timeout", "-1", BAD),
            ("x-request-timeout", "1e999", BAD),
            ("x-queue-timeout", "x", BAD),
            ("x-queue-timeout", "9" * 5000, BAD),
            ("x-tenant-id", "x" * 5000, OK_OR_BAD),
            ("x-routing-key", "x" * 5000, BAD),
            ("x-request-id", "x" * 5000, OK),
            ("x-request-id", "a\tb\x01", (200, 400)),
            ("x-request-id", "\u00e9\u4f60", OK),
            ("accept-encoding", "gzip, " * 1000, OK),
            ("accept", "x" * 5000, OK),
            ("range", "bytes=0-1," * 100, OK),
            ("cookie", "a=b; " * 5000, OK),
            ("expect", "200-maybe", (200, 417)),
        )
    ),
    *(
        Case(f"method-{method}", CHAT, b"", (400, 404, 405, 501), method=method)
        for method in ("GET", "PUT", "DELETE", "TRACE", "PATCH", "PROPFIND", "BREW")
    ),
)

# Keys and what they do not open.
KEYS = (
    Case("key-none", CHAT, chat(), (401,), key=None),
    Case("key-wrong", CHAT, chat(), (401,), key="x"),
    Case("key-almost", CHAT, chat(), (401,), key=USER_KEY[:-1]),
    Case("key-long", CHAT, chat(), (401,), key="x" * 30_000),
    Case("key-no-ascii", CHAT, chat(), (401,), key="\u00e9"),
    Case("key-basic", CHAT, chat(), (401,), key=None, headers={"authorization": "Basic " + USER_KEY}),
    Case("key-in-query", f"/v1/models?api_key={USER_KEY}", b"", (401,), method="GET", key=None),
    *(
        Case(f"key-of-user-{path}", path, b"{}", (401, 403))
        for path in (
            "/flush_cache",
            "/pause_generation",
            "/abort_request",
            "/start_profile",
            "/load_lora_adapter",
            "/update_weights_from_disk",
            "/release_memory_occupation",
            "/dump_expert_distribution_record",
        )
    ),
)

# What administrators' requests say wrong. The key is right.
ADMINS = (
    *(
        Case(
            f"admin-adapter-{name}",
            "/load_lora_adapter",
            dump({"lora_name": "x", "lora_path": path}),
            BAD,
            key=ADMIN_KEY,
        )
        for name, path in {
            "none": "/none",
            "nul": "/tmp/\0",
            "surrogate": "/tmp/\ud800",
            "device": "/dev/zero",
            "proc": "/proc/self",
            "long": "/" + "x" * 5000,
            "empty": "",
        }.items()
    ),
    Case("admin-adapter-unknown", "/unload_lora_adapter", dump({"lora_name": "\0"}), BAD, key=ADMIN_KEY),
    *(
        Case(
            f"admin-weights-{name}",
            "/update_weights_from_disk",
            dump({"model_path": path}),
            key=ADMIN_KEY,
            needs_model=True,
        )
        for name, path in {"none": "/none", "nul": "/tmp/\0", "device": "/dev/zero"}.items()
    ),
    Case(
        "admin-experts-path",
        "/dump_expert_distribution_record",
        dump({"output_dir": "/proc/x"}),
        OK_OR_BAD,
        key=ADMIN_KEY,
    ),
    Case("admin-pause-junk", "/pause_generation", dump({"mode": "forever"}), BAD, key=ADMIN_KEY),
    Case(
        "admin-release-junk", "/release_memory_occupation", dump({"tags": ["x"] * 1000}), BAD, key=ADMIN_KEY
    ),
)
