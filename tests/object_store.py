"""A stand-in for Google Cloud Storage that keeps its promises and makes no others.

Objects are written whole, with conditions on their generation, and read whole or in ranges. Nothing
can be renamed, copied or appended to, and there are no folders. A request for anything else is
refused and remembered. The bucket "private" asks for a login; no other than the given one exists.
"""

import itertools
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 20
"""Number of objects in a response; Google's are of 1,000."""


class Object(NamedTuple):
    """The content of an object, and a number that is another one each time it is written."""

    content: bytes
    generation: int


class Response(NamedTuple):
    """Status, body and headers of a response."""

    status: int
    body: Any = b""  # bytes, or what JSON can hold
    headers: Mapping[str, Any] = MappingProxyType({})


class Bucket:
    """A bucket that a server on this machine holds in memory; to be closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.objects: dict[str, Object] = {}
        self.refused: list[str] = []
        self._uploads: dict[str, tuple[str, bytearray]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"bucket": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()

    def respond(self, method: str, url: str, headers: Any, body: bytes) -> Response:
        """Returns the response to a request."""
        path, values = urlsplit(url).path, parse_qs(urlsplit(url).query)
        query = {name: value[0] for name, value in values.items()}
        parts = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", path)
        if parts and parts[2] == "private":
            return _error(401, "Anonymous caller does not have storage.objects.list access")
        if parts and parts[2] != self.name:
            return _error(404, "The specified bucket does not exist.")
        with self._lock:
            match method, parts and parts[1], parts and unquote(parts[3] or ""):
                case "POST", "/upload", "":
                    return self._upload(query, headers, body)
                case "GET", None, "" if parts:
                    return self._list(query)
                case "GET", "/download" | None, str(name) if name:
                    return self._get(name, query, headers.get("Range"))
                case "DELETE", None, str(name) if name:
                    return self._delete(name, query)
            self.refused.append(f"{method} {url}")
            return _error(501, f"not an operation on objects: {method} {url}")

    def _resource(self, name: str) -> dict[str, str]:
        content, generation = self.objects[name]
        values = {"name": name, "size": str(len(content)), "generation": str(generation)}
        return {"kind": "storage#object", "bucket": self.name, **values}

    def _conflict(self, name: str, query: dict[str, str]) -> Response | None:
        generation = self.objects[name].generation if name in self.objects else 0
        if int(query.get("ifGenerationMatch", generation)) != generation:
            return _error(412, "At least one of the pre-conditions you specified did not hold.")
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            return Response(304)
        return None

    def _get(self, name: str, query: dict[str, str], bounds: str | None) -> Response:
        if name not in self.objects:
            return _error(404, f"No such object: {name}")
        if conflict := self._conflict(name, query):
            return conflict
        if query.get("alt") != "media":
            return Response(200, self._resource(name))
        content, generation = self.objects[name]
        headers: dict[str, Any] = {"X-Goog-Generation": generation}
        if bounds is None:
            return Response(200, content, headers)
        limits = re.fullmatch(r"bytes=(\d+)-(\d*)", bounds)
        assert limits is not None, bounds
        first, last = int(limits[1]), min(int(limits[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return Response(206, content[first : last + 1], headers)

    def _upload(self, query: dict[str, str], headers: Any, body: bytes) -> Response:
        """Writes an object in one request, or in several of which only the last one writes it."""
        if query["uploadType"] == "media":
            return self._put(query["name"], body, query)
        if "upload_id" not in query:
            number = str(next(self._numbers))
            self._uploads[number] = (query["name"], bytearray())
            place = f"/upload/storage/v1/b/{self.name}/o?uploadType=resumable&upload_id={number}"
            return Response(200, headers={"Location": self.url + place})
        name, content = self._uploads[query["upload_id"]]
        content += body
        if headers["Content-Range"].endswith("/*"):
            return Response(308, headers={"Range": f"bytes=0-{len(content) - 1}"})
        assert headers["Content-Range"].endswith(f"/{len(content)}")
        return self._put(name, bytes(content), query)

    def _put(self, name: str, content: bytes, query: dict[str, str]) -> Response:
        if conflict := self._conflict(name, query):
            return conflict
        self.objects[name] = Object(content, next(self._numbers))
        return Response(200, self._resource(name))

    def _delete(self, name: str, query: dict[str, str]) -> Response:
        if name not in self.objects:
            return _error(404, f"No such object: {name}")
        if conflict := self._conflict(name, query):
            return conflict
        del self.objects[name]
        return Response(204)

    def _list(self, query: dict[str, str]) -> Response:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        entries: dict[str, bool] = {}  # whether it is an object, or the beginning of names
        for name in sorted(self.objects):
            if name.startswith(prefix) and first <= name < end:
                rest = name.removeprefix(prefix)
                inner = delimiter is not None and delimiter in rest
                short = prefix + rest.partition(str(delimiter))[0] + str(delimiter)
                entries[short if inner else name] = not inner
        left = [name for name in entries if name > query.get("pageToken", "")]
        shown = left[: min(PAGE, int(query.get("maxResults", PAGE)))]
        listing = {
            "kind": "storage#objects",
            "items": [self._resource(name) for name in shown if entries[name]],
            "prefixes": [name for name in shown if not entries[name]],
        }
        token = {"nextPageToken": shown[-1]} if len(shown) < len(left) else {}
        return Response(200, listing | token)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients hang up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # a response is one packet
    bucket: Bucket

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, content, headers = self.bucket.respond(self.command, self.path, self.headers, body)
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _error(status: int, message: str) -> Response:
    return Response(status, {"error": {"code": status, "message": message}})
