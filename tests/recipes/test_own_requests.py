"""Which requests the served page answers, without gradio."""

import asyncio

import pytest

from gptlm.recipes.common.own_requests import LONGEST_BODY, OwnRequests


def answer(*, host=("127.0.0.1:7860",), arrived="127.0.0.1", listens="127.0.0.1", path="/config", body=b"", **headers):
    """Status, text and the number of bytes that the page behind the middleware got."""
    sent, got = [], []

    async def page(scope, receive, send):
        while (message := await receive())["type"] == "http.request":
            got.append(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})

    pieces = [body[start : start + (1 << 16)] for start in range(0, len(body), 1 << 16)] or [b""]

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message):
        sent.append(message)

    pairs = [(b"host", value.encode()) for value in host]
    pairs += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": pairs, "server": (arrived, 7860)}
    asyncio.run(OwnRequests(page, listens)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"].decode(), len(b"".join(got))


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:8080", "LOCALHOST", "[::1]:7860"])
def test_own_addresses_are_answered(host):
    assert answer(host=[host])[:2] == (200, "page")
    assert answer(host=[host], origin=f"http://{host}")[:2] == (200, "page")


def test_a_page_that_listens_everywhere_is_answered_at_the_address_of_the_request():
    assert answer(host=["10.0.0.5:7860"], arrived="10.0.0.5", listens="0.0.0.0")[0] == 200
    assert answer(host=["box.lan:7860"], arrived="10.0.0.5", listens="box.lan")[0] == 200
    for other in ("10.0.0.6", "localhost", "0.0.0.0", "evil.example"):
        assert answer(host=[other], arrived="10.0.0.5", listens="0.0.0.0")[0] == 403


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example:7860"],
        ["127.0.0.1.evil.example"],
        ["evil.example@127.0.0.1x"],
        ["[::1"],
        [""],
        [],
        ["localhost"] * 2,
    ],
)
def test_other_hosts_are_refused_in_a_sentence(hosts):
    status, text, got = answer(host=hosts)
    assert status == 403 and text.startswith("This page is not served at the address ") and got == 0


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://localhost:7860", "http://127.0.0.1:1"])
def test_other_origins_are_refused(origin):
    assert answer(origin=origin)[0] == 403
    assert answer(origin="http://127.0.0.1:7860")[0] == 200


@pytest.mark.parametrize(
    "path", ["/upload", "/gradio_api/upload", "/gradio_api/upload/", "/gradio_api/upload_progress"]
)
def test_files_are_refused(path):
    assert answer(path=path, body=b"x") == (403, "This page takes no files.", 0)


def test_bodies_are_limited_with_and_without_a_length():
    whole = b"x" * LONGEST_BODY
    assert answer(body=whole, content_length=str(len(whole)))[::2] == (200, len(whole))
    assert answer(body=whole + b"x", content_length=str(len(whole) + 1))[::2] == (413, 0)
    assert answer(body=b"", content_length="9" * 5000)[0] == 413
    assert answer(body=whole * 3)[2] <= LONGEST_BODY


def test_websockets_of_others_are_closed_and_the_start_passes():
    sent, passed = [], []

    async def send(message):
        sent.append(message)

    async def page(scope, receive, send):
        passed.append(scope["type"])

    guard = OwnRequests(page, "127.0.0.1")
    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"evil.example")], "server": ("127.0.0.1", 1)}
    asyncio.run(guard(scope, None, send))
    asyncio.run(guard({"type": "lifespan"}, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"] and passed == ["lifespan"]
