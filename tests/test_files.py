"""Faults, kills and mutations: nothing half-written is ever read back."""

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
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from overt import files
from overt.errors import BadInput, Damaged, Failed
from tests.trust.mutants import mutate, picture

SIZE = 40


def save(folder, value=0, size=SIZE):
    """A checkpoint of three files, one of them in a subfolder, all filled with one value."""
    with files.writing(folder) as temporary:
        fill(temporary, value, size)


def fill(folder, value, size=SIZE):
    files.write_tensors(folder / "model.safetensors", {"w": weights(value, size)})
    files.write_json(folder / "state.json", {"step": value})
    files.write_arrays(folder / "extra" / "order.npz", {"order": np.arange(20) + value})


def weights(value, size):
    """Made by NumPy: a parallel torch operation would hang in a forked child."""
    return torch.from_numpy(np.full(size, value, np.float32))


def naive_save(folder, value=0, size=SIZE):
    """What most programs do: write each file where it belongs."""
    from safetensors.torch import save

    (folder / "extra").mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps({"step": value}))
    (folder / "model.safetensors").write_bytes(save({"w": weights(value, size)}))
    np.savez(folder / "extra" / "order.npz", order=np.arange(20) + value)


def load(folder):
    files.verify(folder)
    return naive_load(folder)


