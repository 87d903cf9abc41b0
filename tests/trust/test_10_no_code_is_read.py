"""Trust 10: no reader loads pickles or runs code from files."""

import contextlib
import io
import itertools
import json
import pickle
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overt import io as overt_io
from overt.data import feature_cache, mat_files
from overt.data.batch import Batch
from overt.data.vocabulary import Vocabulary
from overt.errors import CorruptFileError, UserError
from overt.inspect.load_model import load_model, locate_model
from overt.nn import SmallCNN
from overt.targets.surrogate.generate import generate_surrogates
from overt.targets.surrogate.masks import RemoveWords
from overt.targets.surrogate.store import Surrogates
from overt.train import checkpoint
from overt.viz.gallery_sample import GallerySample, load_gallery, save_gallery
from tests.experiments import foreign
from tests.targets.surrogate.toys import Planted, Toys
from tests.trust.hostile import Canary, pickles
from tests.trust.unsafe_calls import find_unsafe_calls

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("overt", "benchmarks", "docs", "examples", ".ci")

UNSAFE_LINES = [
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "torch.load(path, weights_only=flag)",
    "import torch as t\nt.load(path)",
    "from torch import load\nload(path)",
    "from torch import load as get\nget(path)",
    "getattr(torch, 'load')(path)",
    "torch.jit.load(path)",
    "torch.hub.load('a/b', 'c')",
    "import pickle",
    "from pickle import loads",
    "import dill as p",
    "from joblib import load",
    "import marshal",
    "yaml.load(text)",
    "yaml.load(text, Loader=yaml.Loader)",
    "yaml.unsafe_load(text)",
    "from yaml import full_load as read\nread(text)",
    "np.load(path, allow_pickle=True)",
    "np.load(path, allow_pickle=flag)",
    "numpy.lib.format.read_array(file, allow_pickle=True)",
    "pandas.read_pickle(path)\nimport pandas",
    "eval(text)",
    "exec(text)",
    "list(map(eval, texts))",
    "import builtins\nbuiltins.exec(text)",
    "compile(text, 'a', 'exec')",
    "__import__(name)",
    "subprocess.run(command, shell=True)",
    "subprocess.Popen(command, shell=flag)",
    "os.system(command)",
    "from os import popen",
    "run = os.system",
    "os.execv(path, [])",
    "AutoModel.from_pretrained(name, trust_remote_code=True)",
    "AutoModel.from_pretrained(name, trust_remote_code=trust)",
    "archive.extractall(folder)",
    "archive.extractall(folder, filter='fully_trusted')",
    "shutil.unpack_archive(a, b)",
    "from torch.package import PackageImporter",
]
SAFE_LINES = [
    "torch.load(path, weights_only=True)",
    "yaml.safe_load(text)",
    "np.load(path, allow_pickle=False)",
    "np.load(path)",
    "model.eval()",
    "self.exec(text)",
    "re.compile('a')",
    "torch.compile(model)",
    "subprocess.run([command])",
    "AutoModel.from_pretrained(name, trust_remote_code=False)",
    "archive.extractall(folder, filter='data')",
    "cursor.load(path)",
    "'eval(text) is never called'",
]
TEXT_SEARCH = re.compile(
    r"torch\.load\((?!.*weights_only=True)|pickle\.load|yaml\.load|\b(eval|exec)\(|shell=True"
    r"|trust_remote_code=True"
)


@pytest.mark.parametrize("line", UNSAFE_LINES)
def test_unsafe_calls_are_found(line: str) -> None:
    assert find_unsafe_calls(line)


@pytest.mark.parametrize("line", SAFE_LINES)
def test_safe_calls_are_not_reported(line: str) -> None:
    assert find_unsafe_calls(line) == []


@pytest.mark.long
def test_the_source_has_no_unsafe_calls(record_result: Callable[..., None]) -> None:
    """Search the syntax tree; a text search misses calls and reports harmless ones."""
    sources = [path for part in SHIPPED for path in sorted((ROOT / part).rglob("*.py"))]
    found = {str(path): find_unsafe_calls(path.read_text()) for path in sources}
    assert len(sources) > 200
    assert {path: lines for path, lines in found.items() if lines} == {}
    missed = [line for line in UNSAFE_LINES if not TEXT_SEARCH.search(line)]
    wrong = [line for line in SAFE_LINES if TEXT_SEARCH.search(line)]
    assert missed and wrong
    record_result(
        10,
        "0 dangerous calls, by syntax tree",
        f"0 in {len(sources)} files; "
        f"{len(UNSAFE_LINES)} of {len(UNSAFE_LINES)} planted forms found",
        f"a text search misses {len(missed)} of them and flags {len(wrong)} harmless lines",
    )


# --- a pickle in place of each file


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class FourItems:
    """A dataset of four items."""

    name, split = "four", "train"

    def __len__(self) -> int:
        return 4

    def batch(self, indices: Sequence[int]) -> Batch:
        return Batch(tuple(f"item {i}" for i in indices), labels=torch.tensor(list(indices)))

    def digest(self) -> str:
        return "d"


