"""The check that no test skips for want of something that is there."""

import importlib.util
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


@pytest.fixture(scope="module")
def skips() -> ModuleType:
    spec = importlib.util.spec_from_file_location("skips", ROOT / ".ci" / "skips.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
