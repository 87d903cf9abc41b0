import signal

import pytest

from overt.errors import BadInput, Damaged, Failed, Stopped


@pytest.mark.parametrize("kind", [BadInput, Damaged, Failed])
def test_an_error_is_its_sentence(kind):
    assert str(kind("the file is gone; ask again")) == "the file is gone; ask again"


def test_library_code_may_catch_the_usual_classes():
    assert issubclass(BadInput, ValueError) and issubclass(Failed, RuntimeError)
    assert not issubclass(Damaged, ValueError | RuntimeError | OSError)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_knows_its_exit_code(number, code):
    stopped = Stopped("step 5 is saved", number)
    assert stopped.code == code and str(stopped) == "step 5 is saved"
