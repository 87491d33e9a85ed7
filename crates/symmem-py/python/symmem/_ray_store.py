"""A store through which ranks find each other, with the methods of torch's. One process serves it in a thread; needs neither torch nor Ray.

A request and its answer are a line of JSON each. The first line of a connection is the token of the store: an address that was announced
by a process that is gone may be that of another store by now.
"""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import threading
from collections.abc import Sequence

#: Seconds in which a store answers.
LIMIT = 20.0
#: Seconds in which a connection shows the token, and how many connections may be without it at once.
PATIENCE = 5.0
STRANGERS = 256


class Server:
    """Serves a store at a free port of this host."""

    def __init__(self, host: str, token: str) -> None:
        self._server = _Listener((host, 0), _Connection)
        self._server.token = token
        self._server.table = {}
        self._server.lock = threading.Lock()
        #: What `Store` takes.
        self.address = [host, self._server.server_address[1], token]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="symmem-store", daemon=True).start()

    def close(self) -> None:
        """Serve no new connections. Those that exist go on until their ends close them."""
        self._server.shutdown()
        self._server.server_close()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    token: str
    table: dict[str, str]
    lock: threading.Lock

    def __init__(self, address: tuple[str, int], handler: type) -> None:
        self.strangers = threading.BoundedSemaphore(STRANGERS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Whether the connection gets a thread."""
        return self.strangers.acquire(blocking=False)


class _Connection(socketserver.StreamRequestHandler):
    server: _Listener
    disable_nagle_algorithm = True
    is_stranger = True

    def known(self) -> None:
        """Make room for another stranger."""
        if self.is_stranger:
            self.is_stranger = False
            self.server.strangers.release()

    def finish(self) -> None:
        """After `handle`."""
        self.known()
        super().finish()

    def handle(self) -> None:
        """Answer one end's requests until it closes."""
        try:
            self.connection.settimeout(PATIENCE)
            given = self.rfile.readline(100).strip()
            if not hmac.compare_digest(given, self.server.token.encode()):
                return
            self.known()
            self.connection.settimeout(None)
            self.wfile.write(b"ok\n")
            for line in self.rfile:
                with self.server.lock:
                    answer = _answer(self.server.table, **json.loads(line))
                self.wfile.write(json.dumps(answer).encode() + b"\n")
        except OSError:
            pass  # the other end is gone


def _answer(
    table: dict[str, str], do: str, key: str = "", value: str = "", expected: str = "", amount: int = 0
) -> object:
    """One request. Values are bytes, as the characters of the same numbers."""
    held = table.get(key)
    if do == "get":
        return held
    if do == "add":
        table[key] = str(int(held or "0") + amount)
        return int(table[key])
    if do == "compare_set":
        if held == expected or (held is None and not expected):
            table[key] = value
            return value
        return expected if held is None else held
    if do == "delete":
        return table.pop(key, None) is not None
    if do == "count":
        return len(table)
    table[key] = (held or "") + value if do == "append" else value
    return None


class Store:
    """One end of a connection to a store."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, port), LIMIT)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._file = self._socket.makefile("rwb")
            self._file.write(token.encode() + b"\n")
            self._file.flush()
            if self._file.readline(10) != b"ok\n":
                raise ConnectionRefusedError(f"{host}:{port} is another store")
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        # Of a file that still has something to write, this may fail.
        for end in (self._file, self._socket):
            try:
                end.close()
            except OSError:
                pass

    def _ask(self, **request: object) -> object:
        with self._lock:
            self._file.write(json.dumps(request).encode() + b"\n")
            self._file.flush()
            answer = self._file.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionError("the process that served the store is gone")
        return json.loads(answer)

    # The methods of torch's stores.

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._ask(do="set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        held = self._ask(do="get", key=key)
        if held is None:
            raise KeyError(key)
        return _bytes(held)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; the sum."""
        return self._ask(do="add", key=key, amount=amount)

    def compare_set(self, key: str, expected: bytes, new: bytes) -> bytes:
        """Set the value of a key that has the expected one, or that is missing as expected; what it has then."""
        return _bytes(self._ask(do="compare_set", key=key, expected=_text(expected), value=_text(new)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return all(self._ask(do="get", key=key) is not None for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        return self._ask(do="delete", key=key)

    def append(self, key: str, value: bytes) -> None:
        """Append to the value of a key."""
        self._ask(do="append", key=key, value=_text(value))

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask(do="count")


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _bytes(value: str) -> bytes:
    return value.encode("latin-1")
