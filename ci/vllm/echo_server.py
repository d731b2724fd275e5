"""A server that answers each POST with the request's body, in two pieces, so that an answer can end after it has begun.

    python echo_server.py PORT
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", self.headers["content-type"])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        for piece in (body[: len(body) // 2], body[len(body) // 2 :]):
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
