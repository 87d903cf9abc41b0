import pytest

from overt.errors import BadInput
from overt.measure.captions import java as programs


def test_no_java_is_said(monkeypatch):
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    with pytest.raises(BadInput, match="install a JRE"):
        programs.java()


def test_no_package_is_said(monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install pycocoevalcap"):
        programs.jar("meteor", "meteor")


def test_no_jar_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "package", lambda folder: tmp_path / folder)
    with pytest.raises(BadInput, match="install pycocoevalcap again"):
        programs.jar("meteor", "meteor")
    (tmp_path / "meteor").mkdir()
    (tmp_path / "meteor" / "meteor-1.5.jar").touch()
    assert programs.jar("meteor", "meteor").name == "meteor-1.5.jar"
