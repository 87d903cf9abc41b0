"""Files and folders: atomic writes, manifests, locks, corrupt content and resource limits."""

import builtins
import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from overt import io as overt_io
from overt import system
from overt.errors import CorruptFileError, RunError, UserError
from tests.trust.mutants import mutate, snapshot

SIZE = 40


def save(folder, value=0, size=SIZE):
    """Save a checkpoint of three files, one in a subfolder, all filled with one value."""
    with overt_io.atomic_folder(folder) as temporary:
        fill(temporary, value, size)


def fill(folder, value, size=SIZE):
    overt_io.write_tensors(folder / "model.safetensors", {"w": weights(value, size)})
    overt_io.write_json(folder / "state.json", {"step": value})
    overt_io.write_arrays(folder / "extra" / "order.npz", {"order": np.arange(20) + value})


def weights(value, size):
    """Create weights by NumPy: a parallel torch operation would hang in a forked child."""
    return torch.from_numpy(np.full(size, value, np.float32))


def naive_save(folder, value=0, size=SIZE):
    """Save non-atomically: write each file directly to its place."""
    from safetensors.torch import save

    (folder / "extra").mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps({"step": value}))
    (folder / "model.safetensors").write_bytes(save({"w": weights(value, size)}))
    np.savez(folder / "extra" / "order.npz", order=np.arange(20) + value)


def load(folder):
    overt_io.verify(folder)
    return naive_load(folder)


def naive_load(folder):
    """Return the common value of all three files without checking the manifest."""
    value = overt_io.read_json(folder / "state.json")["step"]
    weights = overt_io.read_tensors(folder / "model.safetensors")["w"]
    order = overt_io.read_arrays(folder / "extra" / "order.npz")["order"]
    assert (weights == value).all() and (order == np.arange(20) + value).all()
    return value


def file_names(folder):
    return sorted(path.name for path in folder.iterdir())


