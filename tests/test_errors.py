"""Error classes: messages, base classes, exit codes and missing resources."""

import errno
import os
import signal
import sys

import pytest

from overt.errors import (
    CorruptFileError,
    RunError,
    RunInterrupted,
    UserError,
    missing_package,
    missing_resource,
    require_package,
    rust_panic_as_corrupt_file,
)


@pytest.mark.parametrize("kind", [UserError, CorruptFileError, RunError])
def test_the_message_of_an_error_is_unchanged(kind):
    assert str(kind("the file is gone; ask again")) == "the file is gone; ask again"


def test_errors_derive_from_standard_classes():
    assert issubclass(UserError, ValueError) and issubclass(RunError, RuntimeError)
    assert not issubclass(CorruptFileError, ValueError | RuntimeError | OSError)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_has_an_exit_code(number, code):
    stopped = RunInterrupted("step 5 is saved", number)
    assert stopped.code == code and str(stopped) == "step 5 is saved"


def test_missing_resources_are_distinguished_from_corrupt_files():
    assert missing_resource(MemoryError()) == "there was not enough memory"
    library = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    assert missing_resource(library) == "there was not enough memory"
    assert missing_resource(OSError(errno.ENOMEM, "x")) == "there was not enough memory"
    assert missing_resource(OSError(errno.EMFILE, "x")) == os.strerror(errno.EMFILE)
    assert missing_resource(RuntimeError("I/O error: Cannot allocate memory (os error 12)"))
    for code in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL):
        assert missing_resource(OSError(code, "x")) == ""
    assert (
        missing_resource(OSError("not a picture")) == missing_resource(ValueError("cut off")) == ""
    )
    assert missing_resource(CorruptFileError("'out of memory' is no label")) == ""


def test_the_cause_of_an_error_is_checked():
    wrapped = ValueError("cannot load")
    wrapped.__cause__ = MemoryError()
    assert missing_resource(wrapped) == "there was not enough memory"


def test_a_panic_of_a_library_is_a_corrupt_file():
    panic = type("PanicException", (BaseException,), {})
    message = r"the file cannot be used \(no such\)"
    with (
        pytest.raises(CorruptFileError, match=message),
        rust_panic_as_corrupt_file("the file cannot be used"),
    ):
        raise panic("no\nsuch")
    with pytest.raises(KeyboardInterrupt), rust_panic_as_corrupt_file("x"):
        raise KeyboardInterrupt


# --- optional packages


def test_a_missing_optional_package_is_named_with_its_extra(monkeypatch):
    require_package("scipy")
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"scipy.*\[measure\]") as caught:
        require_package("scipy")
    assert missing_package(caught.value) == "scipy"
    assert missing_package(ImportError("a broken library")) == missing_package(None) == ""
    assert missing_package(ModuleNotFoundError("No", name="overt.gone")) == ""


def test_a_package_that_misses_one_of_its_own_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        require_package("wandb")


def test_a_package_that_is_too_old_is_named_with_both_versions(monkeypatch):
    import scipy

    monkeypatch.setattr(scipy, "__version__", "0.60.0rc1+cpu")
    require_package("scipy", least="0.60")
    with pytest.raises(ImportError, match=r"0\.61.* 0\.60") as caught:
        require_package("scipy", least="0.61")
    assert missing_package(caught.value) == ""  # the message says what to do
