"""Many requests to a running server, and what it holds before and after: memory, files, threads."""

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
class Holding:
    """What this process holds: bytes of memory, open files, threads, tensors."""

    memory: int
    files: int
    threads: int
    tensors: int


def holding() -> Holding:
    """What is held now, after the garbage was collected."""
    import ctypes

    import torch

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that only what is kept counts
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = sum(1 for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return Holding(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        tensors,
    )


def settled(most: Holding, patience: float = 120.0) -> Holding:
    """What is held once no more files and threads are open than `most` has, or time is up.

    The server lets go of a connection a moment after whoever asked has.
    """
    end = time.monotonic() + patience
    while True:
        found = holding()
        fits = found.files <= most.files and found.threads <= most.threads
        if fits or time.monotonic() > end:
            return found
        time.sleep(0.2)


def ask(address: str, questions: Sequence[tuple[str, Any]], until: Callable[[int], bool]) -> int:
    """Ask these, one after the other, by several clients at once, until it is enough; how many.

    A question is a path and a body, or None for one without. All have to be answered, or refused in
    a sentence.
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
            status, told = once(address, path, body)
            assert status == 200 or (status in (400, 422) and b"error" in told), told[:300]

    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in [clients.submit(client) for _ in range(CLIENTS)]:
            done.result()
    return count


def once(address: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """One request on a connection of its own: the status and all that was sent back."""
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


def mixed(models: Sequence[str], body: Callable[..., dict[str, Any]]) -> list[tuple[str, Any]]:
    """Questions as people mix them: all models and maps, removals, pictures, and what is wrong."""
    found: list[tuple[str, Any]] = [("/", None), ("/serve.js", None), ("/api/models", None)]
    for model in models:
        found += [("/api/ask", body(model=model, map=way)) for way in ("raw", "gradient")]
        found.append(("/api/ask", body(model=model, without=[[0, 0, 0.5, 0.5]], unsaid=[[0, 4]])))
        found.append((f"/api/examples?model={model}", None))
    found = 3 * found
    found.append(("/api/ask", body(model=models[0], map="search")))
    found.append(("/api/picture", body(model=models[0])))
    found.append(("/api/ask", body(model="nobody")))
    found.append(("/api/ask", body(picture="AAAA")))
    return found
