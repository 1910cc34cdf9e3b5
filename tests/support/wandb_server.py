"""Stands in for W&B's server, for the real client.

W&B's own server cannot be reached from a test. This one is written from the requests of the client
and from W&B's documentation, and assumes of the real one that lines of the history are stored at
the offset that the client names, and that a client which resumes a run is told what is stored.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_STREAM = re.compile(r"/files/[^/]*/[^/]+/([^/]+)/file_stream")
_HISTORY, _SUMMARY = "wandb-history.jsonl", "wandb-summary.json"
_ENTITY = {"id": "e", "name": "team"}


class WandbServer:
    """Its runs by id; they stay while it is down."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        kind = type("Handler", (_Handler,), {"runs": self.runs})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), kind)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history of the only run; asked of the server, so that other processes can."""
        with urllib.request.urlopen(f"{self.address}/rows", timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    runs: dict[str, dict[str, Any]]
    guard = threading.Lock()

    def handle(self) -> None:
        # A client that is killed resets its connections.
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        with self.guard:
            lines = [line for run in self.runs.values() for line in run["history"]]
            self._reply([json.loads(line) for line in lines])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        stream = _STREAM.fullmatch(self.path)
        # No client stays connected while the server is down.
        self.close_connection = True
        with self.guard:
            if self.path == "/graphql":
                self._reply({"data": self._answer(json.loads(body))})
            elif stream:
                self._take(self.runs[stream[1]], json.loads(body))
                self._reply({"limits": {}})
            else:
                # How often the client's features are used.
                self._reply({})

    def _take(self, run: dict[str, Any], lines: dict[str, Any]) -> None:
        files = lines.get("files") or {}
        if _HISTORY in files:
            offset, content = files[_HISTORY]["offset"], files[_HISTORY]["content"]
            assert offset <= len(run["history"]), "a client has left lines out"
            run["history"][offset : offset + len(content)] = content
        if _SUMMARY in files:
            run["summary"] = files[_SUMMARY]["content"][-1]

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        (query, *_) = re.findall(r"(?:query|mutation)\s*(\w+)", asked["query"])
        given = asked.get("variables") or {}
        if query == "UpsertBucket":
            is_new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], {"history": [], "summary": "{}"})
            run["config"] = given.get("config") or run.get("config", "{}")
            bucket = self._describe(given["name"], given["project"])
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if query == "RunResumeStatus":
            is_there = given["name"] in self.runs
            bucket = self._describe(given["name"], given["project"]) if is_there else None
            return {
                "model": {"id": "p", "name": given["project"], "entity": _ENTITY, "bucket": bucket}
            }
        if query == "CreateRunFiles":
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": []}}
        user = {"id": "u", "entity": "team", "username": "team", "email": "", "flags": "{}"}
        return {"viewer": {**user, "teams": {"edges": [{"node": {"name": "team"}}]}}}

    def _describe(self, name: str, project: str) -> dict[str, Any]:
        run = self.runs[name]
        return {
            "id": name,
            "name": name,
            "displayName": name,
            "config": run["config"],
            "summaryMetrics": run["summary"],
            "historyLineCount": len(run["history"]),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps(run["history"][-1:]),
            "eventsTail": "[]",
            "wandbConfig": json.dumps({"t": 1}),
            "tags": [],
            "project": {"id": "p", "name": project, "entity": _ENTITY},
        }

    def _reply(self, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Write nothing."""