def run_in_child(work):
    """Run `work` in a child process and return its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return child


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lock_in_child(folder, then=lambda: time.sleep(600)):
    """Start a child that locks `folder`; return after the lock is taken."""
    reader, writer = os.pipe()

    def hold():
        with overt_io.lock(folder):
            os.write(writer, b"held")
            then()

    child = run_in_child(hold)
    assert os.read(reader, 4) == b"held"
    os.close(reader)
    os.close(writer)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def temporary_name(folder, kind, *, pid, start=None, machine=None):
    """Return the name of a temporary folder of the process `pid` next to `folder`."""
    start = system.process_start(pid) if start is None else start
    return folder.with_name(
        f".{kind}-{machine or overt_io._machine_id()}-{pid}-{start}-0-{folder.name}"
    )


# Folders


def test_a_saved_folder_is_read_back_and_leaves_no_temporaries(tmp_path):
    save(tmp_path / "deep" / "c", 3)
    assert load(tmp_path / "deep" / "c") == 3
    assert file_names(tmp_path / "deep") == ["c"]
    manifest = overt_io.verify(tmp_path / "deep" / "c")
    assert list(manifest["files"]) == ["extra/order.npz", "model.safetensors", "state.json"]
    for name, entry in manifest["files"].items():
        path = tmp_path / "deep" / "c" / name
        foreign = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
        assert entry == {"size": path.stat().st_size, "sha256": foreign.stdout.split()[0]}
        assert overt_io.digest(path) == entry["sha256"]


def test_a_folder_is_replaced(tmp_path):
    save(tmp_path / "c", 1)
    save(tmp_path / "c", 2)
    assert load(tmp_path / "c") == 2
    assert file_names(tmp_path) == ["c"]


def test_files_are_synced_before_the_rename_and_the_parent_after_it(tmp_path, monkeypatch):
    save(tmp_path / "c")
    done, fsync, replace = [], os.fsync, os.replace

    def note_fsync(descriptor):
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def note_replace(source, target):
        replace(source, target)
        done.append((source, target))

    with overt_io.atomic_folder(tmp_path / "c") as new:
        (new / "sub").mkdir()
        (new / "sub" / "a").write_text("a")
        (new / "b").write_text("b")
        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "replace", note_replace)
    files_first, manifest, folders = done[:2], done[2], done[3:5]
    assert files_first == [new / "b", new / "sub" / "a"] and manifest == new / overt_io.MANIFEST
    assert folders == [new / "sub", new]
    (old, aside), put_in_place, parent = done[5:8]
    assert old == tmp_path / "c" and aside.name.startswith(".old-")
    assert put_in_place == (new, tmp_path / "c") and parent == tmp_path
    assert [source for source, _ in done[8:]] == [aside]  # the old folder is deleted last


def test_files_in_an_open_folder_are_synced_once(tmp_path, monkeypatch):
    """Only the end of `atomic_folder` makes a folder durable: its files need no fsync before."""
    done, fsync = [], os.fsync

    def note_fsync(descriptor):
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", note_fsync)
    with overt_io.atomic_folder(tmp_path / "c") as new:
        fill(new, 1)
        assert done == []
    inside = [new / name for name in ("extra/order.npz", "model.safetensors", "state.json")]
    assert done == [*inside, new / overt_io.MANIFEST, new / "extra", new, tmp_path]
    done.clear()
    overt_io.write_json(tmp_path / "alone.json", {})
    assert [path.name for path in done] == ["alone.json", tmp_path.name]


def test_files_in_an_open_folder_are_written_atomically(tmp_path, monkeypatch):
    with overt_io.atomic_folder(tmp_path / "c") as new:
        fill(new, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: raise_no_space())
            with pytest.raises(RunError):
                overt_io.write_json(new / "state.json", {"step": 2})
    assert load(tmp_path / "c") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, FileNotFoundError])
def test_an_exception_in_the_body_is_propagated_and_keeps_the_old_folder(tmp_path, error):
    save(tmp_path / "c", 1)

    def fail():
        with overt_io.atomic_folder(tmp_path / "c") as temporary:
            fill(temporary, 2)
            raise error

    with pytest.raises(error):
        fail()
    assert load(tmp_path / "c") == 1
    assert file_names(tmp_path) == ["c"]


def test_a_forked_child_does_not_remove_the_folder_of_its_parent(tmp_path):
    child = None
    try:
        with overt_io.atomic_folder(tmp_path / "c") as temporary:
            fill(temporary, 1)
            child = os.fork()
            if child == 0:
                raise SystemExit
            os.waitpid(child, 0)
    except SystemExit:
        os._exit(0)
    assert load(tmp_path / "c") == 1


def test_unlisted_files_are_kept_when_a_folder_is_replaced(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("years of work")
    save(tmp_path / "c", 1)
    (tmp_path / "c" / "notes.txt").write_text("mine")
    save(tmp_path / "c", 2)
    assert load(tmp_path / "c") == 2
    assert file_names(tmp_path) == ["c", "c.replaced-1", "c.replaced-2"]
    assert (tmp_path / "c.replaced-1" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "c.replaced-2" / "notes.txt").read_text() == "mine"
    assert overt_io.newest(tmp_path, "c") == (tmp_path / "c", [])


def test_links_and_a_user_manifest_in_a_folder_raise(tmp_path):
    with (
        pytest.raises(UserError, match="link"),
        overt_io.atomic_folder(tmp_path / "c") as temporary,
    ):
        (temporary / "link").symlink_to("/etc/passwd")
    with (
        pytest.raises(UserError, match=r"manifest\.json"),
        overt_io.atomic_folder(tmp_path / "c") as folder,
    ):
        (folder / overt_io.MANIFEST).write_text("{}")
    assert file_names(tmp_path) == []


# Faults: the n-th system call fails, once or from then on

CALLS = [(os, "fsync"), (os, "replace"), (os, "mkdir"), (builtins, "open"), (os, "open")]


def count_calls(monkeypatch, work, module, call):
    """Count how often `work` makes this call."""
    made = []
    true = getattr(module, call)
    with monkeypatch.context() as patch:
        patch.setattr(module, call, lambda *a, **k: made.append(a) or true(*a, **k))
        work()
    return len(made)


def break_at(patch, module, call, number, act, ever_after):
    """Make the `number`-th call (and later ones) run `act` instead."""
    true, made = getattr(module, call), [0]

    def broken(*arguments, **options):
        made[0] += 1
        if made[0] == number or (ever_after and made[0] > number):
            act()
        return true(*arguments, **options)

    patch.setattr(module, call, broken)


def raise_no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.long
@pytest.mark.parametrize("ever_after", [False, True], ids=["once", "ever after"])
@pytest.mark.parametrize(("module", "call"), CALLS, ids=[call for _, call in CALLS])
def test_the_previous_copy_survives_every_fault(tmp_path, monkeypatch, module, call, ever_after):
    folder = tmp_path / "c"
    save(folder, 1)
    count = count_calls(monkeypatch, lambda: save(folder, 1), module, call)
    assert count >= 3  # 40 in total
    for number in range(1, count + 1):
        with monkeypatch.context() as patch:
            break_at(patch, module, call, number, raise_no_space, ever_after)
            try:
                save(folder, 2)
                message = ""
            except RunError as error:
                message = str(error)
        if message:
            assert re.search(rf"{folder}\S* \(\d+ bytes\): No space left", message)
            assert ever_after or file_names(tmp_path) == ["c"]
            assert load(folder) in ((1, 2) if ever_after else (1,))
        else:  # the new copy was in place, and only the removal of the old one failed
            assert load(folder) == 2
        overt_io.remove_stale_temporaries(tmp_path)
        assert set(file_names(tmp_path)) <= {"c", "c.replaced-1"}
        shutil.rmtree(tmp_path / "c.replaced-1", ignore_errors=True)
        save(folder, 1)


@pytest.mark.long
@pytest.mark.parametrize(("module", "call"), CALLS[:4], ids=[call for _, call in CALLS[:4]])
def test_an_intact_copy_survives_a_dead_writer_at_any_call(tmp_path, monkeypatch, module, call):
    folder = tmp_path / "c"
    save(folder, 1)
    for number in range(1, count_calls(monkeypatch, lambda: save(folder, 1), module, call) + 1):

        def write(number=number):
            break_at(pytest.MonkeyPatch(), module, call, number, lambda: os._exit(9), False)
            save(folder, 2)

        assert exit_code(run_in_child(write)) == 9
        found, broken = overt_io.newest(tmp_path, "c")
        assert found == folder and broken == [] and load(folder) in (1, 2)
        overt_io.remove_stale_temporaries(tmp_path)
        assert file_names(tmp_path) == ["c"]
        save(folder, 1)


def test_a_folder_renamed_by_a_dead_writer_is_restored(tmp_path):
    folder = tmp_path / "c"
    dead = run_in_child(lambda: None)
    start = system.process_start(dead) or 0
    exit_code(dead)
    aside = temporary_name(folder, "old", pid=dead, start=start)
    for recover in (
        lambda: overt_io.verify(folder),
        lambda: overt_io.newest(tmp_path, "c"),
        lambda: overt_io.remove_stale_temporaries(tmp_path),
    ):
        save(folder, 1)
        folder.rename(aside)
        recover()
        assert file_names(tmp_path) == ["c"] and load(folder) == 1
    save(aside, 0)
    overt_io.remove_stale_temporaries(
        tmp_path
    )  # the writer died after the rename of the new folder
    assert file_names(tmp_path) == ["c"] and load(folder) == 1
    save(aside, 0)
    (folder / "state.json").write_text("{}")
    overt_io.remove_stale_temporaries(tmp_path)  # an intact copy is not deleted for a corrupt one
    assert load(aside) == 0


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_place_raises_user_error(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match=rf"{tmp_path}/c .*written"):
        save(tmp_path / "c")
    with pytest.raises(UserError, match=rf"{tmp_path}/a\.json.*written"):
        overt_io.write_json(tmp_path / "a.json", {})
    assert file_names(tmp_path) == []


def test_invalid_paths_raise_user_error(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for path in ("file", "file/below", "link", "x" * 300, "a\0b", "/"):
        with pytest.raises(UserError), overt_io.atomic_folder(tmp_path / path):
            pytest.fail("the body should not run")
    for path in ("folder", "file/below", "link", "x" * 300, "a\0b"):
        with pytest.raises(UserError):
            overt_io.write_text(tmp_path / path, "text")
    assert file_names(tmp_path) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "text"


# A full disk


def write_too_much(kind, path):
    """Write more than the limit of the tests below, by each write function."""
    if kind == "tensors":
        overt_io.write_tensors(path, {"w": weights(0, 2**19)})
    elif kind == "arrays":
        overt_io.write_arrays(path, {"w": np.zeros(2**19, np.float32)})
    elif kind == "text":
        overt_io.write_text(path, " " * 2**21)
    else:
        with overt_io.atomic_folder(path) as temporary, open(temporary / "raw", "wb") as file:
            file.write(bytes(2**21))


@pytest.mark.parametrize("kind", ["tensors", "arrays", "text", "folder"])
def test_a_full_disk_raises_with_path_and_bytes_and_leaves_no_file(tmp_path, kind):
    import resource

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with pytest.raises(RunError, match=rf"{tmp_path}/new \(\d{{7}} bytes\): File too large"):
            write_too_much(kind, tmp_path / "new")
        with (
            pytest.raises(RunError, match=rf"{tmp_path}/c"),
            overt_io.atomic_folder(tmp_path / "c") as folder,
        ):
            write_too_much(kind, folder / "new")

    save(tmp_path / "c", 1)
    assert exit_code(run_in_child(write)) == 0
    assert load(tmp_path / "c") == 1 and file_names(tmp_path) == ["c"]


# Mutations


def count_accepted_mutations(tmp_path, count, read):
    """Count the mutated checkpoints that `read` accepts, and collect the other exceptions."""
    save(tmp_path / "true", 7)
    save(tmp_path / "other", 8)
    before = snapshot(tmp_path / "true")
    silent, raised, chance = 0, set(), random.Random(0)
    for _ in range(count):
        folder = tmp_path / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "true", folder)
        mutate(folder, tmp_path / "other", chance)
        after = {tmp_path / "true" / p.relative_to(folder): d for p, d in snapshot(folder).items()}
        if after == before:
            continue  # unchanged bytes
        try:
            read(folder)
            silent += 1
        except Exception as error:
            raised.add(type(error))
    return silent, raised


def raw_load(folder):
    """Load without a manifest: only the file formats detect errors."""
    from safetensors.torch import load_file

    for name in ("model.safetensors", "state.json", "extra/order.npz"):
        if not (folder / name).is_file():
            raise FileNotFoundError(name)
    json.loads((folder / "state.json").read_text())
    load_file(folder / "model.safetensors")
    dict(np.load(folder / "extra" / "order.npz"))


def test_every_mutated_checkpoint_raises_corrupt_file_error(tmp_path):
    assert count_accepted_mutations(tmp_path, 200, load) == (0, {CorruptFileError})


def test_a_reader_without_a_manifest_accepts_some_mutations(tmp_path):
    silent, raised = count_accepted_mutations(tmp_path, 150, raw_load)
    assert silent > 30 and len(raised) > 3


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "extra/order.npz"])
def test_a_mutated_file_is_read_or_raises_corrupt_file_error(tmp_path, name):
    save(tmp_path / "c")
    data, chance = (tmp_path / "c" / name).read_bytes(), random.Random(0)
    read = {
        ".safetensors": overt_io.read_tensors,
        ".json": overt_io.read_json,
        ".npz": overt_io.read_arrays,
    }
    path = tmp_path / "mutant"
    for _ in range(200):
        mutant = bytearray(data)
        for _ in range(chance.randrange(1, 5)):
            mutant[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(mutant[: chance.choice([len(data), chance.randrange(len(data))])])
        with suppress(CorruptFileError):
            read[Path(name).suffix](path)


# Manifests


def write_forged_manifest(folder, listed, closed=True):
    """Write a manifest with a valid checksum, as an attacker could."""
    entries = {name: {"size": 4, "sha256": "0" * 64} for name in listed}
    body = {"format": 1, "closed": closed, "files": entries}
    folder.mkdir(exist_ok=True)
    (folder / overt_io.MANIFEST).write_text(overt_io._manifest_text(body))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "", ".", "a\0b"]
)
def test_a_manifest_with_paths_outside_its_folder_raises(tmp_path, name):
    (tmp_path / "x").write_text("text")
    write_forged_manifest(tmp_path / "c", [name])
    with pytest.raises(CorruptFileError, match="invalid file name"):
        overt_io.verify(tmp_path / "c")
    with pytest.raises(UserError, match="plain name"):
        overt_io.write_manifest(tmp_path / "c", [name])


def test_a_link_instead_of_a_file_is_not_followed(tmp_path):
    with overt_io.atomic_folder(tmp_path / "c") as folder:
        (folder / "file").write_text("text")
    (tmp_path / "xy").write_text("text")
    (tmp_path / "c" / "file").unlink()
    (tmp_path / "c" / "file").symlink_to("../xy")
    manifest = json.loads((tmp_path / "c" / overt_io.MANIFEST).read_text())
    manifest["files"]["file"]["size"] = len("../xy")  # the size of the link itself
    (tmp_path / "c" / overt_io.MANIFEST).write_text(overt_io._manifest_text(manifest))
    with pytest.raises(CorruptFileError, match="is a link"):
        overt_io.verify(tmp_path / "c")


def test_a_linked_subfolder_is_not_followed(tmp_path):
    save(tmp_path / "c")
    (tmp_path / "c" / "extra").rename(tmp_path / "extra")
    (tmp_path / "c" / "extra").symlink_to(tmp_path / "extra")
    with pytest.raises(CorruptFileError, match=r"order\.npz.*missing"):
        overt_io.verify(tmp_path / "c")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{}",
        '{"files": []}',
        overt_io._manifest_text({"format": 2, "closed": True, "files": {}}),
        overt_io._manifest_text({"format": 1, "closed": True, "files": []}),
        overt_io._manifest_text({"format": 1, "closed": "yes", "files": {}}),
        overt_io._manifest_text({"format": 1, "closed": True, "files": {"a": 3}}),
        overt_io._manifest_text({"format": 1, "closed": True, "files": {}}) + " ",
    ],
)
def test_an_invalid_manifest_raises(tmp_path, text):
    (tmp_path / "a").write_text("text")
    (tmp_path / overt_io.MANIFEST).write_text(text)
    with pytest.raises(CorruptFileError, match=r"manifest\.json"):
        overt_io.verify(tmp_path)


def test_unlisted_files_raise_except_hidden_ones(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".DS_Store").write_text("")
    assert overt_io.is_intact(tmp_path)
    (tmp_path / "notes").write_text("")
    assert not overt_io.is_intact(tmp_path)
    with pytest.raises(CorruptFileError, match=r"notes.*not listed"):
        overt_io.verify(tmp_path)


def test_a_missing_folder_raises(tmp_path):
    for name in ("none", "a\0b", "x" * 300):
        with pytest.raises(CorruptFileError, match="missing"):
            overt_io.verify(tmp_path / name)
        with pytest.raises(CorruptFileError):
            overt_io.digest(tmp_path / name)


def test_only_listed_files_are_checked(tmp_path):
    fill(tmp_path, 1)
    overt_io.write_manifest(tmp_path, ["state.json", "extra/order.npz"])
    (tmp_path / "log.txt").write_text("free to change")
    assert list(overt_io.verify(tmp_path)["files"]) == ["extra/order.npz", "state.json"]
    (tmp_path / "state.json").write_text('{"step": 2}\n')
    with pytest.raises(CorruptFileError, match=r"state\.json"):
        overt_io.verify(tmp_path)
    overt_io.write_manifest(tmp_path, ["state.json"])
    assert overt_io.is_intact(tmp_path)
    (tmp_path / "link").symlink_to("state.json")
    for name in ("none", "extra", "link"):
        with pytest.raises(UserError, match="regular file"):
            overt_io.write_manifest(tmp_path, [name])
    assert overt_io.is_intact(tmp_path)


# Single files


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nul",
        "[NaN]",
        "[-Infinity]",
        "[1e999]",
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 2}}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        "{} {}",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"\0",
    ],
    ids=range(15),
)
def test_invalid_json_raises(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CorruptFileError, match=r"a\.json"):
        overt_io.read_json(path)


def test_a_too_large_file_is_not_read(tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(overt_io._LARGEST_JSON + 1)
    with pytest.raises(CorruptFileError, match="at most"):
        overt_io.read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    "read",
    [overt_io.read_json, overt_io.read_tensors, overt_io.read_metadata, overt_io.read_arrays],
)
def test_reading_pipes_and_folders_raises_without_blocking(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none", ".", "a\0b", "x" * 300):
        with pytest.raises(CorruptFileError):
            read(tmp_path / name)


def test_unpaired_surrogates_in_json_raise():
    """It cannot be printed, written or sent as UTF-8."""
    for text in (b'"\\ud800"', b'{"\\uDC00": 1}', b'["\\ude00\\ud83d"]'):
        with pytest.raises(CorruptFileError, match="surrogates"):
            overt_io.parse_json(text, Path("x.json"))
    assert (
        overt_io.parse_json(b'"\\ud83d\\ude00 \\\\ud800"', Path("x.json")) == "\U0001f600 \\ud800"
    )


def test_json_round_trip(tmp_path):
    value = {"a": [1, 2.5, None, True, "é\n\u2028"], "big": 10**40, "": {}}
    overt_io.write_json(tmp_path / "deep" / "a.json", value)
    assert overt_io.read_json(tmp_path / "deep" / "a.json") == value
    assert file_names(tmp_path / "deep") == ["a.json"]


def test_values_invalid_in_json_raise_and_keep_the_old_file(tmp_path):
    overt_io.write_json(tmp_path / "a.json", 1)
    loop = []
    loop.append(loop)
    for value in (float("nan"), {"a": [float("inf")]}, loop, "\ud800"):
        with pytest.raises(UserError, match=r"a\.json"):
            overt_io.write_json(tmp_path / "a.json", value)
    assert overt_io.read_json(tmp_path / "a.json") == 1


def test_a_single_file_is_replaced_atomically(tmp_path):
    overt_io.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(ZeroDivisionError), overt_io.atomic_file(tmp_path / "a.txt") as temporary:
        temporary.write_text(f"new {1 / 0}")
    assert (tmp_path / "a.txt").read_text() == "old"
    with overt_io.atomic_file(tmp_path / "a.txt") as temporary:
        assert temporary.name == "a.txt"  # libraries that check the suffix see the final one
        temporary.write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert file_names(tmp_path) == ["a.txt"]


def test_tensors_round_trip_tied_strided_or_empty(tmp_path):
    weights = torch.randn(4, 6)
    tensors = {
        "weights": weights,
        "tied": weights,
        "transposed": weights.T,
        "part": weights[1:, ::2],
        "half": weights.bfloat16(),
        "flags": weights > 0,
        "step": torch.tensor(3),
        "none": torch.zeros(0, 5),
        "gradient": weights.clone().requires_grad_(),
    }
    overt_io.write_tensors(tmp_path / "t", tensors, {"b": "2", "a": "1"})
    back = overt_io.read_tensors(tmp_path / "t")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    assert overt_io.read_metadata(tmp_path / "t") == {"a": "1", "b": "2"}
    overt_io.write_tensors(tmp_path / "t", {})
    assert (
        overt_io.read_tensors(tmp_path / "t") == {} and overt_io.read_metadata(tmp_path / "t") == {}
    )
    with pytest.raises(UserError, match="complex128"):
        overt_io.write_tensors(tmp_path / "t", {"a": torch.zeros(1, dtype=torch.complex128)})


def test_the_same_content_gives_the_same_bytes(tmp_path):
    about = {letter: letter for letter in "qwertyuiop"}
    for name in ("1", "2"):
        overt_io.write_tensors(
            tmp_path / f"{name}.t", {"b": torch.ones(3), "a": torch.ones(2)}, about
        )
        overt_io.write_arrays(tmp_path / f"{name}.n", {"b": np.ones(3), "a": np.ones(2)})
        time.sleep(0.01)
    assert (tmp_path / "1.t").read_bytes() == (tmp_path / "2.t").read_bytes()
    assert (tmp_path / "1.n").read_bytes() == (tmp_path / "2.n").read_bytes()


def test_file_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        save(tmp_path / "c")
    finally:
        os.umask(old)
    for path in (tmp_path / "c").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


def test_arrays_round_trip_and_numpy_reads_them(tmp_path):
    arrays = {
        "file": np.arange(6).reshape(2, 3),
        "a/b.npy": np.asfortranarray(np.ones((3, 2), np.float16)),
        "text": np.array(["é", "abc"]),
        "none": np.zeros((0, 3)),
        "one": np.array(5, np.uint8),
    }
    overt_io.write_arrays(tmp_path / "a.npz", arrays)
    foreign = np.load(tmp_path / "a.npz")
    back = overt_io.read_arrays(tmp_path / "a.npz")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, strict=True)
    np.testing.assert_array_equal(foreign["file"], arrays["file"])


def test_pickled_and_compressed_arrays_raise(tmp_path):
    things = np.array([{"a": 1}, None], dtype=object)
    with pytest.raises(UserError, match="objects"):
        overt_io.write_arrays(tmp_path / "a.npz", {"things": things})
    np.savez(tmp_path / "a.npz", things=things)
    with pytest.raises(CorruptFileError, match=r"a\.npz"):
        overt_io.read_arrays(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "b.npz", bomb=np.zeros(2**20))
    with pytest.raises(CorruptFileError, match="compressed"):
        overt_io.read_arrays(tmp_path / "b.npz")


# Newest, prune and stale temporaries


def test_newest_sorts_by_number_and_skips_corrupt_folders(tmp_path):
    assert overt_io.newest(tmp_path / "none", "step-") == (None, [])
    for step in (9, 10, 100):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-999").symlink_to(tmp_path / "step-9")
    (tmp_path / "step-notes.txt").write_text("")
    assert overt_io.newest(tmp_path, "step-") == (tmp_path / "step-100", [])
    (tmp_path / "step-100" / "state.json").write_text("{}")
    assert overt_io.newest(tmp_path, "step-") == (tmp_path / "step-10", [tmp_path / "step-100"])
    (tmp_path / "step-10" / overt_io.MANIFEST).unlink()
    (tmp_path / "step-9" / "model.safetensors").unlink()
    broken = [tmp_path / "step-100", tmp_path / "step-10", tmp_path / "step-9"]
    assert overt_io.newest(tmp_path, "step-") == (None, broken)


def test_prune_keeps_the_newest(tmp_path):
    for step in range(8, 12):
        save(tmp_path / f"step-{step}", step)
    save(tmp_path / "best", 1)
    removed = overt_io.prune(tmp_path, "step-", 2)
    assert removed == [tmp_path / "step-9", tmp_path / "step-8"]
    assert file_names(tmp_path) == ["best", "step-10", "step-11"]
    with pytest.raises(UserError, match="at least 1"):
        overt_io.prune(tmp_path, "step-", 0)


def test_corrupt_folders_do_not_count_as_kept_in_prune(tmp_path):
    for step in range(4):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-3" / "state.json").write_text("")
    assert overt_io.prune(tmp_path, "step-", 2) == [tmp_path / "step-0"]


def test_prune_keeps_folders_of_the_user(tmp_path):
    for step in range(3):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-0" / "notes.txt").write_text("mine")
    (tmp_path / "step-").mkdir()
    (tmp_path / "step-" / "thesis.txt").write_text("years of work")
    assert overt_io.prune(tmp_path, "step-", 1) == [tmp_path / "step-1"]
    assert file_names(tmp_path) == ["step-", "step-0", "step-2"]


@pytest.mark.parametrize("damage", ["size", "content"])
def test_prune_never_removes_the_only_intact_folder(tmp_path, damage):
    for step in range(5):
        save(tmp_path / f"step-{step}", step)
    for step in (0, 2, 3, 4):
        path = tmp_path / f"step-{step}" / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] if damage == "size" else data[:-1] + b"\1")
    for keep in (3, 2, 1):
        overt_io.prune(tmp_path, "step-", keep)
        assert load(tmp_path / "step-1") == 1


def test_temporaries_of_dead_processes_are_removed_and_of_live_ones_kept(tmp_path):
    folder = tmp_path / "c"
    dead = run_in_child(lambda: None)
    exit_code(dead)
    living = lock_in_child(tmp_path / "elsewhere")
    try:
        zombie = run_in_child(lambda: None)
        os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)  # a zombie: dead, but still listed
        began = int(Path(f"/proc/{zombie}/stat").read_text().rpartition(")")[2].split()[19])
        stale = [
            temporary_name(folder, "tmp", pid=dead, start=5),
            temporary_name(folder, "tmp", pid=zombie, start=began),
            temporary_name(folder, "tmp", pid=living, start=5),  # the process id was reused
            temporary_name(
                folder, "tmp", pid=os.getpid()
            ),  # of this process, and not in use any more
        ]
        kept = [
            temporary_name(folder, "tmp", pid=living),
            temporary_name(folder, "old", pid=living),
            temporary_name(folder, "tmp", pid=dead, start=5, machine="0" * 8),  # of another machine
            tmp_path / ".tmp-mine",
        ]
        for path in stale + kept:
            path.mkdir()
            (path / "file").write_text("text")
        with overt_io.atomic_folder(tmp_path / "d") as temporary:
            assert sorted(overt_io.remove_stale_temporaries(tmp_path)) == sorted(stale)
            assert temporary.exists()
        assert file_names(tmp_path) == sorted(["d", "elsewhere", *(path.name for path in kept)])
        exit_code(zombie)
    finally:
        kill(living)
    overt_io.remove_stale_temporaries(tmp_path)
    stay = [
        "c",
        "d",
        "elsewhere",
        *(path.name for path in kept[2:]),
    ]  # "c" was renamed to ".old-..."
    assert file_names(tmp_path) == sorted(stay)


def test_temporaries_of_another_machine_are_removed_after_a_day(tmp_path, monkeypatch):
    path = temporary_name(tmp_path / "c", "tmp", pid=1, start=5, machine="0" * 8)
    path.mkdir()
    now = time.time()
    for hours, there in ((23, True), (25, False)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        overt_io.remove_stale_temporaries(tmp_path)
        assert path.exists() is there


# Locks


def test_a_lock_of_a_live_process_raises_and_of_a_dead_one_is_free(tmp_path):
    child = lock_in_child(tmp_path)
    try:
        with (
            pytest.raises(UserError, match=rf"in use.*process {child} "),
            overt_io.lock(tmp_path),
        ):
            pytest.fail("held twice")
    finally:
        kill(child)
    with overt_io.lock(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} "):  # noqa: SIM117
        with overt_io.lock(tmp_path):
            pytest.fail("held twice")
    with pytest.raises(ZeroDivisionError), overt_io.lock(tmp_path):
        raise ZeroDivisionError
    with overt_io.lock(tmp_path):
        pass
    assert overt_io.newest(tmp_path, "") == (None, [])


def test_an_orphaned_worker_does_not_keep_the_lock_of_its_parent(tmp_path):
    reader, writer = os.pipe()

    def start_a_worker():
        os.write(writer, b"%d\n" % run_in_child(lambda: time.sleep(600)))
        time.sleep(600)

    child = lock_in_child(tmp_path, start_a_worker)
    worker = int(os.read(reader, 20))
    try:
        with pytest.raises(UserError), overt_io.lock(tmp_path):
            pytest.fail("held twice")
        kill(child)
        os.kill(worker, 0)
        with overt_io.lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_worker_does_not_release_the_lock_of_its_parent(tmp_path):
    try:
        with overt_io.lock(tmp_path):
            child = os.fork()
            if child == 0:
                raise SystemExit
            assert exit_code(child) == 0
            with pytest.raises(UserError, match=f"process {os.getpid()} "), overt_io.lock(tmp_path):
                pytest.fail("held twice")
    except SystemExit:
        os._exit(0)
    except OSError:
        os._exit(1)


def test_a_waiting_process_gets_the_lock_after_its_release(tmp_path):
    reader, writer = os.pipe()
    child = lock_in_child(tmp_path, lambda: os.read(reader, 1))
    with pytest.raises(UserError), overt_io.lock(tmp_path):
        pytest.fail("held twice")
    threading.Timer(0.3, os.write, (writer, b"x")).start()  # while this process waits
    with overt_io.lock(tmp_path, wait=True):
        assert exit_code(child) == 0
        with pytest.raises(UserError, match=f"process {os.getpid()} "), overt_io.lock(tmp_path):
            pytest.fail("held twice")


def test_a_lock_file_that_is_a_link_raises(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written"), overt_io.lock(tmp_path):
        pytest.fail("followed")
    assert not (tmp_path / "precious").exists()


def test_the_module_imports_no_heavy_packages():
    program = (
        "import sys, overt.io; "
        "print({'torch', 'numpy', 'safetensors', 'pickle'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


# Single files with checksums


def test_checksummed_json_detects_every_changed_byte(tmp_path):
    path = tmp_path / "words.json"
    value = {"format": "x", "words": ["a", "é", "\n"], "share": 0.1}
    overt_io.write_checksummed_json(path, value)
    assert overt_io.read_checksummed_json(path) == value
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptFileError, match=re.escape(str(path))):
            overt_io.read_checksummed_json(path)
    for other in (whole + b" ", whole[:-1], b"[]", b"{}", b'{"sha256": 1}'):
        path.write_bytes(other)
        with pytest.raises(CorruptFileError, match=re.escape(str(path))):
            overt_io.read_checksummed_json(path)


def test_verify_file_compares_a_file_with_the_manifest_of_its_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    overt_io.verify_file(tmp_path / "a")  # without a manifest any content is accepted
    overt_io.write_manifest(tmp_path, ["a"])
    overt_io.verify_file(tmp_path / "a")
    for name in ("a", "b"):
        (tmp_path / name).write_text("other")
    overt_io.verify_file(tmp_path / "b")
    with pytest.raises(CorruptFileError, match=r"/a .*SHA-256"):
        overt_io.verify_file(tmp_path / "a")
    (tmp_path / overt_io.MANIFEST).write_text("{}")
    with pytest.raises(CorruptFileError, match="manifest"):
        overt_io.verify_file(tmp_path / "b")


def test_stale_temporaries_are_listed_before_removal(tmp_path):
    dead = run_in_child(lambda: None)
    exit_code(dead)
    path = temporary_name(tmp_path / "c", "tmp", pid=dead, start=5)
    path.mkdir()
    assert (
        overt_io.stale_temporaries(tmp_path)
        == [path]
        == overt_io.remove_stale_temporaries(tmp_path)
    )
    assert overt_io.stale_temporaries(tmp_path) == []


def test_set_aside_keeps_the_path_and_overwrites_nothing(tmp_path):
    for value in (1, 2):
        save(tmp_path / "a" / "c", value)
        place = overt_io.set_aside(tmp_path / "a" / "c", tmp_path)
        wanted = tmp_path / overt_io.SET_ASIDE / "a" / ("c" if value == 1 else "c.1")
        assert place == wanted and load(place) == value
    assert file_names(tmp_path / "a") == []
    with pytest.raises(RunError, match="No such file"):
        overt_io.set_aside(tmp_path / "none", tmp_path)


def test_lock_holder_names_live_and_dead_processes(tmp_path):
    assert overt_io.lock_holder(tmp_path) == ("", False)
    child = lock_in_child(tmp_path)
    try:
        name, held = overt_io.lock_holder(tmp_path)
        assert held and name.startswith(f"process {child} on ")
    finally:
        kill(child)
    assert overt_io.lock_holder(tmp_path) == (name, False)  # the dead process left its name
    with overt_io.lock(tmp_path):
        assert overt_io.lock_holder(tmp_path)[0].startswith(f"process {os.getpid()} on ")
    assert overt_io.lock_holder(tmp_path) == ("", False)


def test_manifest_names_include_missing_files(tmp_path):
    save(tmp_path / "c")
    (tmp_path / "c" / "state.json").unlink()
    assert overt_io.manifest_names(tmp_path / "c") == [
        "extra/order.npz",
        "model.safetensors",
        "state.json",
    ]


# Missing resources are not corruption

RESOURCE_ERRORS = [errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EACCES, errno.ESTALE]


def failing_calls(code, calls=("open", "scandir", "stat", "lstat")):
    """Return system calls on files that fail with this error."""

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return dict.fromkeys(calls, fail)


@pytest.mark.parametrize("code", RESOURCE_ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "scandir", "stat", "lstat"])
def test_resource_errors_never_raise_corrupt_file_error(tmp_path, monkeypatch, code, call):
    save(tmp_path / "step-1")
    for name, fail in failing_calls(code, [call]).items():
        monkeypatch.setattr(overt_io.os, name, fail)
    for check in (
        lambda: overt_io.verify(tmp_path / "step-1"),
        lambda: overt_io.is_intact(tmp_path / "step-1"),
        lambda: overt_io.verify_file(tmp_path / "step-1" / "state.json"),
        lambda: overt_io.manifest_names(tmp_path / "step-1"),
        lambda: overt_io.read_json(tmp_path / "step-1" / "state.json"),
    ):
        with suppress(RunError, OSError, UserError):
            check()  # `CorruptFileError` is not suppressed
    assert overt_io.prune(tmp_path, "step-", keep=1) == []
    monkeypatch.undo()
    assert overt_io.is_intact(tmp_path / "step-1")


def test_a_checkpoint_with_a_read_error_is_not_skipped(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path / f"step-{step}", step)
    plain = overt_io.digest

    def short(path):
        if "step-2" in str(path):
            raise overt_io.read_error(
                path, "cannot be read", OSError(errno.EIO, "Input/output error")
            )
        return plain(path)

    monkeypatch.setattr(overt_io, "digest", short)
    with pytest.raises(RunError, match=r"step-2/.*input/output error"):
        overt_io.newest(tmp_path, "step-")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "enough mem"),
        (RuntimeError("unable to mmap 4 bytes: Cannot allocate memory (12)"), "enough memory"),
        (RuntimeError("unable to open file <a>: Too many open files (24)"), "too many.*files"),
    ],
)
def test_readers_without_resources_raise_run_error(tmp_path, monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    save(tmp_path / "a")
    monkeypatch.setattr("safetensors.torch.load_file", fail)
    with pytest.raises(RunError, match=rf"model\.safetensors.*{message}"):
        overt_io.read_tensors(tmp_path / "a" / "model.safetensors")
    monkeypatch.setattr(overt_io.json, "loads", fail)
    with pytest.raises((RunError, RuntimeError)):
        overt_io.read_json(tmp_path / "a" / "state.json")


def test_a_small_file_is_read_with_little_memory(tmp_path):
    """64 MiB above the memory of Python are enough, although JSON files may have 256 MiB."""
    overt_io.write_json(tmp_path / "a.json", {"step": 1})
    code = (
        "import resource, sys; from pathlib import Path; from overt import io\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))\n"
        "print(io.read_json(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "{'step': 1}", done.stderr


def test_a_file_longer_than_its_stat_size_is_read_completely(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("[" + "1," * 2**20 + "1]")
    plain = os.fstat
    monkeypatch.setattr(
        overt_io.os, "fstat", lambda fd: os.stat_result((*plain(fd)[:6], 0, *plain(fd)[7:]))
    )
    assert len(overt_io.read_json(path)) == 2**20 + 1
    monkeypatch.setattr(overt_io, "_LARGEST_JSON", 2**20)
    with pytest.raises(CorruptFileError, match="1048576"):
        overt_io.read_json(path)


# Malicious archives


def write_overlapping_npz(path):
    """Write an .npz of two arrays, the second inside the bytes of the first."""
    import io
    import zipfile

    inner, small = io.BytesIO(), io.BytesIO()
    np.save(small, np.arange(20))
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("b.npy", small.getvalue())
    outer = np.frombuffer(inner.getvalue(), dtype=np.uint8)
    with zipfile.ZipFile(path, "w") as archive:
        large = io.BytesIO()
        np.save(large, outer)
        archive.writestr("a.npy", large.getvalue())
        second = zipfile.ZipInfo("b.npy")
        second.file_size = second.compress_size = len(small.getvalue())
        second.CRC = zipfile.crc32(small.getvalue())
        end = 30 + len("a.npy") + len(large.getvalue())
        second.header_offset = end - len(outer)
        archive.filelist.append(second)
        archive.NameToInfo["b.npy"] = second
    return path


def test_an_archive_without_arrays_is_valid(tmp_path: Path) -> None:
    overt_io.write_arrays(tmp_path / "none.npz", {})
    assert overt_io.read_arrays(tmp_path / "none.npz") == {}


def test_overlapping_archive_members_raise(tmp_path):
    import zipfile

    path = write_overlapping_npz(tmp_path / "a.npz")
    with zipfile.ZipFile(path) as archive, pytest.raises(ValueError, match=r"'a\.npy' overlaps"):
        overt_io.check_zip_overlap(archive)
    with pytest.raises(CorruptFileError, match="overlap"):
        overt_io.read_arrays(path)
    np.savez(tmp_path / "b.npz", a=np.arange(3), b=np.ones((2, 2)), é=np.zeros(0))
    assert set(overt_io.read_arrays(tmp_path / "b.npz")) == {"a", "b", "é"}


@pytest.mark.parametrize("shape", ["(10000000000000,)", "(2,)", "(3, 0)"])
def test_an_array_shorter_than_its_header_raises(tmp_path, shape):
    """Also for a header that needs more memory than available."""
    import io
    import zipfile

    good = io.BytesIO()
    np.save(good, np.arange(3, dtype=np.int64))
    data = good.getvalue()
    wrong = data.replace(b"(3,)", shape.encode(), 1)
    wrong = data[:10] + wrong[10 : 138 - 1].rstrip()[:117].ljust(117) + b"\n" + data[128:]
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", wrong)
    with pytest.raises(CorruptFileError, match=r"'a\.npy'.*24 bytes"):
        overt_io.read_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("kind", "shape"), [("|V0", "(10**12,)"), ("<U0", "(1000000000,)"), ("<f8", "(10**14, 0)")]
)
def test_arrays_of_zero_byte_elements_are_limited(tmp_path, kind, shape):
    """10 ** 12 elements of zero bytes are free to read, but take terabytes when converted."""
    import struct
    import zipfile

    shape = shape.replace("10**12", str(10**12)).replace("10**14", str(10**14))
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        data = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header
        archive.writestr("a.npy", data)
    with pytest.raises(CorruptFileError, match=r"a.npy'.*shape.*data"):
        overt_io.read_arrays(tmp_path / "a.npz")
    overt_io.write_arrays(tmp_path / "b.npz", {"none": np.zeros((5000, 0)), "empty": np.zeros(0)})
    assert overt_io.read_arrays(tmp_path / "b.npz")["none"].shape == (5000, 0)


@pytest.mark.parametrize("name", [".", ".."])
def test_a_temporary_with_an_invalid_name_is_kept(tmp_path, name):
    save(tmp_path / "step-1")
    odd = tmp_path / f".old-00000000-1-1-0-{name}"
    odd.mkdir()
    assert (
        overt_io.stale_temporaries(tmp_path) == [] == overt_io.remove_stale_temporaries(tmp_path)
        and odd.is_dir()
    )
    assert overt_io.newest(tmp_path, "step-") == (tmp_path / "step-1", [])
