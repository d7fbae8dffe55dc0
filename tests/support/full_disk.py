"""A disk that is full, as far as a file of this process can tell."""

import resource
from contextlib import contextmanager


@contextmanager
def largest_file(num_bytes):
    """No file of this process may grow beyond that: as on a disk that is full, the system refuses to write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