def naive_load(folder):
    """The value that all three files agree on, without a look at the manifest."""
    value = files.read_json(folder / "state.json")["step"]
    weights = files.read_tensors(folder / "model.safetensors")["w"]
    order = files.read_arrays(folder / "extra" / "order.npz")["order"]
    assert (weights == value).all() and (order == np.arange(20) + value).all()
    return value


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def forked(work):
    """Run `work` in a child process of its own and return the child's number."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return child


def outcome(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def held_by_child(folder, then=lambda: time.sleep(60)):
    """A child that holds the lock of `folder` by the time this returns."""
    reader, writer = os.pipe()

    def hold():
        with files.lock(folder):
            os.write(writer, b"held")
            then()

    child = forked(hold)
    assert os.read(reader, 4) == b"held"
    os.close(reader)
    os.close(writer)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def leftover(folder, kind, *, pid, start=None, machine=None):
    """The name a writer with this process number would have used beside `folder`."""
    start = files._started(pid) if start is None else start
    return folder.with_name(f".{kind}-{machine or files._machine()}-{pid}-{start}-0-{folder.name}")


# Whole folders


def test_a_folder_comes_back_as_written_and_nothing_else_stays(tmp_path):
    save(tmp_path / "deep" / "c", 3)
    assert load(tmp_path / "deep" / "c") == 3
    assert names(tmp_path / "deep") == ["c"]
    manifest = files.verify(tmp_path / "deep" / "c")
    assert list(manifest["files"]) == ["extra/order.npz", "model.safetensors", "state.json"]
    for name, entry in manifest["files"].items():
        path = tmp_path / "deep" / "c" / name
        foreign = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
        assert entry == {"size": path.stat().st_size, "sha256": foreign.stdout.split()[0]}
        assert files.digest(path) == entry["sha256"]


def test_a_folder_is_replaced(tmp_path):
    save(tmp_path / "c", 1)
    save(tmp_path / "c", 2)
    assert load(tmp_path / "c") == 2
    assert names(tmp_path) == ["c"]


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_after_it(tmp_path, monkeypatch):
    save(tmp_path / "c")
    done, fsync, replace = [], os.fsync, os.replace

    def note_fsync(descriptor):
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def note_replace(source, target):
        replace(source, target)
        done.append((source, target))

    with files.writing(tmp_path / "c") as new:
        (new / "sub").mkdir()
        (new / "sub" / "a").write_text("a")
        (new / "b").write_text("b")
        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "replace", note_replace)
    files_first, manifest, folders = done[:2], done[2], done[3:5]
    assert files_first == [new / "b", new / "sub" / "a"] and manifest == new / files.MANIFEST
    assert folders == [new / "sub", new]
    (old, aside), put_in_place, parent = done[5:8]
    assert old == tmp_path / "c" and aside.name.startswith(".old-")
    assert put_in_place == (new, tmp_path / "c") and parent == tmp_path
    assert [source for source, _ in done[8:]] == [aside]  # and only now does the old one go


def test_inside_an_open_folder_nothing_is_flushed_twice(tmp_path, monkeypatch):
    """Only the end of `writing` makes a folder last, so its files need no flush of their own."""
    done, fsync = [], os.fsync

    def note_fsync(descriptor):
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", note_fsync)
    with files.writing(tmp_path / "c") as new:
        fill(new, 1)
        assert done == []
    inside = [new / name for name in ("extra/order.npz", "model.safetensors", "state.json")]
    assert done == [*inside, new / files.MANIFEST, new / "extra", new, tmp_path]
    done.clear()
    files.write_json(tmp_path / "alone.json", {})
    assert [path.name for path in done] == ["alone.json", tmp_path.name]


def test_inside_an_open_folder_a_file_is_still_written_whole_or_not_at_all(tmp_path, monkeypatch):
    with files.writing(tmp_path / "c") as new:
        fill(new, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: raise_no_space())
            with pytest.raises(Failed):
                files.write_json(new / "state.json", {"step": 2})
    assert load(tmp_path / "c") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, FileNotFoundError])
def test_an_exception_in_the_body_passes_unchanged_and_the_old_folder_stays(tmp_path, error):
    save(tmp_path / "c", 1)

    def fail():
        with files.writing(tmp_path / "c") as temporary:
            fill(temporary, 2)
            raise error

    with pytest.raises(error):
        fail()
    assert load(tmp_path / "c") == 1
    assert names(tmp_path) == ["c"]


def test_a_forked_child_that_unwinds_does_not_touch_what_its_parent_writes(tmp_path):
    child = None
    try:
        with files.writing(tmp_path / "c") as temporary:
            fill(temporary, 1)
            child = os.fork()
            if child == 0:
                raise SystemExit
            os.waitpid(child, 0)
    except SystemExit:
        os._exit(0)
    assert load(tmp_path / "c") == 1


def test_files_that_no_manifest_lists_are_kept_when_a_folder_is_replaced(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("years of work")
    save(tmp_path / "c", 1)
    (tmp_path / "c" / "notes.txt").write_text("mine")
    save(tmp_path / "c", 2)
    assert load(tmp_path / "c") == 2
    assert names(tmp_path) == ["c", "c.replaced-1", "c.replaced-2"]
    assert (tmp_path / "c.replaced-1" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "c.replaced-2" / "notes.txt").read_text() == "mine"
    assert files.newest(tmp_path, "c") == (tmp_path / "c", [])


def test_an_artefact_holds_plain_files_only_and_its_manifest_is_ours(tmp_path):
    with pytest.raises(BadInput, match="link"), files.writing(tmp_path / "c") as temporary:
        (temporary / "link").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match=r"manifest\.json"), files.writing(tmp_path / "c") as folder:
        (folder / files.MANIFEST).write_text("{}")
    assert names(tmp_path) == []


# Faults: the n-th call of the system fails, once or from then on

CALLS = [(os, "fsync"), (os, "replace"), (os, "mkdir"), (builtins, "open"), (os, "open")]


def points(monkeypatch, work, module, call):
    """How often `work` makes this call."""
    made = []
    true = getattr(module, call)
    with monkeypatch.context() as patch:
        patch.setattr(module, call, lambda *a, **k: made.append(a) or true(*a, **k))
        work()
    return len(made)


def break_at(patch, module, call, number, act, ever_after):
    """Let the `number`-th call (and the later ones) do `act` instead."""
    true, made = getattr(module, call), [0]

    def broken(*arguments, **options):
        made[0] += 1
        if made[0] == number or (ever_after and made[0] > number):
            act()
        return true(*arguments, **options)

    patch.setattr(module, call, broken)


def raise_no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("ever_after", [False, True], ids=["once", "ever after"])
@pytest.mark.parametrize(("module", "call"), CALLS, ids=[call for _, call in CALLS])
def test_at_every_fault_the_previous_copy_stays(tmp_path, monkeypatch, module, call, ever_after):
    folder = tmp_path / "c"
    save(folder, 1)
    count = points(monkeypatch, lambda: save(folder, 1), module, call)
    assert count >= 3  # 40 in all
    for number in range(1, count + 1):
        with monkeypatch.context() as patch:
            break_at(patch, module, call, number, raise_no_space, ever_after)
            try:
                save(folder, 2)
                told = ""
            except Failed as error:
                told = str(error)
        if told:
            assert re.search(rf"{folder}\S* \(\d+ bytes\): No space left", told)
            assert ever_after or names(tmp_path) == ["c"]
            assert load(folder) in ((1, 2) if ever_after else (1,))
        else:  # the new copy was in place, and only the clearing away of the old one failed
            assert load(folder) == 2
        files.sweep(tmp_path)
        assert set(names(tmp_path)) <= {"c", "c.replaced-1"}
        shutil.rmtree(tmp_path / "c.replaced-1", ignore_errors=True)
        save(folder, 1)


@pytest.mark.parametrize(("module", "call"), CALLS[:4], ids=[call for _, call in CALLS[:4]])
def test_a_writer_that_dies_at_any_call_leaves_a_whole_copy(tmp_path, monkeypatch, module, call):
    folder = tmp_path / "c"
    save(folder, 1)
    for number in range(1, points(monkeypatch, lambda: save(folder, 1), module, call) + 1):

        def write(number=number):
            break_at(pytest.MonkeyPatch(), module, call, number, lambda: os._exit(9), False)
            save(folder, 2)

        assert outcome(forked(write)) == 9
        found, broken = files.newest(tmp_path, "c")
        assert found == folder and broken == [] and load(folder) in (1, 2)
        files.sweep(tmp_path)
        assert names(tmp_path) == ["c"]
        save(folder, 1)


def test_a_folder_set_aside_by_a_dead_writer_comes_back(tmp_path):
    folder = tmp_path / "c"
    dead = forked(lambda: None)
    start = files._started(dead) or 0
    outcome(dead)
    aside = leftover(folder, "old", pid=dead, start=start)
    for recover in (
        lambda: files.verify(folder),
        lambda: files.newest(tmp_path, "c"),
        lambda: files.sweep(tmp_path),
    ):
        save(folder, 1)
        folder.rename(aside)
        recover()
        assert names(tmp_path) == ["c"] and load(folder) == 1
    save(aside, 0)
    files.sweep(tmp_path)  # the writer died after the new one was in place
    assert names(tmp_path) == ["c"] and load(folder) == 1
    save(aside, 0)
    (folder / "state.json").write_text("{}")
    files.sweep(tmp_path)  # a whole copy is not deleted for a broken one
    assert load(aside) == 0


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_place_that_cannot_be_written_is_bad_input(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(BadInput, match=f"{tmp_path}/c cannot be written"):
        save(tmp_path / "c")
    with pytest.raises(BadInput, match=f"{tmp_path}/a.json cannot be written"):
        files.write_json(tmp_path / "a.json", {})
    assert names(tmp_path) == []


def test_a_path_at_fault_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for path in ("file", "file/below", "link", "x" * 300, "a\0b", "/"):
        with pytest.raises(BadInput), files.writing(tmp_path / path):
            pytest.fail("the body should not run")
    for path in ("folder", "file/below", "link", "x" * 300, "a\0b"):
        with pytest.raises(BadInput):
            files.write_text(tmp_path / path, "text")
    assert names(tmp_path) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "text"


# A full disk, for real


def too_much(kind, path):
    """More than the limit of the tests below, by each way of writing."""
    if kind == "tensors":
        files.write_tensors(path, {"w": weights(0, 2**19)})
    elif kind == "arrays":
        files.write_arrays(path, {"w": np.zeros(2**19, np.float32)})
    elif kind == "text":
        files.write_text(path, " " * 2**21)
    else:
        with files.writing(path) as temporary, open(temporary / "raw", "wb") as file:
            file.write(bytes(2**21))


@pytest.mark.parametrize("kind", ["tensors", "arrays", "text", "folder"])
def test_a_full_disk_names_path_and_bytes_and_leaves_nothing(tmp_path, kind):
    import resource

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with pytest.raises(Failed, match=rf"{tmp_path}/new \(\d{{7}} bytes\): File too large"):
            too_much(kind, tmp_path / "new")
        with pytest.raises(Failed, match=rf"{tmp_path}/c"), files.writing(tmp_path / "c") as folder:
            too_much(kind, folder / "new")

    save(tmp_path / "c", 1)
    assert outcome(forked(write)) == 0
    assert load(tmp_path / "c") == 1 and names(tmp_path) == ["c"]


# Mutations


def losses(tmp_path, count, read):
    """How many mutated checkpoints `read` accepts, and what it raises for the others."""
    save(tmp_path / "true", 7)
    save(tmp_path / "other", 8)
    before = picture(tmp_path / "true")
    silent, raised, chance = 0, set(), random.Random(0)
    for _ in range(count):
        folder = tmp_path / "mutant"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "true", folder)
        mutate(folder, tmp_path / "other", chance)
        after = {tmp_path / "true" / p.relative_to(folder): d for p, d in picture(folder).items()}
        if after == before:
            continue  # zeros over zeros
        try:
            read(folder)
            silent += 1
        except Exception as error:
            raised.add(type(error))
    return silent, raised


def raw_load(folder):
    """A reader without a manifest: what the formats themselves find."""
    from safetensors.torch import load_file

    for name in ("model.safetensors", "state.json", "extra/order.npz"):
        if not (folder / name).is_file():
            raise FileNotFoundError(name)
    json.loads((folder / "state.json").read_text())
    load_file(folder / "model.safetensors")
    dict(np.load(folder / "extra" / "order.npz"))


def test_no_mutated_checkpoint_is_read_and_all_raise_one_class(tmp_path):
    assert losses(tmp_path, 200, load) == (0, {Damaged})


def test_a_reader_without_a_manifest_is_fooled_by_the_same_mutations(tmp_path):
    silent, raised = losses(tmp_path, 150, raw_load)
    assert silent > 30 and len(raised) > 3


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "extra/order.npz"])
def test_a_loose_file_is_read_or_damaged(tmp_path, name):
    save(tmp_path / "c")
    data, chance = (tmp_path / "c" / name).read_bytes(), random.Random(0)
    read = {".safetensors": files.read_tensors, ".json": files.read_json, ".npz": files.read_arrays}
    path = tmp_path / "mutant"
    for _ in range(200):
        mutant = bytearray(data)
        for _ in range(chance.randrange(1, 5)):
            mutant[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(mutant[: chance.choice([len(data), chance.randrange(len(data))])])
        with suppress(Damaged):
            read[Path(name).suffix](path)


# What a manifest may say


def forge(folder, listed, closed=True):
    """A manifest with a valid sum of its own, as an attacker could write it."""
    entries = {name: {"size": 4, "sha256": "0" * 64} for name in listed}
    body = {"format": 1, "closed": closed, "files": entries}
    folder.mkdir(exist_ok=True)
    (folder / files.MANIFEST).write_text(files._render(body))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "", ".", "a\0b"]
)
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path, name):
    (tmp_path / "x").write_text("text")
    forge(tmp_path / "c", [name])
    with pytest.raises(Damaged, match="out of bounds"):
        files.verify(tmp_path / "c")
    with pytest.raises(BadInput, match="plain name"):
        files.seal(tmp_path / "c", [name])


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path):
    with files.writing(tmp_path / "c") as folder:
        (folder / "file").write_text("text")
    (tmp_path / "xy").write_text("text")
    (tmp_path / "c" / "file").unlink()
    (tmp_path / "c" / "file").symlink_to("../xy")
    manifest = json.loads((tmp_path / "c" / files.MANIFEST).read_text())
    manifest["files"]["file"]["size"] = len("../xy")  # what the link itself measures
    (tmp_path / "c" / files.MANIFEST).write_text(files._render(manifest))
    with pytest.raises(Damaged, match="is a link"):
        files.verify(tmp_path / "c")


def test_a_linked_subfolder_is_not_followed(tmp_path):
    save(tmp_path / "c")
    (tmp_path / "c" / "extra").rename(tmp_path / "extra")
    (tmp_path / "c" / "extra").symlink_to(tmp_path / "extra")
    with pytest.raises(Damaged, match=r"order\.npz is missing"):
        files.verify(tmp_path / "c")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{}",
        '{"files": []}',
        files._render({"format": 2, "closed": True, "files": {}}),
        files._render({"format": 1, "closed": True, "files": []}),
        files._render({"format": 1, "closed": "yes", "files": {}}),
        files._render({"format": 1, "closed": True, "files": {"a": 3}}),
        files._render({"format": 1, "closed": True, "files": {}}) + " ",
    ],
)
def test_a_manifest_of_another_form_is_damaged(tmp_path, text):
    (tmp_path / "a").write_text("text")
    (tmp_path / files.MANIFEST).write_text(text)
    with pytest.raises(Damaged, match=r"manifest\.json"):
        files.verify(tmp_path)


def test_hidden_files_do_no_harm_and_others_do(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".DS_Store").write_text("")
    assert files.is_whole(tmp_path)
    (tmp_path / "notes").write_text("")
    assert not files.is_whole(tmp_path)
    with pytest.raises(Damaged, match="notes was not there"):
        files.verify(tmp_path)


def test_a_missing_folder_is_damaged(tmp_path):
    for name in ("none", "a\0b", "x" * 300):
        with pytest.raises(Damaged, match="missing"):
            files.verify(tmp_path / name)
        with pytest.raises(Damaged):
            files.digest(tmp_path / name)


def test_sealed_files_are_checked_and_their_neighbours_are_not(tmp_path):
    fill(tmp_path, 1)
    files.seal(tmp_path, ["state.json", "extra/order.npz"])
    (tmp_path / "log.txt").write_text("free to change")
    assert list(files.verify(tmp_path)["files"]) == ["extra/order.npz", "state.json"]
    (tmp_path / "state.json").write_text('{"step": 2}\n')
    with pytest.raises(Damaged, match=r"state\.json"):
        files.verify(tmp_path)
    files.seal(tmp_path, ["state.json"])
    assert files.is_whole(tmp_path)
    (tmp_path / "link").symlink_to("state.json")
    for name in ("none", "extra", "link"):
        with pytest.raises(BadInput, match="plain file"):
            files.seal(tmp_path, [name])
    assert files.is_whole(tmp_path)


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
def test_what_is_not_json_is_damaged(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Damaged, match=r"a\.json"):
        files.read_json(path)


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(files._LARGEST_JSON + 1)
    with pytest.raises(Damaged, match="at most"):
        files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    "read", [files.read_json, files.read_tensors, files.read_metadata, files.read_arrays]
)
def test_what_is_no_plain_file_is_damaged_and_nobody_waits(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none", ".", "a\0b", "x" * 300):
        with pytest.raises(Damaged):
            read(tmp_path / name)


def test_json_comes_back(tmp_path):
    value = {"a": [1, 2.5, None, True, "é\n\u2028"], "big": 10**40, "": {}}
    files.write_json(tmp_path / "deep" / "a.json", value)
    assert files.read_json(tmp_path / "deep" / "a.json") == value
    assert names(tmp_path / "deep") == ["a.json"]


def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path):
    files.write_json(tmp_path / "a.json", 1)
    loop = []
    loop.append(loop)
    for value in (float("nan"), {"a": [float("inf")]}, loop, "\ud800"):
        with pytest.raises(BadInput, match=r"a\.json"):
            files.write_json(tmp_path / "a.json", value)
    assert files.read_json(tmp_path / "a.json") == 1


def test_one_file_is_replaced_whole_or_not_at_all(tmp_path):
    files.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text(f"new {1 / 0}")
    assert (tmp_path / "a.txt").read_text() == "old"
    with files.replacing(tmp_path / "a.txt") as temporary:
        assert temporary.name == "a.txt"  # libraries that go by the suffix see the true one
        temporary.write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


def test_tensors_come_back_tied_strided_or_empty(tmp_path):
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
    files.write_tensors(tmp_path / "t", tensors, {"b": "2", "a": "1"})
    back = files.read_tensors(tmp_path / "t")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    assert files.read_metadata(tmp_path / "t") == {"a": "1", "b": "2"}
    files.write_tensors(tmp_path / "t", {})
    assert files.read_tensors(tmp_path / "t") == {} and files.read_metadata(tmp_path / "t") == {}
    with pytest.raises(BadInput, match="complex128"):
        files.write_tensors(tmp_path / "t", {"a": torch.zeros(1, dtype=torch.complex128)})


def test_the_same_content_gives_the_same_bytes(tmp_path):
    about = {letter: letter for letter in "qwertyuiop"}
    for name in ("1", "2"):
        files.write_tensors(tmp_path / f"{name}.t", {"b": torch.ones(3), "a": torch.ones(2)}, about)
        files.write_arrays(tmp_path / f"{name}.n", {"b": np.ones(3), "a": np.ones(2)})
        time.sleep(0.01)
    assert (tmp_path / "1.t").read_bytes() == (tmp_path / "2.t").read_bytes()
    assert (tmp_path / "1.n").read_bytes() == (tmp_path / "2.n").read_bytes()


def test_files_get_the_rights_that_any_new_file_gets(tmp_path):
    old = os.umask(0o027)
    try:
        save(tmp_path / "c")
    finally:
        os.umask(old)
    for path in (tmp_path / "c").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


def test_arrays_come_back_and_numpy_reads_them(tmp_path):
    arrays = {
        "file": np.arange(6).reshape(2, 3),
        "a/b.npy": np.asfortranarray(np.ones((3, 2), np.float16)),
        "text": np.array(["é", "abc"]),
        "none": np.zeros((0, 3)),
        "one": np.array(5, np.uint8),
    }
    files.write_arrays(tmp_path / "a.npz", arrays)
    foreign = np.load(tmp_path / "a.npz")
    back = files.read_arrays(tmp_path / "a.npz")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, strict=True)
    np.testing.assert_array_equal(foreign["file"], arrays["file"])


def test_pickled_and_compressed_arrays_are_refused(tmp_path):
    things = np.array([{"a": 1}, None], dtype=object)
    with pytest.raises(BadInput, match="objects"):
        files.write_arrays(tmp_path / "a.npz", {"things": things})
    np.savez(tmp_path / "a.npz", things=things)
    with pytest.raises(Damaged, match=r"a\.npz"):
        files.read_arrays(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "b.npz", bomb=np.zeros(2**20))
    with pytest.raises(Damaged, match="compressed"):
        files.read_arrays(tmp_path / "b.npz")


# Newest, prune, sweep


def test_newest_goes_by_number_and_skips_the_broken(tmp_path):
    assert files.newest(tmp_path / "none", "step-") == (None, [])
    for step in (9, 10, 100):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-999").symlink_to(tmp_path / "step-9")
    (tmp_path / "step-notes.txt").write_text("")
    assert files.newest(tmp_path, "step-") == (tmp_path / "step-100", [])
    (tmp_path / "step-100" / "state.json").write_text("{}")
    assert files.newest(tmp_path, "step-") == (tmp_path / "step-10", [tmp_path / "step-100"])
    (tmp_path / "step-10" / files.MANIFEST).unlink()
    (tmp_path / "step-9" / "model.safetensors").unlink()
    broken = [tmp_path / "step-100", tmp_path / "step-10", tmp_path / "step-9"]
    assert files.newest(tmp_path, "step-") == (None, broken)


def test_prune_keeps_the_newest(tmp_path):
    for step in range(8, 12):
        save(tmp_path / f"step-{step}", step)
    save(tmp_path / "best", 1)
    removed = files.prune(tmp_path, "step-", 2)
    assert removed == [tmp_path / "step-9", tmp_path / "step-8"]
    assert names(tmp_path) == ["best", "step-10", "step-11"]
    with pytest.raises(BadInput, match="at least 1"):
        files.prune(tmp_path, "step-", 0)


def test_what_is_plainly_broken_does_not_count_among_the_kept(tmp_path):
    for step in range(4):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-3" / "state.json").write_text("")
    assert files.prune(tmp_path, "step-", 2) == [tmp_path / "step-0"]


def test_prune_leaves_what_is_not_ours(tmp_path):
    for step in range(3):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-0" / "notes.txt").write_text("mine")
    (tmp_path / "step-").mkdir()
    (tmp_path / "step-" / "thesis.txt").write_text("years of work")
    assert files.prune(tmp_path, "step-", 1) == [tmp_path / "step-1"]
    assert names(tmp_path) == ["step-", "step-0", "step-2"]


@pytest.mark.parametrize("seen", ["size", "content"])
def test_prune_never_removes_the_only_whole_one(tmp_path, seen):
    for step in range(5):
        save(tmp_path / f"step-{step}", step)
    for step in (0, 2, 3, 4):
        path = tmp_path / f"step-{step}" / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] if seen == "size" else data[:-1] + b"\1")
    for keep in (3, 2, 1):
        files.prune(tmp_path, "step-", keep)
        assert load(tmp_path / "step-1") == 1


def test_sweep_clears_the_dead_and_spares_the_living(tmp_path):
    folder = tmp_path / "c"
    dead = forked(lambda: None)
    outcome(dead)
    living = held_by_child(tmp_path / "elsewhere")
    try:
        zombie = forked(lambda: None)
        os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)  # dead, but still listed
        began = int(Path(f"/proc/{zombie}/stat").read_text().rpartition(")")[2].split()[19])
        gone = [
            leftover(folder, "tmp", pid=dead, start=5),
            leftover(folder, "tmp", pid=zombie, start=began),
            leftover(folder, "tmp", pid=living, start=5),  # its number now belongs to another
            leftover(folder, "tmp", pid=os.getpid()),  # ours, and no longer in use
        ]
        spared = [
            leftover(folder, "tmp", pid=living),
            leftover(folder, "old", pid=living),
            leftover(folder, "tmp", pid=dead, start=5, machine="0" * 8),  # cannot be seen from here
            tmp_path / ".tmp-mine",
        ]
        for path in gone + spared:
            path.mkdir()
            (path / "file").write_text("text")
        with files.writing(tmp_path / "d") as temporary:
            assert sorted(files.sweep(tmp_path)) == sorted(gone)
            assert temporary.exists()
        assert names(tmp_path) == sorted(["d", "elsewhere", *(path.name for path in spared)])
        outcome(zombie)
    finally:
        kill(living)
    files.sweep(tmp_path)
    stay = ["c", "d", "elsewhere", *(path.name for path in spared[2:])]  # c was set aside
    assert names(tmp_path) == sorted(stay)


def test_what_another_machine_left_goes_after_a_day(tmp_path, monkeypatch):
    path = leftover(tmp_path / "c", "tmp", pid=1, start=5, machine="0" * 8)
    path.mkdir()
    now = time.time()
    for hours, there in ((23, True), (25, False)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        files.sweep(tmp_path)
        assert path.exists() is there


# Locks


def test_a_second_process_is_refused_by_name_and_a_dead_one_is_not_waited_for(tmp_path):
    child = held_by_child(tmp_path)
    try:
        with pytest.raises(BadInput, match=f"in use by process {child} on "), files.lock(tmp_path):
            pytest.fail("held twice")
    finally:
        kill(child)
    with files.lock(tmp_path), pytest.raises(BadInput, match=f"process {os.getpid()} "):  # noqa: SIM117
        with files.lock(tmp_path):
            pytest.fail("held twice")
    with pytest.raises(ZeroDivisionError), files.lock(tmp_path):
        raise ZeroDivisionError
    with files.lock(tmp_path):
        pass
    assert files.newest(tmp_path, "") == (None, [])


def test_an_orphaned_worker_does_not_keep_its_dead_parents_lock(tmp_path):
    reader, writer = os.pipe()

    def start_a_worker():
        os.write(writer, b"%d\n" % forked(lambda: time.sleep(60)))
        time.sleep(60)

    child = held_by_child(tmp_path, start_a_worker)
    worker = int(os.read(reader, 20))
    try:
        with pytest.raises(BadInput), files.lock(tmp_path):
            pytest.fail("held twice")
        kill(child)
        os.kill(worker, 0)
        with files.lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_worker_that_ends_does_not_end_its_parents_lock(tmp_path):
    try:
        with files.lock(tmp_path):
            child = os.fork()
            if child == 0:
                raise SystemExit
            assert outcome(child) == 0
            with pytest.raises(BadInput, match=f"process {os.getpid()} "), files.lock(tmp_path):
                pytest.fail("held twice")
    except SystemExit:
        os._exit(0)
    except OSError:
        os._exit(1)


def test_who_waits_gets_the_lock_when_its_holder_lets_go(tmp_path):
    child = held_by_child(tmp_path, lambda: time.sleep(0.5))
    with pytest.raises(BadInput), files.lock(tmp_path):
        pytest.fail("held twice")
    with files.lock(tmp_path, wait=True):
        assert outcome(child) == 0
        with pytest.raises(BadInput, match=f"process {os.getpid()} "), files.lock(tmp_path):
            pytest.fail("held twice")


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(BadInput, match="cannot be written"), files.lock(tmp_path):
        pytest.fail("followed")
    assert not (tmp_path / "precious").exists()


def test_nothing_heavy_is_imported_with_the_module():
    program = (
        "import sys, overt.files; "
        "print({'torch', 'numpy', 'safetensors', 'pickle'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


# One file alone


def test_a_file_with_its_own_mark_is_read_as_it_was_written_or_not_at_all(tmp_path):
    path = tmp_path / "words.json"
    value = {"format": "x", "words": ["a", "é", "\n"], "share": 0.1}
    files.write_sealed(path, value)
    assert files.read_sealed(path) == value
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(Damaged, match=re.escape(str(path))):
            files.read_sealed(path)
    for other in (whole + b" ", whole[:-1], b"[]", b"{}", b'{"sha256": 1}'):
        path.write_bytes(other)
        with pytest.raises(Damaged, match=re.escape(str(path))):
            files.read_sealed(path)


def test_one_file_is_held_against_the_manifest_beside_it(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files.check(tmp_path / "a")  # nobody has said what it should be
    files.seal(tmp_path, ["a"])
    files.check(tmp_path / "a")
    for name in ("a", "b"):
        (tmp_path / name).write_text("other")
    files.check(tmp_path / "b")
    with pytest.raises(Damaged, match=r"/a is not what was written"):
        files.check(tmp_path / "a")
    (tmp_path / files.MANIFEST).write_text("{}")
    with pytest.raises(Damaged, match="manifest"):
        files.check(tmp_path / "b")


def test_leftovers_are_told_before_they_are_swept(tmp_path):
    dead = forked(lambda: None)
    outcome(dead)
    path = leftover(tmp_path / "c", "tmp", pid=dead, start=5)
    path.mkdir()
    assert files.leftovers(tmp_path) == [path] == files.sweep(tmp_path)
    assert files.leftovers(tmp_path) == []


def test_what_is_set_aside_keeps_its_path_and_nothing_is_overwritten(tmp_path):
    for value in (1, 2):
        save(tmp_path / "a" / "c", value)
        place = files.set_aside(tmp_path / "a" / "c", tmp_path)
        wanted = tmp_path / files.ASIDE / "a" / ("c" if value == 1 else "c.1")
        assert place == wanted and load(place) == value
    assert names(tmp_path / "a") == []
    with pytest.raises(Failed, match="No such file"):
        files.set_aside(tmp_path / "none", tmp_path)


def test_a_lock_says_who_holds_it_and_who_left_it(tmp_path):
    assert files.holder(tmp_path) == ("", False)
    child = held_by_child(tmp_path)
    try:
        name, held = files.holder(tmp_path)
        assert held and name.startswith(f"process {child} on ")
    finally:
        kill(child)
    assert files.holder(tmp_path) == (name, False)  # dead, but its name is still there
    with files.lock(tmp_path):
        assert files.holder(tmp_path)[0].startswith(f"process {os.getpid()} on ")
    assert files.holder(tmp_path) == ("", False)


def test_a_manifest_lists_what_should_be_there(tmp_path):
    save(tmp_path / "c")
    (tmp_path / "c" / "state.json").unlink()
    assert files.listed(tmp_path / "c") == ["extra/order.npz", "model.safetensors", "state.json"]
