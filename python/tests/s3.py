"""A server of S3 in memory, of as much as a reader and a writer of whole objects need. It prints its address."""

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

objects: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        objects[self.path.split("?")[0]] = body
        self.answer(200, headers=[("ETag", tag(body))])

    def do_GET(self):
        body = objects.get(self.path.split("?")[0])
        if body is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = [("ETag", tag(body)), ("Last-Modified", "Fri, 01 Jan 2027 00:00:00 GMT")]
        wanted = self.headers.get("Range")
        if wanted is None:
            self.answer(200, body, headers)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        start = int(first) if first else max(0, len(body) - int(last))
        end = min(int(last) + 1, len(body)) if first and last else len(body)
        headers.append(("Content-Range", f"bytes {start}-{end - 1}/{len(body)}"))
        self.answer(206, body[start:end], headers)

    do_HEAD = do_GET


def tag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
