"""Code, addresses and paths where a request has none."""

from tests.hostile.case import (
    BAD,
    CHAT,
    CLOUD,
    FORM,
    MESSAGES,
    NATIVE,
    OK,
    OK_OR_BAD,
    RESPONSES,
    TEXT,
    TRAVERSAL,
    Case,
    chat,
    content,
    dump,
    named,
    native,
    text,
    upload,
)

TEMPLATE = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}x{% endfor %}"

# Code, addresses and paths where none belong.
INJECTIONS = (
    *(
        Case(f"fetch-{name}", path, body, BAD)
        for name, path, body in (
            ("image", CHAT, content({"type": "image_url", "image_url": {"url": CLOUD}})),
            (
                "image-backslash",
                CHAT,
                content({"type": "image_url", "image_url": {"url": "http:\\\\169.254.169.254\\@x"}}),
            ),
            ("image-file", CHAT, content({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})),
            (
                "image-data",
                CHAT,
                content({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
            ),
            (
                "audio",
                CHAT,
                content({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
            ),
            ("video", CHAT, content({"type": "video_url", "video_url": {"url": CLOUD}})),
            ("file", CHAT, content({"type": "file", "file": {"file_id": TRAVERSAL}})),
            ("native-image", NATIVE, native(image_data=CLOUD)),
            ("native-video", NATIVE, native(video_data=CLOUD)),
            ("native-audio", NATIVE, native(audio_data=["file:///proc/self/environ", "http://[::1]/"])),
            ("native-image-junk", NATIVE, native(image_data=[[[CLOUD]], {"url": CLOUD}])),
            ("audio-url", CHAT, content({"type": "audio_url", "audio_url": {"url": "http://0x7f.1/"}})),
            ("image-deep", CHAT, content({"type": "image_url", "image_url": {"url": {"url": CLOUD}}})),
            (
                "response-image",
                RESPONSES,
                dump({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": CLOUD}]}]}),
            ),
            (
                "response-file",
                RESPONSES,
                dump({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": CLOUD}]}]}),
            ),
            (
                "anthropic-image",
                MESSAGES,
                named(
                    {
                        "max_tokens": 1,
                        "messages": [
                            {
                                "role": "user",
                                "content": [{"type": "image", "source": {"type": "url", "url": CLOUD}}],
                            }
                        ],
                    }
                ),
            ),
            ("ollama-image", "/api/generate", named({"prompt": "x", "images": [CLOUD]})),
            (
                "prefill-host",
                CHAT,
                chat(bootstrap_host="169.254.169.254", bootstrap_port=80, bootstrap_room=1),
            ),
            ("kv-transfer", CHAT, chat(kv_transfer_params={"remote_host": "169.254.169.254"})),
        )
    ),
    Case("code-chat-template", CHAT, chat(chat_template="{{ ''.__class__.__mro__ }}"), BAD, "chat_template"),
    Case(
        "code-pickled-processor",
        CHAT,
        chat(custom_logit_processor='{"callable": "gASVJAAAAAAAAACMBXBvc2l4"}'),
        BAD,
        "custom_logit_processor",
    ),
    Case(
        "code-processor-path",
        NATIVE,
        native(custom_logit_processor="os:system"),
        BAD,
        "custom_logit_processor",
    ),
    Case("code-prompt-embeds", TEXT, text(prompt_embeds="UEsDBAAAAAA="), BAD, "prompt_embeds"),
    Case("code-template-in-message", CHAT, chat(messages=[{"role": "user", "content": TEMPLATE}]), OK),
    *(
        Case(f"template-{name}", CHAT, chat(chat_template_kwargs=values), OK_OR_BAD)
        for name, values in {
            "messages": {"messages": "{{ x }}"},
            "functions": {"raise_exception": 1, "strftime_now": 1, "range": 1},
            "template": {"chat_template": "{{ 1 }}", "tokenize": True},
            "self": {"self": {}, "loop": [], "namespace": 1, "caller": 2},
            "dunder": {"__class__": 1, "": 2, "a b": 3},
            "end-tokens": {"eos_token": "x" * 10_000, "bos_token": 5},
        }.items()
    ),
    *(
        Case(f"path-of-adapter-{name}", CHAT, chat(lora_path=value), BAD, "lora_path")
        for name, value in {
            "traversal": TRAVERSAL,
            "nul": "a\0b",
            "device": "/dev/zero",
            "url": CLOUD,
        }.items()
    ),
    *(
        Case(f"path-of-model-{i}", CHAT, chat(model=value), (404,))
        for i, value in enumerate((TRAVERSAL, "/dev/zero", "a\0b", "x" * 10_000))
    ),
    *(
        Case(f"path-{name}", "/" + path, b"", status, method="GET")
        for name, path, status in (
            ("file-traversal", "v1/files/..%2f..%2f..%2fetc%2fpasswd/content", (404,)),
            ("file-plain-traversal", "v1/files/../../../etc/passwd/content", (404,)),
            ("file-nul", "v1/files/%00", (404,)),
            ("file-no-utf-8", "v1/files/%ff%fe", (404,)),
            ("file-long", "v1/files/" + "x" * 5000, (404,)),
            ("response-traversal", "v1/responses/" + TRAVERSAL.replace("/", "%2f"), (404,)),
            ("batch-dots", "v1/batches/..", (404,)),
            ("conversation-traversal", "v1/conversations/" + TRAVERSAL.replace("/", "%2f"), (404,)),
            ("conversation-item-nul", "v1/conversations/conv_0/items/%00", (404,)),
            ("message-batch-traversal", "v1/messages/batches/..%2f..%2flock/results", (404,)),
            ("message-batch-no-utf-8", "v1/messages/batches/%ff%fe", (404,)),
            ("model-traversal", "v1/models/" + TRAVERSAL, (404,)),
            ("double-slash", "/v1/models", (404,)),
            ("docs-traversal", "docs/../../runtime/http/auth.py", (404,)),
            ("percent", "%", (400, 404)),
            ("fragment", "v1/models#x", (200, 400, 404)),
            ("unicode", "v1/m\u00f6dels", (400, 404)),
        )
    ),
    *(
        Case(f"upload-{name}", "/v1/files", body, status, headers={"content-type": FORM})
        for name, body, status in (
            ("no-form", b"x", BAD),
            ("no-end", upload("x").removesuffix(b"--\r\n"), OK_OR_BAD),
            (
                "no-file",
                upload("x").split(b'--b\r\ncontent-disposition: form-data; name="file"')[0] + b"--b--\r\n",
                BAD,
            ),
            ("nested-form", upload("x", upload("y")), OK_OR_BAD),
            ("purpose-junk", upload("x", purpose="../../x"), OK_OR_BAD),
            ("1000-parts", upload("x") * 1000, (400, 413)),
        )
    ),
    Case(
        "upload-part-head-without-end",
        "/v1/files",
        lambda: b"--b\r\ncontent-disposition: " + b"x" * 10**6,
        BAD,
        headers={"content-type": FORM},
    ),
    Case(
        "upload-without-boundary",
        "/v1/files",
        upload("x"),
        BAD,
        headers={"content-type": "multipart/form-data"},
    ),
)
