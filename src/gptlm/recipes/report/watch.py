"""Serves the page of runs in progress, to this machine alone."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from gptlm.errors import GptlmError, named, reason_of
from gptlm.owned import RUN_LOG
from gptlm.recipes.report.page import page_of
from gptlm.recipes.report.reading import find_runs

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")  # the port is another one behind an SSH tunnel


class Pages:
    """The page of the runs in `folders`, drawn again where their files have changed."""

    def __init__(self, folders: Sequence[Path]):
        self.folders, self._drawn, self._lock = folders, ("", b""), Lock()

    def version(self) -> str:
        """Changes with every event of the runs."""
        seen = [
            f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
            for folder in self.folders
            for place in (RUN_LOG, f"*/{RUN_LOG}", "trainer_state.json", "*/trainer_state.json", "all_results.json")
            for path in sorted(folder.glob(place))
        ]
        return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        """Raises GptlmError as `find_runs` and `page_of`."""
        with self._lock:
            version = self.version()
            if self._drawn[0] != version:
                self._drawn = version, page_of(find_runs(self.folders), version=version).encode()
            return self._drawn[1]


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1; `port` 0 is any free one."""

    daemon_threads = True

    def __init__(self, pages: Pages, port: int):
        self.pages = pages
        super().__init__((ADDRESS, port), Handler)


class Handler(BaseHTTPRequestHandler):
    """Answers `/` and `/version`, to requests for this machine's own address only."""

    server: Server
    timeout = 30  # seconds for a request

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or _name_in(hosts[0]) not in NAMES:  # a name of others that points here (DNS rebinding)
            self._answer(
                HTTPStatus.FORBIDDEN, f"This page is not served at the address {', '.join(hosts) or '(none)'}."
            )
        elif self.path == "/version":
            self._answer(HTTPStatus.OK, self.server.pages.version())
        elif self.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, "There is one page here: /")
        else:
            try:
                self._answer(HTTPStatus.OK, self.server.pages.page(), "text/html")
            except (GptlmError, OSError) as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason_of(error)}.")

    def _answer(self, status: HTTPStatus, content: str | bytes, kind: str = "text/plain") -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the address and errors."""


def _name_in(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def watch(folders: Sequence[Path], port: int) -> None:
    """Serve the page of `folders` until Ctrl-C.

    Raises:
        GptlmError: if there is no run, a file of one is damaged, or the port is taken.
    """
    pages = Pages(folders)
    pages.page()
    try:
        server = Server(pages, port)
    except OSError as error:
        raise GptlmError(
            f"the page cannot listen on {ADDRESS}:{port} ({reason_of(error)}); give another {named('port')}"
        ) from error
    with server:
        print(f"the page is open at http://{ADDRESS}:{server.server_port} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
