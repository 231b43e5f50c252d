"""Which addresses and URLs a client may name."""

from ipaddress import ip_address

import pytest

from runtime.errors import InvalidRequest
from runtime.media.addresses import is_allowed, is_public
from runtime.media.url import Target, data_of, file_path, redirected, target_of


@pytest.mark.parametrize("text", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(text: str) -> None:
    assert is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "0.1.2.3", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
        *("198.18.0.1", "192.0.0.8", "::", "::1", "fe80::1", "fc00::1", "fd12::1", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "64:ff9b::7f00:1"),
        *(
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "::127.0.0.1",
            "2001:db8::1",
        ),
        "2001:0:4136:e378:8000:63bf:f5ff:fffe",  # Teredo of 10.0.0.1
    ],
)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))
    assert not is_allowed(text, "example.com", frozenset())


def test_a_host_that_is_named_may_be_private_but_no_metadata_service() -> None:
    named = frozenset({"files.corp", "169.254.1.1"})
    assert is_allowed("10.0.0.1", "files.corp", named) and is_allowed("127.0.0.1", "files.corp", named)
    for text in ("169.254.169.254", "fe80::1%eth0", "::ffff:169.254.169.254", "0.0.0.0", "224.0.0.1"):
        assert not is_allowed(text, "files.corp", named), text
    assert is_allowed("169.254.1.1", "169.254.1.1", named)
    assert not is_allowed("10.0.0.1", "other.corp", named)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://Example.COM/a?b=c#d", Target("http", "example.com", 80, "/a?b=c")),
        ("https://example.com.:8443", Target("https", "example.com", 8443, "/")),
        ("HTTP://[2606:4700::1]/x", Target("http", "2606:4700::1", 80, "/x")),
    ],
)
def test_targets(url: str, target: Target) -> None:
    assert target_of(url, "url") == target


def test_the_host_header() -> None:
    assert target_of("https://a.b:443/", "x").authority == "a.b"
    assert target_of("http://[::1]:81/", "x").authority == "[::1]:81"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "ftp://example.com/",
            "gopher://example.com",
            "http:///x",
            "http://",
            "//example.com",
            "example.com",
        ),
        *("http://user:key@example.com/", "http://user@example.com/", "http:\\\\169.254.169.254\\@x"),
        *(
            "http://a b/",
            "http://a/\r\nHost: b",
            "http://a:99999/",
            "http://a:b/",
            "http://[::1/",
            "http://ü/",
        ),
        *("http://" + "a" * 9000, "http://a/\t", "javascript:alert(1)", "data:image/png;base64,AAAA"),
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        target_of(url, "messages[0].content[1].image_url")
    assert caught.value.param == "messages[0].content[1].image_url"


def test_redirects_are_joined() -> None:
    assert redirected("http://a/b/c", "../d", "x") == "http://a/d"
    assert redirected("http://a/b", "//c/d", "x") == "http://c/d"
    with pytest.raises(InvalidRequest):
        redirected("http://a", "http://[", "x")


def test_files_and_data() -> None:
    assert file_path("file:///a/b%20c", "x") == "/a/b c"
    for url in ("file://host/a", "file:a", "file:///a%00b", "file:///a\\b"):
        with pytest.raises(InvalidRequest):
            file_path(url, "x")
    assert data_of("data:image/png;base64,AAAA", "x") == 22
    for url in ("data:image/png,AAAA", "data:;base64", "data:" + "x" * 2000 + ";base64,A"):
        with pytest.raises(InvalidRequest, match="base64"):
            data_of(url, "x")
