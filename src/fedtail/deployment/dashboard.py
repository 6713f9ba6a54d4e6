"""A page about a deployment for a browser on the same machine: read only, live, without anything from elsewhere.

It listens on 127.0.0.1 and answers GET for four paths. A request that names another host is refused, so that a page of somebody
else whose name was pointed at this machine reads nothing; so is one that a page of another origin makes. What nodes said reaches
the page as JSON and is shown as text, never as markup, and the policy in the headers lets nothing else run.
"""

from __future__ import annotations

import json
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedtail.deployment.deployment_state import DeploymentState
from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.runs.files import to_json_values

HERE = Path(__file__).parent
LOOK = HERE.parent / "report" / "page.css"
HOSTS = ("127.0.0.1", "localhost")
ELSEWHERE = b"This page is for a browser on the same machine: open it at 127.0.0.1.\n"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
                               "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin"}


class DashboardServer:
    """Serves the page about one deployment until it is closed."""

    def __init__(self, folder: DeploymentFolder, port: int = 0):
        """Listen at `port` of 127.0.0.1 (0: any that is free), for the deployment in `folder`."""
        state = DeploymentState(folder)

        class Page(Handler):
            """Answers about this deployment."""

            source = state

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Page)
        self._server.daemon_threads = True

    def __enter__(self) -> DashboardServer:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self._server.server_close()

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self._server.server_address[1])

    def serve(self) -> None:
        """Answer requests until `stop` is called, in another thread, or the process is interrupted."""
        self._server.serve_forever()

    def stop(self) -> None:
        """End `serve`."""
        self._server.shutdown()


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page, its look, its script and the state; 404, 403 or 501 to everything else."""

    source: DeploymentState
    server_version, sys_version = "fedtail", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a GET request."""
        if not self._is_for_here():
            self._reply(HTTPStatus.FORBIDDEN, "text/plain", ELSEWHERE)
            return
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")
            return
        if asked.path == "/state.json":
            run = parse_qs(asked.query).get("run", [""])[0]
            self._reply(HTTPStatus.OK, "application/json", json.dumps(to_json_values(self.source.read(run))).encode())
        elif asked.path in files():
            kind, content = files()[asked.path]
            self._reply(HTTPStatus.OK, kind, content)
        else:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")

    do_HEAD = do_GET

    def _is_for_here(self) -> bool:
        """Whether the request names this machine as its host, and no page of another origin made it."""
        hosts, site = self.headers.get_all("Host") or [], self.headers.get("Sec-Fetch-Site", "none")
        return len(hosts) == 1 and hosts[0].partition(":")[0] in HOSTS and site in ("same-origin", "none")

    def _reply(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        """Send an answer with the headers of every answer; its content only for GET."""
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write nothing about requests."""


@cache
def files() -> dict[str, tuple[str, bytes]]:
    """The kind and content of what is served beside the state, by path."""
    look = LOOK.read_bytes() + (HERE / "dashboard.css").read_bytes()
    return {"/": ("text/html", (HERE / "dashboard.html").read_bytes()), "/dashboard.css": ("text/css", look),
            "/dashboard.js": ("text/javascript", (HERE / "dashboard.js").read_bytes())}