Read = Callable[[], object]


def make_checkpoint(place: Path) -> tuple[Path, Read]:
    model = TinyModel()
    optimizer = torch.optim.Adam(model.parameters())
    model.layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = checkpoint.TrainState("train", 0)
    folder = checkpoint.save(place, state, model, {"model": optimizer})
    return folder, lambda: checkpoint.load(folder, model, {"model": optimizer})


def make_model(place: Path) -> tuple[Path, Read]:
    SmallCNN(3, 0.25).save_pretrained(place / "model")
    return place / "model", lambda: SmallCNN.from_pretrained(place / "model")


def make_cache(place: Path) -> tuple[Path, Read]:
    key = feature_cache.FeatureKey("toy", "w", "t", "d")
    feature_cache.build_feature_cache(
        place, key, FourItems(), lambda batch: torch.ones(len(batch), 2, 3), shard=2
    )
    return place / "shard-00000", lambda: feature_cache.FeatureCache(place).check()


def make_surrogates(place: Path) -> tuple[Path, Read]:
    generate_surrogates(Planted(), Toys(), place, [RemoveWords()], shard=3, batch=2)

    def read() -> object:
        found = Surrogates(place)
        found.check()
        ids = found.ids
        return [part(ids) for part in (found.target, found.mask, found.base, found.best)], (
            found.probes(ids)
        )

    return place / "shard-00000", read


