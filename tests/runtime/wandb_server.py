"""As much of a W&B server as an online run asks for, on this machine: it keeps what it is sent."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "someone"


class WandbServer(ThreadingHTTPServer):
    """`runs`: what the run was registered with, each time. `rows`: its history. `files`: names of what was uploaded."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.files: set[str] = set()
        self.keys: set[str] = set()

    def graphql(self, operation: str, words: dict[str, Any]) -> dict[str, Any]:
        """The answer to a query or mutation of that name."""
        if operation == "UpsertBucket":
            self.runs.append(words)
            project = {"id": "1", "name": words["project"], "entity": {"id": "1", "name": ENTITY}}
            bucket = {"id": "1", "name": words["name"], "displayName": words["displayName"], "config": "{}"}
            return {"upsertBucket": {"bucket": {**bucket, "project": project, "historyLineCount": 0}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in words["files"]]
            return {"createRunFiles": {"runID": words["run"], "uploadHeaders": [], "files": files}}
        return {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """wandb's process closes its connections when it ends."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def streamed(self, files: dict[str, Any]) -> None:
        """Lines of the run's files, as they come."""
        self.rows += [json.loads(line) for line in files.get("wandb-history.jsonl", {}).get("content", ())]


class Answer(BaseHTTPRequestHandler):
    """One connection of wandb's own process."""

    protocol_version = "HTTP/1.1"
    server: WandbServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def answer(self) -> None:
        """To whatever was asked: JSON."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        made: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            self.server.keys.add(self.headers.get("authorization", ""))
            made = {"data": self.server.graphql(asked.get("operationName") or "", asked["variables"])}
        elif self.path.endswith("/file_stream"):
            self.server.streamed(json.loads(body).get("files") or {})
        elif self.path.startswith("/upload/"):
            self.server.files.add(self.path.removeprefix("/upload/"))
        text = json.dumps(made).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = answer  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Silence."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server that answers while the block runs."""
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
