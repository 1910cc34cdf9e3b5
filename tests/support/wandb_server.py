"""Stands in for W&B's server, for the real client: what that asks, kept in a folder.

W&B's own server cannot be reached from a test. This one is written from the requests of the client
and from W&B's documentation, and assumes of the real one that

- lines of the history are stored at the offset that the client names, so a line that is sent again
  replaces itself;
- what it says of a run to a client that resumes it comes from what it has stored;
- a file that is uploaded again replaces the earlier one.

Run it as ``python -m tests.support.wandb_server FOLDER PORT``. What it has stored survives a kill.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ENTITY = "team"
_STREAM = re.compile(r"/files/([^/]*)/([^/]+)/([^/]+)/file_stream")
_HISTORY, _SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


class Runs:
    """The runs of a server: ``runs.json``, and a folder of files for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.path = folder / "runs.json"
        self.lock = threading.Lock()
        self.runs: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.runs))
        partial.replace(self.path)

    def take(self, run: str, lines: dict[str, Any]) -> None:
        """Store what a client streams."""
        found = self.runs[run]
        files = lines.get("files") or {}
        if _HISTORY in files:
            offset, content = files[_HISTORY]["offset"], files[_HISTORY]["content"]
            history = found["history"]
            assert offset <= len(history), "a client has left lines out"
            history[offset : offset + len(content)] = content
        if _SUMMARY in files:
            found["summary"] = files[_SUMMARY]["content"][-1]
        if lines.get("complete"):
            found["state"] = "finished" if lines["exitcode"] == 0 else "failed"
            found["exit_code"] = lines["exitcode"]
        self.write()

    def upsert(self, asked: dict[str, Any]) -> dict[str, Any]:
        name, is_new = asked["name"], asked["name"] not in self.runs
        if is_new:
            self.runs[name] = {"history": [], "summary": "{}", "config": "{}", "starts": 0}
        found = self.runs[name]
        found.update(state="running", exit_code=None, project=asked["project"])
        found["starts"] += bool(asked.get("displayName"))
        if asked.get("config"):
            found["config"] = asked["config"]
        if asked.get("displayName"):
            found["displayName"] = asked["displayName"]
        self.write()
        return {"upsertBucket": {"bucket": self.describe(name), "inserted": is_new}}

    def describe(self, name: str) -> dict[str, Any]:
        found = self.runs[name]
        entity = {"id": "e", "name": ENTITY}
        last = json.loads(found["history"][-1])["_step"] if found["history"] else -1
        return {
            "id": name,
            "name": name,
            "displayName": found.get("displayName"),
            "state": found["state"],
            "config": found["config"],
            "summaryMetrics": found["summary"],
            "historyLineCount": len(found["history"]),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps(found["history"][-1:]),
            "eventsTail": "[]",
            "historyKeys": {"lastStep": last, "keys": {}},
            "wandbConfig": json.dumps({"t": 1}),
            "tags": [],
            "project": {"id": "p", "name": found["project"], "entity": entity},
            "projectId": "1",
            "user": {"name": ENTITY, "username": ENTITY},
        }

    def create_files(self, asked: dict[str, Any]) -> dict[str, Any]:
        place = f"{self.address}/storage/{asked['run']}"
        files = [{"name": name, "uploadUrl": f"{place}/{name}"} for name in asked["files"]]
        return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}

    def resume_status(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["name"]
        bucket = self.describe(name) if name in self.runs else None
        project = {"id": "p", "name": asked["project"], "entity": {"id": "e", "name": ENTITY}}
        return {"model": {**project, "bucket": bucket}}

    def find(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["name"]
        return {
            "project": {
                "internalId": "1",
                "run": self.describe(name) if name in self.runs else None,
            }
        }

    def view(self, asked: dict[str, Any]) -> dict[str, Any]:
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        user = {"id": "u", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": {**user, "teams": teams}}

    def list_files(self, asked: dict[str, Any]) -> dict[str, Any]:
        root = self.folder / asked["name"]
        names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        nodes = [
            {
                "id": name,
                "name": name,
                "url": "",
                "directUrl": "",
                "sizeBytes": (root / name).stat().st_size,
                "mimetype": "",
                "updatedAt": None,
                "md5": "",
            }
            for name in names
            if not asked.get("fileNames") or name in asked["fileNames"]
        ]
        edges = [{"node": node, "cursor": str(number)} for number, node in enumerate(nodes)]
        page = {"endCursor": None, "hasNextPage": False}
        run = {"fileCount": len(nodes), "files": {"edges": edges, "pageInfo": page}}
        return {"project": {"internalId": "1", "run": run}}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer a query."""
        (name, *_) = re.findall(r"(?:query|mutation)\s*(\w+)", asked["query"])
        variables = asked.get("variables") or {}
        answers = {
            "UpsertBucket": self.upsert,
            "CreateRunFiles": self.create_files,
            "RunResumeStatus": self.resume_status,
            "RunFiles": self.list_files,
            "Run": self.find,
            "RunHistoryKeys": self.find,
            "Viewer": self.view,
            "GetDefaultEntity": self.view,
        }
        return answers[name](variables)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of the client."""

    protocol_version = "HTTP/1.1"
    runs: Runs

    def handle(self) -> None:
        # A client that is killed resets its connections.
        with suppress(ConnectionError):
            super().handle()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        stream = _STREAM.fullmatch(self.path)
        with self.runs.lock:
            if self.path == "/graphql":
                asked = json.loads(body)
                try:
                    self.reply({"data": self.runs.answer(asked)})
                except (KeyError, IndexError):
                    print("UNKNOWN", body, flush=True)
                    self.reply({"errors": [{"message": "unknown"}]}, 400)
            elif stream:
                self.runs.take(stream[3], json.loads(body))
                self.reply({"limits": {}})
            else:
                # How often the client's features are used.
                self.reply({})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.runs.folder / unquote(self.path).removeprefix("/storage/")
        with self.runs.lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        self.reply({})

    def reply(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Write nothing."""


def serve(folder: Path, port: int) -> None:
    """Answer until the process is killed."""
    Handler.runs = Runs(folder)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    Handler.runs.address = f"http://127.0.0.1:{port}"
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