def make_gallery(place: Path) -> tuple[Path, Read]:
    photo = np.zeros((4, 4, 3), np.uint8)
    save_gallery(
        place / "gallery", [GallerySample("a", photo, text="b", truth="c", prediction="d")]
    )
    return place / "gallery", lambda: load_gallery(place / "gallery")


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file by the data and write a valid manifest, as an attacker can."""
    new = folder.parent / "forged"
    with overt_io.atomic_folder(new) as inside:
        for path in folder.rglob("*"):
            if path.is_file() and path.name not in (overt_io.MANIFEST, name):
                target = inside / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        (inside / name).write_bytes(data)
    shutil.rmtree(folder)
    new.rename(folder)
    overt_io.verify(folder)


KINDS = (make_checkpoint, make_model, make_cache, make_surrogates, make_gallery)


def reading_runs_code(read: Callable[[io.BytesIO], object], data: bytes, mark: Path) -> bool:
    """Whether reading the data ran its code."""
    mark.unlink(missing_ok=True)
    with contextlib.suppress(Exception):
        read(io.BytesIO(data))
    return mark.exists()


def test_a_pickle_in_place_of_any_file_raises_and_does_not_run(
    tmp_path: Path, record_result: Callable[..., None]
) -> None:
    mark = tmp_path / "was-run"
    payloads = pickles(mark)
    next_payloads = itertools.cycle(payloads.values())  # three formats per file, in turn
    refused = 0
    for number, kind in enumerate(KINDS):
        folder, read = kind(tmp_path / str(number))
        read()  # it is intact
        intact = Path(shutil.copytree(folder, tmp_path / f"{number}-whole"))
        names = [path.name for path in intact.iterdir() if path.name != overt_io.MANIFEST]
        for name in names:
            for data in itertools.islice(next_payloads, 3):
                shutil.rmtree(folder)
                shutil.copytree(intact, folder)
                replace_file(folder, name, data)
                with pytest.raises((CorruptFileError, UserError), match=str(tmp_path)):
                    read()
                refused += 1
    for data in payloads.values():
        (tmp_path / "a.mat").write_bytes(data)
        with pytest.raises(CorruptFileError):
            mat_files.read_arrays(tmp_path / "a.mat", {"X": mat_files.ArraySpec((2, 2))})
        (tmp_path / "a.json").write_bytes(data)
        with pytest.raises(CorruptFileError):
            Vocabulary.load(tmp_path / "a.json")
        refused += 2
    assert not mark.exists() and refused > 60
    readers: list[Callable[[io.BytesIO], object]] = [
        pickle.load,
        lambda stream: np.load(stream, allow_pickle=True)[0],
        lambda stream: np.load(stream, allow_pickle=True)["a"],
        lambda stream: torch.load(stream, weights_only=False),
    ]
    naive = sum(
        any(reading_runs_code(read, data, mark) for read in readers) for data in payloads.values()
    )
    assert naive == len(payloads)
    record_result(
        10,
        "0 pickles run",
        f"0 of {refused} run, all raise one line",
        f"loaders of pickle, torch and NumPy run {naive} of {len(payloads)} file formats",
    )


# --- model folders


CODE = "configuration_own.py modeling_own.py tokenization_own.py processing_own.py __init__.py"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign.bert(tmp_path_factory.mktemp("models") / "bert")


def with_code(folder: Path, mark: Path) -> None:
    """Write Python files that create a file when run, and every setting that can refer to them."""
    for name in CODE.split():
        (folder / name).write_text(
            f"open({str(mark)!r}, 'w').close()\n"
            "from transformers import BertConfig, BertModel, PreTrainedTokenizerFast\n"
            "class C(BertConfig): pass\n"
            "class M(BertModel): pass\n"
            "class T(PreTrainedTokenizerFast): pass\n"
        )
    autos = {
        "AutoConfig": "configuration_own.C",
        "AutoModel": "modeling_own.M",
        "AutoTokenizer": ["tokenization_own.T", "tokenization_own.T"],
        "AutoProcessor": "processing_own.P",
        "AutoImageProcessor": "processing_own.P",
    }
    for name in ("config.json", "tokenizer_config.json"):
        update_json(folder / name, auto_map=autos)
    (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": autos}))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": autos}))


def update_json(path: Path, **values: Any) -> None:
    values_in_file = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values_in_file, **values}))


def unknown_type(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    update_json(folder / "config.json", model_type="own", architectures=["M"])


def only_tokenizer(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    update_json(folder / "tokenizer_config.json", tokenizer_class="T")


def pickled(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Canary(mark)}, folder / "pytorch_model.bin")


def pickled_beside(folder: Path, mark: Path) -> None:
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt"):
        torch.save({"a": Canary(mark)}, folder / name)


def pickled_in_disguise(folder: Path, mark: Path) -> None:
    torch.save({"a": Canary(mark)}, folder / "model.safetensors")


def pickled_parts(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": Canary(mark)}, folder / "part.bin")
    index = {"weight_map": {"embeddings.word_embeddings.weight": "part.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def parts_elsewhere(folder: Path, mark: Path) -> None:
    torch.save({"a": Canary(mark)}, folder.parent / "outside.bin")
    index = {"weight_map": {"a": "../outside.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def kernel_in_a_table(folder: Path, mark: Path) -> None:
    update_json(folder / "config.json", attn_implementation={"": "kernels-community/x"})


def foreign_kernel(folder: Path, mark: Path) -> None:
    update_json(folder / "config.json", _attn_implementation="somebody/kernel")
    update_json(folder / "config.json", attn_implementation="somebody/kernel:run")


def template_with_code(folder: Path, mark: Path) -> None:
    trap = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os }}"
    (folder / "chat_template.jinja").write_text(trap)
    update_json(folder / "tokenizer_config.json", chat_template=trap)


def timm_elsewhere(folder: Path, mark: Path) -> None:
    torch.save({"state_dict": Canary(mark)}, folder / "other.pth")
    config = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"checkpoint_path": "other.pth"},
    }
    (folder / "config.json").write_text(json.dumps(config))


def timm_from_the_hub(folder: Path, mark: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architecture": "hf-hub:somebody/model"}))


def timm_from_a_folder(folder: Path, mark: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architecture": f"local-dir:{folder}"}))


ATTACKS = [
    *(with_code, unknown_type, only_tokenizer, pickled, pickled_beside, pickled_in_disguise),
    *(pickled_parts, parts_elsewhere, foreign_kernel, kernel_in_a_table, template_with_code),
    *(timm_elsewhere, timm_from_the_hub, timm_from_a_folder),
]
REFUSED = [
    *(unknown_type, pickled, pickled_in_disguise, pickled_parts, parts_elsewhere),
    *(foreign_kernel, kernel_in_a_table, timm_elsewhere, timm_from_the_hub, timm_from_a_folder),
]


def test_code_in_a_model_folder_never_runs(
    bert: Path, tmp_path: Path, record_result: Callable[..., None]
) -> None:
    """Each folder raises with its name, or loads without running code."""
    mark, opened, messages = tmp_path / "was-run", [], {}
    for attack in ATTACKS:
        folder = Path(shutil.copytree(bert, tmp_path / attack.__name__ / "bert"))
        attack(folder, mark)
        try:
            subject = load_model(locate_model(str(folder)))
        except (UserError, CorruptFileError) as problem:
            messages[attack] = str(problem)
        else:
            assert type(subject.model).__module__.startswith("transformers.models.bert")
            opened.append(attack)
        assert not mark.exists(), attack.__name__
    assert list(messages) == REFUSED
    assert all(one.__name__ in message and "\n" not in message for one, message in messages.items())
    naive = run_attacks_naively(bert, tmp_path / "naive", mark)
    assert naive
    record_result(
        10,
        "code in a model folder never runs",
        f"0 of {len(ATTACKS)} attacks ran: {len(messages)} rejected, {len(opened)} loaded as data",
        f"{len(naive)} run with trust_remote_code or without safetensors: {', '.join(naive)}",
    )


def run_attacks_naively(bert: Path, place: Path, mark: Path) -> list[str]:
    """Return the attacks that succeed with trusting loaders."""
    import transformers

    def load_with_trust(folder: Path) -> None:
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    def load_pickle(folder: Path) -> None:
        torch.load(folder / "pytorch_model.bin", weights_only=False)

    found = []
    for attack, read in ((only_tokenizer, load_with_trust), (pickled, load_pickle)):
        folder = Path(shutil.copytree(bert, place / attack.__name__))
        attack(folder, mark)
        mark.unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            read(folder)
        if mark.exists():
            found.append(attack.__name__)
        mark.unlink(missing_ok=True)
    return found
