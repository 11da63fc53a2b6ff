"""Which requests the served page answers: those that its own address sends, without files and large bodies."""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

LONGEST_BODY = 1 << 20  # bytes; the page sends a prompt and its controls
UPLOADS = ("upload", "upload_progress")  # last parts of gradio's paths

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class OwnAddress:
    """Which requests are for this machine's own address, and come from its own pages.

    Answered are requests whose `Host` is the address at which they arrive, `host`, this machine's name, or "localhost"
    where they come from this machine; the port is not compared, because it is another one behind an SSH tunnel. Names
    that other pages let point here (DNS rebinding) are none of these. An `Origin` must be equal to `Host`.

    Args:
        host: the address or name to listen at.
    """

    def __init__(self, host: str):
        machine = {socket.gethostname().lower(), socket.getfqdn().lower()} - {"localhost"}
        self.names = ({host.lower()} | machine) - {"0.0.0.0", "::", ""}

    def refusal(self, hosts: list[str], origins: list[str], arrived: str) -> str | None:
        """Why a request is not answered; None: it is.

        Args:
            hosts, origins: all its headers of these names.
            arrived: the address of this machine at which it arrived.
        """
        if len(hosts) != 1 or not self._is_own(_name_in(f"//{hosts[0]}"), arrived):
            return f"This page is not served at the address {', '.join(hosts) or '(none)'}."
        if any(origin.partition("://")[2].lower() != hosts[0].lower() for origin in origins):
            return f"Requests of other pages ({', '.join(origins)}) are not answered."
        return None

    def _is_own(self, name: str, arrived: str) -> bool:
        here = {*self.names, arrived.lower()}
        if _is_loopback(arrived):
            here |= {"localhost", "127.0.0.1", "::1"}
        return bool(name) and name in here


class OwnRequests:
    """ASGI middleware that refuses requests with a sentence: those that `OwnAddress` does, files and large bodies."""

    def __init__(self, app: App, host: str):
        self.app, self.address = app, OwnAddress(host)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # start and end of the server
            await self.app(scope, receive, send)
            return
        if reason := self._refusal(scope):
            await _refuse(scope, send, *reason)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body") or b"")
            return message if read <= LONGEST_BODY else {"type": "http.disconnect"}

        await self.app(scope, limited, send)

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        """Status and sentence for a request that is not answered."""
        hosts, origins, lengths = (_values(scope, name) for name in (b"host", b"origin", b"content-length"))
        if reason := self.address.refusal(hosts, origins, (scope.get("server") or ("",))[0]):
            return 403, reason
        if scope["path"].rstrip("/").rpartition("/")[2] in UPLOADS:
            return 403, "This page takes no files."
        if any(not length.isdigit() or len(length) > 9 or int(length) > LONGEST_BODY for length in lengths):
            return 413, f"A request has at most {LONGEST_BODY:,} bytes."
        return None


def _values(scope: Message, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _name_in(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # brackets that hold no address
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


async def _refuse(scope: Message, send: Send, status: int, sentence: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": sentence[:100]})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": sentence.encode()})
