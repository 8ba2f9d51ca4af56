"""A local server with the API of the Hugging Face Hub."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse

COMMIT = "a" * 40
GATED = "GatedRepo", 403
HIDDEN = "RepoNotFound", 401  # also for private repositories
MOVED = "RevisionNotFound", 404


class Hub:
  """Repositories and recorded requests."""

  def __init__(self):
    self.files = {}  # {kind/ID: {commit: {path: bytes}}}
    self.heads = {}  # {kind/ID: {branch: commit}}
    self.gated = set()  # gated IDs
    self.tokens = {}  # {ID: token} of private repositories
    self.broken = {}  # {path: number of responses to truncate}
    self.log = []  # (method, path) of each request
    self.seen = set()  # received tokens
    self.status = 0  # status of all responses, unless 0

  def add(self, name, files, commit=COMMIT, kind="models", branch="main"):
    self.files.setdefault(f"{kind}/{name}", {})[commit] = dict(files)
    self.heads.setdefault(f"{kind}/{name}", {})[branch] = commit

  def fetched(self):
    """Paths of downloaded files."""
    return [p.split("/", 5)[-1] for m, p in self.log if m == "GET" and _FILE(p)]


def _FILE(path):
  return re.fullmatch(
    r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path
  )


def _API(path):
  return re.fullmatch(
    r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(/.*)?",
    path,
  )


def of_directory(folder):
  return {
    str(p.relative_to(folder)): p.read_bytes()
    for p in sorted(pathlib.Path(folder).rglob("*"))
    if p.is_file()
  }


def _handler(hub):
  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
      pass

    def answer(self, body, headers=(), status=200, part=None):
      self.send_response(status)
      for key, value in dict(headers).items():
        self.send_header(key, value)
      self.send_header("Content-Length", str(len(body)))
      self.end_headers()
      if self.command == "GET":
        self.wfile.write(body if part is None else body[:part])
      if part is not None:
        self.close_connection = True

    def refuse(self, code, status):
      self.answer(b"{}", {"X-Error-Code": code}, status)

    def do_GET(self):
      path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
      token = self.headers.get("Authorization", "").removeprefix("Bearer ")
      hub.log.append((self.command, path))
      hub.seen.add(token)
      if hub.status:
        return self.answer(b"{}", status=hub.status)
      file = _FILE(path)
      api = _API(path)
      if not (file or api):
        return self.refuse("EntryNotFound", 404)
      kind = (file[1] or "models") if file else api[1]
      name = (file or api)[2]
      revision = file[3] if file else api[4] or "main"
      commits = hub.files.get(f"{kind}/{name}", {})
      heads = hub.heads.get(f"{kind}/{name}", {})
      if not commits or hub.tokens.get(name, token) != token:
        return self.refuse(*HIDDEN)
      if name in hub.gated:
        return self.refuse(*GATED)
      commit = heads.get(revision, revision)
      if commit not in commits:
        return self.refuse(*MOVED)
      if file:
        return self.file(commit, file[4], commits[commit])
      if api[3] == "tree":
        return self.answer(json.dumps(_tree(commits[commit], api[5])).encode())
      info = {"id": name, "sha": commit, "tags": [], "downloads": 0}
      info["siblings"] = [{"rfilename": path} for path in commits[commit]]
      return self.answer(json.dumps(info).encode())

    do_HEAD = do_GET

    def do_POST(self):
      self.rfile.read(int(self.headers.get("Content-Length", 0)))
      self.refuse("EntryNotFound", 404)

    def file(self, commit, path, files):
      if path not in files:
        return self.refuse("EntryNotFound", 404)
      body = files[path]
      part = None
      headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(body)}"'}
      first = self.headers.get("Range", "")
      if self.command == "GET" and hub.broken.get(path, 0) > 0:
        hub.broken[path] -= 1
        part = len(body) // 2
      if match := re.fullmatch(r"bytes=(\d+)-", first):
        return self.answer(body[int(match[1]) :], headers, 206, part)
      return self.answer(body, headers, part=part)

  return Handler


def _oid(body):
  return hashlib.sha1(body).hexdigest()


def _tree(files, below):
  start = (below or "").strip("/")
  rows = [
    {"type": "file", "path": path, "size": len(body), "oid": _oid(body)}
    for path, body in files.items()
    if path.startswith(start)
  ]
  folders = {str(p) for x in files for p in pathlib.PurePath(x).parents}
  rows += [
    {"type": "directory", "path": p, "size": 0, "oid": _oid(p.encode())}
    for p in sorted(folders - {"."})
    if p.startswith(start) and p != start
  ]
  return rows


@contextlib.contextmanager
def serve(hub):
  """Runs a server of the hub; yields its address."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
  threading.Thread(target=server.serve_forever, args=[0.01]).start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def client_of(hub, cache, monkeypatch):
  """Serves the hub to this process, with its client already loaded."""
  from huggingface_hub import constants

  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
  monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
  monkeypatch.delenv("HF_TOKEN", raising=False)
  with serve(hub) as address:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield address
