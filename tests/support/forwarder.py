"""A port that leads elsewhere, so that a server behind it can go away and come back without a second start of it."""

import socket
import threading
from contextlib import suppress
from socketserver import ThreadingTCPServer


class Forwarder(ThreadingTCPServer):
    """Hands each connection on; `close` ends those that are open and refuses further ones, as the end of a server does.

    Args:
        connect: gives a socket that is connected to the server.
        port: of this machine; 0: any.
    """

    allow_reuse_address = daemon_threads = True
    request_queue_size = 64

    def __init__(self, connect, port=0):
        super().__init__(("127.0.0.1", port), None)
        self.connect, self.connected, self.is_open = connect, set(), True
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def finish_request(self, request, client_address):
        with self.connect() as there:
            self.connected.update((request, there))
            if self.is_open:
                back = threading.Thread(target=_copy, args=(there, request))
                back.start()
                _copy(request, there)
                back.join()
            self.connected.difference_update((request, there))

    def close(self):
        self.is_open = False
        self.shutdown()
        self.server_close()
        for one in [*self.connected]:
            with suppress(OSError):  # it has ended by itself
                one.shutdown(socket.SHUT_RDWR)


def _copy(source, target):
    with suppress(OSError):  # who has its answer leaves
        while content := source.recv(2**16):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)
