"""What the Hub on loopback answers, step by step; `hub_server` puts it on a port."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote

from hub_store import LFS_SUFFIXES, Commit, HubError, Repo, git_hash, metadata_errors

API = r"/api/(?P<kind>model|dataset|space)s/(?P<id>[^/]+/[^/]+)"
WEB = r"/(?P<kind>(?:dataset|space)s/)?(?P<id>[^/]+/[^/]+?)"
STORAGE = r"/large/(?P<id>[^/]+)/(?P<oid>\w+)"
REV = r"/(?P<rev>[^/]+)"
ROUTES = [
    ("registry", "GET", r"/api/agent-harnesses"),
    ("whoami", "GET", r"/api/whoami-v2"),
    ("validate-yaml", "POST", r"/api/validate-yaml"),
    ("create", "POST", r"/api/repos/create"),
    ("delete", "DELETE", r"/api/repos/delete"),
    ("settings", "PUT", API + "/settings"),
    ("info", "GET", API + f"(?:/revision{REV})?"),
    ("refs", "GET", API + "/refs"),
    ("tree", "GET", API + f"/tree{REV}(?:/(?P<path>.+))?"),
    ("paths-info", "POST", API + "/paths-info" + REV),
    ("commits", "GET", API + "/commits" + REV),
    ("preupload", "POST", API + "/preupload" + REV),
    ("commit", "POST", API + "/commit" + REV),
    ("tag", "POST|DELETE", API + "/tag" + REV),
    ("branch", "POST|DELETE", API + "/branch" + REV),
    ("lfs-batch", "POST", WEB + r"\.git/info/lfs/objects/batch"),
    ("lfs-verify", "POST", WEB + r"\.git/info/lfs/objects/verify"),
    ("lfs-upload", "PUT", STORAGE),
    ("lfs-download", "GET|HEAD", STORAGE),
    ("resolve", "GET|HEAD", WEB + f"/resolve{REV}/(?P<path>.+)"),
]
STEPS = {step for step, _, _ in ROUTES}
WITHOUT_REPO = {"registry", "whoami", "validate-yaml", "create", "delete", "lfs-upload", "lfs-download"}
WRITES = {"delete", "settings", "preupload", "commit", "tag", "branch", "lfs-batch", "lfs-verify"}
BAD_TOKEN = "Invalid credentials in Authorization header"


@dataclass(frozen=True)
class User:
    name: str
    role: str


@dataclass
class Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Call:
    """A request, taken apart."""

    step: str
    method: str
    user: User | None
    parts: dict[str, str]
    query: dict[str, list[str]]
    headers: Any
    body: bytes = b""


class HubApi:
    """The repositories and who may do what with them."""

    endpoint: str
    storage: str

    def __init__(self, *, lfs: bool):
        self.lfs = lfs
        self.repos: dict[str, Repo] = {}
        self._users: dict[str, User] = {}
        self._lock, self._key = threading.Lock(), secrets.token_bytes(16)

    def add_user(self, name: str, token: str, role: str = "write") -> None:
        self._users[token] = User(name, role)

    def add_repo(
        self, id: str, files: Mapping[str, bytes] | None = None, *, type: str = "model", private: bool = False
    ) -> Repo:
        """A repository that holds these files after its second commit."""
        repo = Repo(id, type, private, id.partition("/")[0])
        if files:
            lfs = frozenset(path for path, content in files.items() if self._is_large(path, content, len(content)))
            repo.record("main", "add files", "", repo.owner, {**repo.files(), **files}, lfs)
        self.repos[repo.path] = repo
        return repo

    def _is_large(self, path: str, sample: bytes, size: int) -> bool:
        return self.lfs and (path.endswith(LFS_SUFFIXES) or b"\0" in sample or size > 10_000_000)

    def user_of(self, authorization: str) -> User:
        user = self._users.get(authorization.removeprefix("Bearer "))
        if user is None:
            raise HubError(401, BAD_TOKEN)
        return user

    def answer(self, call: Call) -> Answer:
        step = getattr(self, "_" + call.step.replace("-", "_"))
        with self._lock:
            if call.step in WITHOUT_REPO:
                return step(call)
            kind = (call.parts["kind"] or "model").removesuffix("s/")
            return step(call, self._repo(call, kind, call.parts["id"]))

    def _repo(self, call: Call, kind: str, name: str) -> Repo:
        """The repository, if the user may do with it what is asked."""
        repo = self.repos.get(name if kind == "model" else f"{kind}s/{name}")
        if repo is None or (repo.private and (call.user is None or call.user.name != repo.owner)):
            if call.user is None:  # who is not known is not told what exists
                raise HubError(401, "Invalid username or password.", "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        if call.step in WRITES:
            self._check_write(call.user, repo.owner)
        return repo

    def _check_write(self, user: User | None, owner: str) -> None:
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if user.role != "write":
            raise HubError(403, "Forbidden: you must use a write token to upload to a repository.")
        if user.name != owner:
            raise HubError(403, f'You don\'t have the rights to write under the namespace "{owner}"')

    def _registry(self, call: Call) -> Answer:
        """What every client asks for first, to describe itself: nothing is to be told."""
        return _json({"standardEnvVars": [], "harnesses": {}})

    def _whoami(self, call: Call) -> Answer:
        if call.user is None:
            raise HubError(401, "Invalid username or password.")
        token = {"type": "access_token", "accessToken": {"displayName": "test", "role": call.user.role}}
        name = call.user.name
        return _json({"type": "user", "id": name, "name": name, "fullname": name, "orgs": [], "auth": token})

    def _validate_yaml(self, call: Call) -> Answer:
        card = json.loads(call.body)["content"]
        errors = [{"message": message} for message in metadata_errors(card)]
        empty = [] if card.startswith("---") else [{"message": "empty or missing yaml metadata in repo card"}]
        return _json({"errors": errors, "warnings": empty}, 400 if errors else 200)

    def _create(self, call: Call) -> Answer:
        asked = json.loads(call.body)
        owner = asked.get("organization") or (call.user.name if call.user else "")
        self._check_write(call.user, owner)
        kind = asked.get("type") or "model"
        repo = Repo(
            f"{owner}/{asked['name']}", kind, asked.get("visibility") == "private" or bool(asked.get("private")), owner
        )
        if kind == "space":
            repo.sdk = asked.get("sdk")
            if repo.sdk not in ("gradio", "docker", "static"):
                raise HubError(400, '"sdk" must be one of [gradio, docker, static]')
        url = f"{self.endpoint}/{repo.path}"
        if repo.path in self.repos:
            return _json({"error": f"You already created this {kind} repo: {repo.id}", "url": url}, 409)
        self.repos[repo.path] = repo
        return _json({"url": url, "name": repo.id, "id": repo.id})

    def _delete(self, call: Call) -> Answer:
        asked = json.loads(call.body)
        owner = asked.get("organization") or (call.user.name if call.user else "")
        repo = self._repo(call, asked.get("type") or "model", f"{owner}/{asked['name']}")
        del self.repos[repo.path]
        return _json({})

    def _settings(self, call: Call, repo: Repo) -> Answer:
        asked = json.loads(call.body)
        if "visibility" in asked or "private" in asked:
            repo.private = asked.get("visibility") == "private" or bool(asked.get("private"))
        return _json({"private": repo.private})

    def _info(self, call: Call, repo: Repo) -> Answer:
        commit = repo.at(call.parts["rev"] or "main")
        siblings: list[dict[str, Any]] = []
        for path in sorted(commit.files):
            siblings.append({"rfilename": path})
            if call.query.get("blobs") in (["true"], ["True"]):
                row = commit.row(path)
                siblings[-1] |= {"size": row["size"], "blobId": row["oid"]}
                if "lfs" in row:
                    siblings[-1]["lfs"] = row["lfs"] | {"sha256": row["lfs"]["oid"]}
        info = {"_id": git_hash(repo.path.encode())[:24], "id": repo.id, "author": repo.owner, "sha": commit.oid}
        dates = {"createdAt": repo.commits[0].date, "lastModified": commit.date}
        counts = {"private": repo.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return _json(info | dates | counts | {"siblings": siblings})

    def _refs(self, call: Call, repo: Repo) -> Answer:
        def rows(kind: str, refs: dict[str, str]) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in refs.items()]

        branches, tags = rows("heads", repo.branches), rows("tags", repo.tags)
        return _json({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})

    def _tree(self, call: Call, repo: Repo) -> Answer:
        commit = repo.at(call.parts["rev"])
        recursive, expand = (
            call.query.get(name, ["false"])[0].lower() in ("true", "1") for name in ("recursive", "expand")
        )
        rows = commit.rows(call.parts["path"] or "", recursive)
        return _json(_expanded(repo, commit, rows) if expand else rows)

    def _paths_info(self, call: Call, repo: Repo) -> Answer:
        asked, commit = parse_qs(call.body.decode()), repo.at(call.parts["rev"])
        rows = [commit.row(path.strip("/")) for path in asked.get("paths", []) if commit.under(path.strip("/"))]
        return _json(_expanded(repo, commit, rows) if asked.get("expand", [""])[0].lower() == "true" else rows)

    def _commits(self, call: Call, repo: Repo) -> Answer:
        return _json(
            [
                {
                    "id": c.oid,
                    "title": c.title,
                    "message": c.description,
                    "date": c.date,
                    "authors": [{"user": c.author}],
                }
                for c in repo.history(repo.at(call.parts["rev"]))
            ]
        )

    def _preupload(self, call: Call, repo: Repo) -> Answer:
        commit, answers = repo.at(call.parts["rev"]), []
        for file in json.loads(call.body)["files"]:
            path = file["path"]
            large = self._is_large(path, base64.b64decode(file["sample"]), file["size"])
            answers.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False})
            if path in commit.files:
                row = commit.row(path)
                answers[-1]["oid"] = row.get("lfs", row)["oid"]
        return _json({"files": answers})

    def _commit(self, call: Call, repo: Repo) -> Answer:
        if call.query.get("create_pr"):
            raise HubError(501, "pull requests are not spoken here")
        assert call.user is not None
        commit = repo.commit(call.parts["rev"], call.body.splitlines(), call.user.name)
        url = f"{self.endpoint}/{repo.path}/commit/{commit.oid}"
        return _json({"success": True, "commitOid": commit.oid, "commitUrl": url})

    def _tag(self, call: Call, repo: Repo) -> Answer:
        if call.method == "DELETE":
            return self._remove(repo.tags, call.parts["rev"])
        name = json.loads(call.body)["tag"]
        return self._add(repo.tags, name, repo.at(call.parts["rev"]))

    def _branch(self, call: Call, repo: Repo) -> Answer:
        name = call.parts["rev"]
        if call.method == "DELETE":
            if name == "main":
                raise HubError(403, "main cannot be deleted")
            return self._remove(repo.branches, name)
        return self._add(repo.branches, name, repo.at(json.loads(call.body).get("startingPoint") or "main"))

    def _add(self, refs: dict[str, str], name: str, commit: Commit) -> Answer:
        if name in refs:
            raise HubError(409, f"Reference already exists: {name}")
        refs[name] = commit.oid
        return _json({})

    def _remove(self, refs: dict[str, str], name: str) -> Answer:
        if name not in refs:
            raise HubError(404, f"Reference does not exist: {name}", "RevisionNotFound")
        del refs[name]
        return _json({})

    def _lfs_batch(self, call: Call, repo: Repo) -> Answer:
        asked, objects = json.loads(call.body), []
        if asked["operation"] != "upload":
            raise HubError(501, f"{asked['operation']} by git-lfs is not spoken here")
        for item in asked["objects"]:
            objects.append({"oid": item["oid"], "size": item["size"]})
            if item["oid"] not in repo.lfs:
                verify = f"{self.endpoint}/{repo.path}.git/info/lfs/objects/verify"
                upload = self._signed(repo, item["oid"], "PUT")
                objects[-1]["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        return _json({"transfer": "basic", "objects": objects})

    def _lfs_verify(self, call: Call, repo: Repo) -> Answer:
        asked = json.loads(call.body)
        if len(repo.lfs.get(asked["oid"], b"")) != asked["size"]:
            raise HubError(404, f"{asked['oid']} was not uploaded")
        return _json({})

    def _signed(self, repo: Repo, oid: str, method: str) -> str:
        path = f"/large/{quote(repo.path, safe='')}/{oid}"
        return f"{self.storage}{path}?signature={self._signature(repo.path, oid, method)}"

    def _signature(self, *what: str) -> str:
        return hmac.new(self._key, "\0".join(what).encode(), "sha256").hexdigest()

    def _stored(self, call: Call, method: str) -> tuple[Repo, str]:
        """Where a large file belongs; whoever has a signed address may read or write that one file."""
        path, oid = call.parts["id"], call.parts["oid"]
        if "Authorization" in call.headers:
            raise HubError(400, "Only one auth mechanism allowed: a token was sent with a signed address")
        if call.query.get("signature") != [self._signature(path, oid, method)] or path not in self.repos:
            raise HubError(403, "the address is not signed for this")
        return self.repos[path], oid

    def _lfs_upload(self, call: Call) -> Answer:
        repo, oid = self._stored(call, "PUT")
        if hashlib.sha256(call.body).hexdigest() != oid:
            raise HubError(400, f"the content is not {oid}")
        repo.lfs[oid] = call.body
        return Answer(headers={"ETag": f'"{oid}"'})

    def _lfs_download(self, call: Call) -> Answer:
        repo, oid = self._stored(call, "GET")
        return _content(repo.lfs[oid], call, {"ETag": f'"{oid}"'})

    def _resolve(self, call: Call, repo: Repo) -> Answer:
        commit, path = repo.at(call.parts["rev"]), call.parts["path"]
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound", **headers)
        row = commit.row(path)
        if "lfs" in row:
            headers |= {"X-Linked-Etag": f'"{row["lfs"]["oid"]}"', "X-Linked-Size": str(row["size"])}
            return Answer(b"", 302, headers | {"Location": self._signed(repo, row["lfs"]["oid"], "GET")})
        return _content(commit.files[path], call, headers | {"ETag": f'"{row["oid"]}"'})


def _json(value: object, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


def error_answer(error: HubError) -> Answer:
    answer = _json({"error": error.message, "errors": [{"message": error.message}]}, error.status)
    answer.headers |= {"X-Error-Message": error.message.encode("ascii", "replace").decode(), **error.headers}
    if error.code:
        answer.headers["X-Error-Code"] = error.code
    return answer


def _content(content: bytes, call: Call, headers: dict[str, str]) -> Answer:
    """A file, or the part of it that a Range header asks for."""
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", call.headers.get("Range", ""))
    if not asked or not any(asked.groups()):
        return Answer(content, 200, headers)
    first, last = asked.groups()
    start = int(first) if first else max(0, len(content) - int(last))
    end = min(int(last), len(content) - 1) if first and last else len(content) - 1
    if start > end:
        return Answer(b"", 416, headers | {"Content-Range": f"bytes */{len(content)}"})
    return Answer(content[start : end + 1], 206, headers | {"Content-Range": f"bytes {start}-{end}/{len(content)}"})


def _expanded(repo: Repo, commit: Commit, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the commit that last changed each path."""
    for row in rows:
        changed = repo.last_change(commit, row["path"])
        row["lastCommit"] = {"id": changed.oid, "title": changed.title, "date": changed.date}
    return rows
