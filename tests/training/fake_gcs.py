"""A local server with a part of the JSON API of Google Cloud Storage.

    python tests/training/fake_gcs.py PORT

Objects are in memory, in any bucket. gcsfs and TensorStore need: reading with
ranges, writing whole or in parts, listing by prefix, deleting, preconditions
on the generation (for locks and TensorStore manifests).
"""

import http.server
import itertools
import json
import sys
import threading
import time
import urllib.parse

OBJECTS = {}  # (bucket, name) -> (generation, bytes, seconds since the epoch)
UPLOADS = {}  # id -> (bucket, name, parameters, bytearray)
LOCK = threading.Lock()
GENERATIONS = itertools.count(1000)


def _resource(bucket, name):
  generation, data, when = OBJECTS[bucket, name]
  stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when))
  return {
    "bucket": bucket,
    "name": name,
    "generation": str(generation),
    "size": str(len(data)),
    "timeCreated": stamp,
    "updated": stamp,
  }


def _content(part):
  """Raw bytes of a part of a multipart body; a parser changes line ends."""
  end = b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n"  # end of headers
  return part.split(end, 1)[1].removesuffix(b"\n").removesuffix(b"\r")


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *args):
    pass

  def _answer(self, code, body=b"", **headers):
    if isinstance(body, dict):
      body = json.dumps(body).encode()
      headers.setdefault("Content_Type", "application/json")
    self.send_response(code)
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), str(value))
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def _error(self, code):
    self._answer(code, {"error": {"code": code, "message": f"error {code}"}})

  def _body(self):
    return self.rfile.read(int(self.headers.get("Content-Length", 0)))

  def _where(self):
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    parts = [urllib.parse.unquote(p) for p in url.path.split("/")]
    if "b" not in parts:
      return url.path, None, None, query
    at = parts.index("b")
    bucket = parts[at + 1] if len(parts) > at + 1 else None
    name = "/".join(parts[at + 3 :]) or None
    return url.path, bucket, name, query

  def _refused(self, bucket, name, query):
    """Returns the status code of a failed precondition, or None."""
    now = OBJECTS.get((bucket, name), (0,))[0]
    match = int(query.get("ifGenerationMatch", now))
    differs = int(query.get("ifGenerationNotMatch", -1))
    return 412 if match != now or differs == now else None

  def _put(self, bucket, name, query, data):
    with LOCK:
      if code := self._refused(bucket, name, query):
        return self._error(code)
      OBJECTS[bucket, name] = (next(GENERATIONS), bytes(data), time.time())
    self._answer(200, _resource(bucket, name))

  def _list(self, bucket, query):
    prefix = query.get("prefix", "")
    cut = query.get("delimiter")
    start = query.get("startOffset", "")
    end = query.get("endOffset")
    names = sorted(n for b, n in OBJECTS if b == bucket)
    items = []
    prefixes = {}
    for name in (n for n in names if n.startswith(prefix)):
      if name < start or (end and name >= end):
        continue
      rest = name[len(prefix) :]
      if cut and cut in rest:
        prefixes[prefix + rest.split(cut)[0] + cut] = True
      else:
        items.append(_resource(bucket, name))
    self._answer(200, {"items": items, "prefixes": list(prefixes)})

  def do_GET(self):
    path, bucket, name, query = self._where()
    if bucket is None:
      return self._error(404)
    if name is None:
      if path.rstrip("/").endswith("/o"):
        return self._list(bucket, query)
      return self._answer(200, {"name": bucket})
    with LOCK:
      if (bucket, name) not in OBJECTS:
        return self._error(404)
      if code := self._refused(bucket, name, query):
        return self._error(code)
      generation, data, _ = OBJECTS[bucket, name]
    if query.get("alt") != "media":
      return self._answer(200, _resource(bucket, name))
    about = {"x_goog_generation": generation, "ETag": generation}
    span = self.headers.get("Range")
    if not span:
      return self._answer(200, data, **about)
    first, last = span.removeprefix("bytes=").split("-")
    first = int(first) if first else len(data) - int(last)
    last = min(int(last) if last else len(data) - 1, len(data) - 1)
    if first > last:
      return self._error(416)
    about["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
    self._answer(206, data[first : last + 1], **about)

  def do_POST(self):
    _, bucket, name, query = self._where()
    if "upload_id" in query:
      return self.do_PUT()
    body = self._body()
    kind = query.get("uploadType", "media")
    if kind == "media":
      return self._put(bucket, query["name"], query, body)
    if kind == "multipart":
      mark = self.headers["Content-Type"].split("boundary=")[1].strip("'\"")
      about, data = map(_content, body.split(b"--" + mark.encode())[1:3])
      return self._put(bucket, json.loads(about)["name"], query, data)
    name = query.get("name") or json.loads(body)["name"]
    key = str(next(GENERATIONS))
    UPLOADS[key] = (bucket, name, query, bytearray())
    host = self.headers["Host"]
    link = f"http://{host}/upload/storage/v1/b/{bucket}/o?upload_id={key}"
    self._answer(200, {}, Location=link)

  def do_PUT(self):
    _, _, _, query = self._where()
    bucket, name, parameters, data = UPLOADS[query["upload_id"]]
    data += self._body()
    total = self.headers.get("Content-Range", "/*").rsplit("/", 1)[1]
    if total == "*" or len(data) < int(total):
      return self._answer(308, Range=f"bytes=0-{len(data) - 1}")
    self._put(bucket, name, parameters, data)

  def do_DELETE(self):
    _, bucket, name, query = self._where()
    with LOCK:
      code = self._refused(bucket, name, query)
      if code is None and not OBJECTS.pop((bucket, name), None):
        code = 404
    return self._error(code) if code else self._answer(204)


if __name__ == "__main__":
  address = ("127.0.0.1", int(sys.argv[1]))
  http.server.ThreadingHTTPServer(address, Handler).serve_forever()
