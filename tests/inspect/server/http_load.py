"""Send many requests to a running server, and measure its memory, files and threads."""

import gc
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CLIENTS = 4


@dataclass(frozen=True)
class ResourceUsage:
    """Bytes of memory, open files, threads and tensors of this process."""

    memory: int
    files: int
    threads: int
    tensors: int


def measure_resources() -> ResourceUsage:
    """Measure the resources in use after a garbage collection."""
    import ctypes

    import torch

    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # return freed memory to the system, so that only memory in use counts
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = sum(1 for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return ResourceUsage(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        tensors,
    )


def wait_for_resources(most: ResourceUsage, patience: float = 120.0) -> ResourceUsage:
    """Wait until at most the files and threads of `most` are open, or the timeout; measure.

    The server closes a connection shortly after the client.
    """
    end = time.monotonic() + patience
    while True:
        found = measure_resources()
        fits = found.files <= most.files and found.threads <= most.threads
        if fits or time.monotonic() > end:
            return found
        time.sleep(0.2)


def send_requests(
    address: str, questions: Sequence[tuple[str, Any]], until: Callable[[int], bool]
) -> int:
    """Send these requests in turn from several clients until `until`; return how many.

    A request is a path and a body, or None for a GET. Each must succeed, or be rejected with an
    error message.
    """
    count, lock = 0, threading.Lock()

    def client() -> None:
        nonlocal count
        while True:
            with lock:
                if until(count):
                    return
                path, body = questions[count % len(questions)]
                count += 1
            status, response = send_request(address, path, body)
            assert status == 200 or (status in (400, 422) and b"error" in response), response[:300]

    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in [clients.submit(client) for _ in range(CLIENTS)]:
            done.result()
    return count


def send_request(address: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Send one request on a new connection; return the status and the body."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=600)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        found = connection.getresponse()
        return found.status, found.read()
    finally:
        connection.close()


def mixed_requests(
    models: Sequence[str], body: Callable[..., dict[str, Any]]
) -> list[tuple[str, Any]]:
    """Make a mix of requests: all models and maps, removals, pictures, and invalid ones."""
    found: list[tuple[str, Any]] = [("/", None), ("/serve.js", None), ("/api/models", None)]
    for model in models:
        found += [("/api/ask", body(model=model, map=way)) for way in ("attention", "gradient")]
        found.append(("/api/ask", body(model=model, without=[[0, 0, 0.5, 0.5]], unsaid=[[0, 4]])))
        found.append((f"/api/examples?model={model}", None))
    found = 3 * found
    found.append(("/api/ask", body(model=models[0], map="search")))
    found.append(("/api/picture", body(model=models[0])))
    found.append(("/api/ask", body(model="nobody")))
    found.append(("/api/ask", body(picture="AAAA")))
    return found
