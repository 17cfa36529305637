"""Repositories of the Hub on loopback: commits, branches, tags and large files, kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"
LFS_SUFFIXES = (".arrow", ".bin", ".ckpt", ".h5", ".npy", ".onnx", ".parquet", ".pt", ".pth", ".safetensors", ".zip")
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


class HubError(Exception):
    """An error that a client is told: the status, and `code` as X-Error-Code."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Commit:
    """All files of the repository after this commit, by path; `lfs` are the paths in large-file storage."""

    oid: str
    parents: tuple[str, ...]
    title: str
    description: str
    author: str
    date: str
    files: Mapping[str, bytes]
    lfs: frozenset[str]

    def under(self, path: str) -> dict[str, bytes]:
        """The file of this path, or the files of this folder; all files for the path ""."""
        return {p: c for p, c in self.files.items() if not path or p == path or p.startswith(path + "/")}

    def row(self, path: str) -> dict[str, Any]:
        """A file or folder as a tree listing gives it."""
        if path not in self.files:
            listing = "".join(f"{p}\0{git_hash(c)}\0" for p, c in sorted(self.under(path).items()))
            return {"type": "directory", "path": path, "oid": git_hash(listing.encode()), "size": 0}
        content = self.files[path]
        row: dict[str, Any] = {"type": "file", "path": path, "oid": git_hash(content), "size": len(content)}
        if path in self.lfs:
            sha256 = hashlib.sha256(content).hexdigest()
            pointer = POINTER.format(sha256, len(content)).encode()
            row["oid"] = git_hash(pointer)
            row["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": len(pointer)}
        return row

    def rows(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """What is in a folder, folders before files as on the Hub."""
        start = len(folder) + 1 if folder else 0
        inside = [path for path in self.under(folder) if path != folder]
        if folder and not inside:
            raise HubError(
                404, f"{folder} does not exist on this revision", "EntryNotFound", **{"X-Repo-Commit": self.oid}
            )
        paths = {path[:end] for path in inside for end in [m.start() for m in re.finditer("/", path)] if end > start}
        paths |= set(inside)
        if not recursive:
            paths = {path for path in paths if "/" not in path[start:]}
        rows = [self.row(path) for path in sorted(paths)]
        return sorted(rows, key=lambda row: row["type"])


@dataclass
class Repo:
    """A repository; `commits` holds those of all branches, the latest last."""

    id: str
    type: str
    private: bool
    owner: str
    commits: list[Commit] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    sdk: str | None = None  # what starts a Space

    def __post_init__(self) -> None:
        self.record("main", "initial commit", "", self.owner, {".gitattributes": GITATTRIBUTES}, frozenset())

    @property
    def path(self) -> str:
        """Where its web pages are: `user/name` or `datasets/user/name`, the key in `HubServer.repos`."""
        return self.id if self.type == "model" else f"{self.type}s/{self.id}"

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return dict(self.at(revision).files)

    def at(self, revision: str) -> Commit:
        """The commit of a branch, a tag or a commit id, which may be shortened to 7 characters."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        found = [commit for commit in self.commits if commit.oid.startswith(oid)] if len(oid) >= 7 else []
        if len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def history(self, commit: Commit) -> Iterable[Commit]:
        """The commit and those before it, the latest first."""
        while True:
            yield commit
            if not commit.parents:
                return
            commit = self.at(commit.parents[0])

    def last_change(self, commit: Commit, path: str) -> Commit:
        """The commit that gave a file or folder the content it has."""
        content, changed = commit.under(path), commit
        for earlier in self.history(commit):
            if earlier.under(path) != content:
                break
            changed = earlier
        return changed

    def commit(self, branch: str, lines: Iterable[bytes], author: str) -> Commit:
        """Applies the operations of a commit, given as NDJSON, all of them or none."""
        header: dict[str, Any] = {}
        if branch not in self.branches:
            self.at(branch)  # an unknown revision is another error than one that cannot move
            raise HubError(400, f"{branch} is not a branch")
        head = self.at(branch)
        files, lfs = dict(head.files), set(head.lfs)
        for line in filter(None, lines):
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                header = value
                continue
            path = value["path"].rstrip("/")
            if key == "file":
                files[path] = (
                    base64.b64decode(value["content"])
                    if value.get("encoding") == "base64"
                    else value["content"].encode()
                )
                lfs.discard(path)
            elif key == "lfsFile":
                if value["oid"] not in self.lfs:
                    raise HubError(400, f"{path} points to a large file that was not uploaded: {value['oid']}")
                files[path] = self.lfs[value["oid"]]
                lfs.add(path)
            elif key in ("deletedFile", "deletedFolder"):
                gone = [p for p in files if (p.startswith(path + "/") if key == "deletedFolder" else p == path)]
                if not gone:
                    raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                for name in gone:
                    del files[name]
                    lfs.discard(name)
            else:
                raise HubError(400, f"unknown operation {key}")
        if not header.get("summary"):
            raise HubError(400, "a commit needs a summary")
        if not head.oid.startswith(header.get("parentCommit") or ""):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        if errors := metadata_errors(files.get("README.md", b"").decode()):
            raise HubError(400, f"Invalid metadata in README.md: {errors[0]}")
        # One that changes nothing is recorded like any other: avoiding it is up to the client.
        return self.record(branch, header["summary"], header.get("description", ""), author, files, frozenset(lfs))

    def record(
        self,
        branch: str,
        title: str,
        description: str,
        author: str,
        files: Mapping[str, bytes],
        lfs: frozenset[str],
    ) -> Commit:
        """A new commit on the branch, with these files and no others."""
        parents = (self.branches[branch],) if branch in self.branches else ()
        for path in lfs:
            self.lfs[hashlib.sha256(files[path]).hexdigest()] = files[path]
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        tree = "".join(f"{path}\0{git_hash(content)}\0" for path, content in sorted(files.items()))
        identity = "\0".join([self.path, str(len(self.commits)), *parents, title, description, author, date, tree])
        commit = Commit(
            hashlib.sha1(identity.encode()).hexdigest(), parents, title, description, author, date, files, lfs
        )
        self.commits.append(commit)
        self.branches[branch] = commit.oid
        return commit


def metadata_errors(card: str) -> list[str]:
    """What is wrong with the YAML block a card begins with, as far as can be told without a YAML parser."""
    lines = card.replace("\r\n", "\n").split("\n")
    if lines[0] != "---":
        return []
    if "---" not in lines[1:]:
        return ["the metadata block is not closed by ---"]
    seen: set[str] = set()
    for number, line in enumerate(lines[1 : lines.index("---", 1)], start=2):
        key = re.match(r"""(?:[\w.-]+|"[^"]+"|'[^']+')(?=:(?:\s|$))""", line)
        if line.startswith("\t"):
            return [f"line {number} is indented by a tab"]
        if key is None and re.match(r"[^\s#\-\]}]|-(?!\s)", line):
            return [f"line {number} is not of the form key: value"]
        if key is not None and key[0] in seen:
            return [f"line {number} gives {key[0]} a second time"]
        if key is not None:
            seen.add(key[0])
    return []
