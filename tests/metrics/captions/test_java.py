"""Locating Java and the JAR files of pycocoevalcap."""

import pytest

from overt.errors import UserError
from overt.metrics.captions import java as programs


def test_missing_java_raises(monkeypatch):
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="install a JRE"):
        programs.find_java()


def test_missing_package_raises(monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pycocoevalcap"):
        programs.find_jar("meteor", "meteor")


def test_missing_jar_raises(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "package_folder", lambda folder: tmp_path / folder)
    with pytest.raises(UserError, match="pycocoevalcap"):
        programs.find_jar("meteor", "meteor")
    (tmp_path / "meteor").mkdir()
    (tmp_path / "meteor" / "meteor-1.5.jar").touch()
    assert programs.find_jar("meteor", "meteor").name == "meteor-1.5.jar"
