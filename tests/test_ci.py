"""The programs of the checks: no skip for want of what is there, no version with a known hole."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

REPORT = """<testsuites><testsuite>
<testcase classname="tests.data.test_cifar" name="test_a">
  <skipped type="pytest.skip" message="data set cifar10 is not under OVERT_DATA">x</skipped>
</testcase>
<testcase classname="tests.data.test_cifar" name="test_b">
  <skipped type="pytest.skip" message="data set cifar100 is not under OVERT_DATA">x</skipped>
</testcase>
<testcase classname="tests.data.test_cifar" name="test_c">
  <skipped type="pytest.skip" message="OVERT_DATA is not set: no real data">x</skipped>
</testcase>
<testcase classname="tests.test_x" name="test_d">
  <skipped type="pytest.xfail" message="trec6"/>
</testcase>
<testcase classname="tests.test_x" name="test_e"/>
</testsuite></testsuites>"""


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def skips() -> ModuleType:
    return program("skips")


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    return program("audit")


def test_a_skip_without_excuse_is_found(skips: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    tests = skips.skipped(report)
    assert [name.rpartition("_")[2] for name, _ in tests] == ["a", "b", "c"]

    assert skips.unexcused(tests, skips.present(tmp_path / "no_such_folder")) == []
    data = tmp_path / "data"
    (data / "cifar-100-binary").mkdir(parents=True)
    (data / "cifar-10-batches-bin").mkdir()
    (data / "cifar-10-batches-bin" / "test_batch.bin").touch()
    wrong = skips.unexcused(tests, skips.present(data))
    assert [name.rpartition("_")[2] for name, *_ in wrong] == ["a", "c"]


def test_every_set_that_is_laid_out_is_checked(skips: ModuleType) -> None:
    line = next(x for x in (ROOT / ".ci/run").read_text().splitlines() if x.startswith("SETS="))
    assert set(line.removeprefix("SETS=").strip('"').split()) <= set(skips.FOLDERS)


# --- known weaknesses


def test_no_pin_and_no_lowest_version_has_a_known_weakness(audit: ModuleType) -> None:
    pins = audit.pinned((ROOT / "constraints.txt").read_text())
    lowest = audit.lowest((ROOT / "pyproject.toml").read_text())
    assert len(pins) > 100 and {"pillow", "torch", "starlette"} <= set(lowest)
    assert set(audit.FLOORS) <= {*pins, *lowest}, "a floor for what nobody installs"
    assert list(audit.below(pins)) == [] and list(audit.below(lowest)) == []


def test_an_old_version_is_found(audit: ModuleType) -> None:
    (told,) = audit.below({"pillow": "12.1.1", "torch": "2.6.0", "other": "0.1"})
    assert told.startswith("pillow 12.1.1 is older than 12.2.0 (CVE-2026-40192")


def test_a_report_of_weaknesses_is_judged(audit: ModuleType) -> None:
    weak = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"]}
    looked = {"name": "a", "version": "1.0", "vulns": [weak]}
    skipped = {"name": "b", "skip_reason": "not found"}
    wrong, told = audit.judged(json.dumps({"dependencies": [looked, skipped]}))
    assert wrong == ["a 1.0: PYSEC-1, mended in ['2.0']"]
    assert told == "1 of 2 packages looked at, 1 weaknesses"
    audit.ACCEPTED["CVE-1"] = "we do not call it"
    assert audit.judged(json.dumps({"dependencies": [looked]}))[0] == []
    audit.ACCEPTED.clear()
    for nothing in (json.dumps({"dependencies": [skipped]}), "", "no connection"):
        wrong, told = audit.judged(nothing)
        assert wrong == [] and told.startswith("SKIPPED: ")


def test_every_promise_of_the_security_page_names_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promises = text.partition("## What we promise")[2].partition("## What we do not")[0]
    paragraphs = [one for one in promises.split("\n\n") if one.strip()]
    assert len(paragraphs) >= 8
    for paragraph in paragraphs:
        links = [link for link in re.findall(r"\]\(([^)]+)\)", paragraph) if "tests/" in link]
        assert links, paragraph[:60]
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / link).exists(), link
    for path in (ROOT / "tests" / "trust").glob("test_1[0-7]_*.py"):
        named = path.name in text or path.name.startswith("test_14_fuzz")
        assert named, f"{path.name} is not on the page"
