"""A stand-in for the HuggingFace hub: the HTTP calls of uploads and downloads, answered from memory."""

import base64
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "1" * 40
WRITES, READS = "hf_SECRETwrites", "hf_SECRETreads"
LARGE = 2000  # bytes; larger files go to the store of large files


@dataclass
class Repository:
    private: bool
    branches: dict = field(default_factory=lambda: {"main": {}})
    commits: list = field(default_factory=list)


class Hub(ThreadingHTTPServer):
    """Users: `ann` of the organisation `team`, and a reader in `others`.

    Attributes:
        refused: path -> status to answer instead, for paths that contain it.
        uses_store: large files go to the store for them, else everything is in the commit.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.blobs, self.refused, self.requests = {}, {}, {}, []
        self.uses_store = True

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_request(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        for part, status in self.server.refused.items():
            if part in path:
                return self.answer({"error": f"the hub is {part} with {token}"}, status)
        if path.startswith("/store/"):
            self.server.blobs[path.rpartition("/")[2]] = body
            return self.answer({})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self.send(*found.groups())
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/[^/]+", path):
            return self.listing(*found.groups())
        if token not in (WRITES, READS):
            return self.answer({"error": "Invalid username or password."}, 401)
        return self.api(path, body, token)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815 - names of http.server

    def listing(self, name, kind):
        if name not in self.server.repositories:
            return self.answer({"error": "Repository not found"}, 404)
        files = self.server.repositories[name].branches["main"].items()
        if kind == "revision":
            return self.answer({"id": name, "sha": COMMIT})
        return self.answer(
            [{"type": "file", "path": file, "size": len(content), "oid": COMMIT} for file, content in files]
        )

    def send(self, name, file):
        content = self.server.repositories[name].branches["main"][file]
        self.send_response(200)
        for key, value in (("ETag", sha256(content).hexdigest()), ("Content-Length", len(content))):
            self.send_header(key, str(value))
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def api(self, path, body, token):
        content = json.loads(body) if body and "/commit/" not in path else {}
        if path == "/api/whoami-v2":
            role = "write" if token == WRITES else "read"
            orgs = [{"name": "team", "roleInOrg": "write"}, {"name": "others", "roleInOrg": "read"}]
            return self.answer({"name": "ann", "orgs": orgs, "auth": {"accessToken": {"role": role}}})
        if path == "/api/repos/create":
            return self.create(content)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [self.target(one) for one in content["objects"]]
            return self.answer({"transfer": "basic", "objects": objects})
        asked = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.*))?", path)
        name, action = asked.groups() if asked else ("", "")
        found = self.server.repositories.get(name)
        if found is None:
            return self.answer({"error": "Repository not found"}, 404)
        return self.of_repository(found, name, action or "", content, body)

    def create(self, content):
        name = f"{content['organization'] or 'ann'}/{content['name']}"
        known = name in self.server.repositories
        if not known:
            self.server.repositories[name] = Repository(content.get("visibility") == "private")
        self.answer({"url": f"{self.server.address}/{name}"}, 409 if known else 200)

    def target(self, one):
        if one["oid"] in self.server.blobs:
            return one
        return one | {"actions": {"upload": {"href": f"{self.server.address}/store/{one['oid']}"}}}

    def of_repository(self, found, name, action, content, body):
        kind, _, revision = action.partition("/")
        if kind == "":
            return self.answer({"id": name, "private": found.private, "siblings": [], "tags": [], "downloads": 0})
        if kind == "auth-check":
            return self.answer({})
        if kind == "branch":
            found.branches.setdefault(revision, {})
            return self.answer({})
        if kind == "preupload":
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if self.server.uses_store and one["size"] > LARGE else "regular",
                    "shouldIgnore": False,
                }
                for one in content["files"]
            ]
            return self.answer({"files": modes})
        return self.commit(found, name, revision, [json.loads(line) for line in body.splitlines()])

    def commit(self, found, name, revision, lines):
        files = found.branches[revision]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                found.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        self.answer(
            {
                "commitUrl": f"{self.server.address}/{name}/commit/{COMMIT}",
                "commitOid": COMMIT,
                "pullRequestUrl": None,
            }
        )


@contextmanager
def serving():
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
