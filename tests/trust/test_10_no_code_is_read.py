"""Trust 10: no code path loads pickle, and nothing that is read is run."""

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

from overt import files
from overt.data import features, matlab
from overt.data.batch import Batch
from overt.data.vocabulary import Vocabulary
from overt.errors import BadInput, Damaged
from overt.models import SmallCNN
from overt.recipes.opening import locate, open_model
from overt.show.sample import Sample, load_gallery, save_gallery
from overt.supervise.surrogate.kept import Surrogates
from overt.supervise.surrogate.making import surrogates
from overt.supervise.surrogate.masks import WithoutWords
from overt.train import checkpoint
from tests.recipes import foreign
from tests.supervise.surrogate.toys import Planted, Toys
from tests.trust.dangers import dangers
from tests.trust.hostile import Canary, pickles

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("overt", "benchmarks", "docs", "examples", ".ci")

PLANTED = [
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
HARMLESS = [
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
GREP = re.compile(
    r"torch\.load\((?!.*weights_only=True)|pickle\.load|yaml\.load|\b(eval|exec)\(|shell=True"
    r"|trust_remote_code=True"
)


@pytest.mark.parametrize("line", PLANTED)
def test_every_dangerous_form_is_found(line: str) -> None:
    assert dangers(line)


@pytest.mark.parametrize("line", HARMLESS)
def test_what_only_looks_dangerous_is_not(line: str) -> None:
    assert dangers(line) == []


def test_nothing_shipped_runs_what_it_reads(reached: Callable[..., None]) -> None:
    """By syntax tree; a search for words takes one thing for the other."""
    sources = [path for part in SHIPPED for path in sorted((ROOT / part).rglob("*.py"))]
    found = {str(path): dangers(path.read_text()) for path in sources}
    assert len(sources) > 200
    assert {path: lines for path, lines in found.items() if lines} == {}
    missed = [line for line in PLANTED if not GREP.search(line)]
    wrong = [line for line in HARMLESS if GREP.search(line)]
    assert missed and wrong
    reached(
        10,
        "0 dangerous calls, by syntax tree",
        f"0 in {len(sources)} files; {len(PLANTED)} of {len(PLANTED)} planted forms found",
        f"a search for words misses {len(missed)} of them and flags {len(wrong)} harmless lines",
    )


# --- every reader meets a pickle


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Four:
    """A data set of four items."""

    name, split = "four", "train"

    def __len__(self) -> int:
        return 4

    def batch(self, indices: Sequence[int]) -> Batch:
        return Batch(tuple(f"item {i}" for i in indices), labels=torch.tensor(list(indices)))

    def digest(self) -> str:
        return "d"


Read = Callable[[], object]


def checkpoints(place: Path) -> tuple[Path, Read]:
    model = Plain()
    optimizer = torch.optim.Adam(model.parameters())
    model.layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = checkpoint.State("train", 0)
    folder = checkpoint.save(place, state, model, {"model": optimizer})
    return folder, lambda: checkpoint.load(folder, model, {"model": optimizer})


def networks(place: Path) -> tuple[Path, Read]:
    SmallCNN(3, 0.25).save_pretrained(place / "model")
    return place / "model", lambda: SmallCNN.from_pretrained(place / "model")


def caches(place: Path) -> tuple[Path, Read]:
    key = features.Key("toy", "w", "t", "d")
    features.build(place, key, Four(), lambda batch: torch.ones(len(batch), 2, 3), shard=2)
    return place / "shard-00000", lambda: features.FeatureCache(place).check()


def targets(place: Path) -> tuple[Path, Read]:
    surrogates(Planted(), Toys(), place, [WithoutWords()], shard=3, batch=2)

    def read() -> object:
        found = Surrogates(place)
        found.check()
        ids = found.ids
        return [part(ids) for part in (found.target, found.mask, found.base, found.best)], (
            found.probes(ids)
        )

    return place / "shard-00000", read


def galleries(place: Path) -> tuple[Path, Read]:
    photo = np.zeros((4, 4, 3), np.uint8)
    save_gallery(place / "gallery", [Sample("a", photo, text="b", truth="c", prediction="d")])
    return place / "gallery", lambda: load_gallery(place / "gallery")


def forge(folder: Path, name: str, data: bytes) -> None:
    """Put the data in the place of a file and make the manifest right again, as anybody can."""
    new = folder.parent / "forged"
    with files.writing(new) as inside:
        for path in folder.rglob("*"):
            if path.is_file() and path.name not in (files.MANIFEST, name):
                target = inside / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        (inside / name).write_bytes(data)
    shutil.rmtree(folder)
    new.rename(folder)
    files.verify(folder)


KINDS = (checkpoints, networks, caches, targets, galleries)


def runs(read: Callable[[io.BytesIO], object], data: bytes, mark: Path) -> bool:
    """Whether reading the data has run what is in it."""
    mark.unlink(missing_ok=True)
    with contextlib.suppress(Exception):
        read(io.BytesIO(data))
    return mark.exists()


def test_a_pickle_in_the_place_of_any_file_is_refused_and_not_run(
    tmp_path: Path, reached: Callable[..., None]
) -> None:
    mark = tmp_path / "was-run"
    hidden = pickles(mark)
    turns = itertools.cycle(hidden.values())  # every file meets three wrappings, in turn
    refused = 0
    for number, kind in enumerate(KINDS):
        folder, read = kind(tmp_path / str(number))
        read()  # it is whole
        whole = Path(shutil.copytree(folder, tmp_path / f"{number}-whole"))
        names = [path.name for path in whole.iterdir() if path.name != files.MANIFEST]
        for name in names:
            for data in itertools.islice(turns, 3):
                shutil.rmtree(folder)
                shutil.copytree(whole, folder)
                forge(folder, name, data)
                with pytest.raises((Damaged, BadInput), match=str(tmp_path)):
                    read()
                refused += 1
    for data in hidden.values():
        (tmp_path / "a.mat").write_bytes(data)
        with pytest.raises(Damaged):
            matlab.read_arrays(tmp_path / "a.mat", {"X": matlab.Wanted((2, 2))})
        (tmp_path / "a.json").write_bytes(data)
        with pytest.raises(Damaged):
            Vocabulary.load(tmp_path / "a.json")
        refused += 2
    assert not mark.exists() and refused > 60
    readers: list[Callable[[io.BytesIO], object]] = [
        pickle.load,
        lambda stream: np.load(stream, allow_pickle=True)[0],
        lambda stream: np.load(stream, allow_pickle=True)["a"],
        lambda stream: torch.load(stream, weights_only=False),
    ]
    naive = sum(any(runs(read, data, mark) for read in readers) for data in hidden.values())
    assert naive == len(hidden)
    reached(
        10,
        "0 pickles run",
        f"0 of {refused} run, all refused in a sentence",
        f"loaders of pickle, torch and NumPy run {naive} of {len(hidden)} wrappings",
    )


# --- model folders


CODE = "configuration_own.py modeling_own.py tokenization_own.py processing_own.py __init__.py"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign.bert(tmp_path_factory.mktemp("models") / "bert")


def with_code(folder: Path, mark: Path) -> None:
    """Python files that leave a mark, and settings in every place that could name them."""
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
        change(folder / name, auto_map=autos)
    (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": autos}))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": autos}))


def change(path: Path, **values: Any) -> None:
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, **values}))


def unknown_type(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    change(folder / "config.json", model_type="own", architectures=["M"])


def only_tokenizer(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    change(folder / "tokenizer_config.json", tokenizer_class="T")


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


def foreign_kernel(folder: Path, mark: Path) -> None:
    change(folder / "config.json", _attn_implementation="somebody/kernel")
    change(folder / "config.json", attn_implementation="somebody/kernel:run")


def template_with_code(folder: Path, mark: Path) -> None:
    trap = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os }}"
    (folder / "chat_template.jinja").write_text(trap)
    change(folder / "tokenizer_config.json", chat_template=trap)


def timm_elsewhere(folder: Path, mark: Path) -> None:
    torch.save({"state_dict": Canary(mark)}, folder / "other.pth")
    own = {"architecture": "vit_tiny_patch16_224", "model_args": {"checkpoint_path": "other.pth"}}
    (folder / "config.json").write_text(json.dumps(own))


def timm_from_the_hub(folder: Path, mark: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architecture": "hf-hub:somebody/model"}))


def timm_from_a_folder(folder: Path, mark: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architecture": f"local-dir:{folder}"}))


ATTACKS = [
    *(with_code, unknown_type, only_tokenizer, pickled, pickled_beside, pickled_in_disguise),
    *(pickled_parts, parts_elsewhere, foreign_kernel, template_with_code),
    *(timm_elsewhere, timm_from_the_hub, timm_from_a_folder),
]
REFUSED = [
    *(unknown_type, pickled, pickled_in_disguise, pickled_parts, parts_elsewhere),
    *(foreign_kernel, timm_elsewhere, timm_from_the_hub, timm_from_a_folder),
]


def test_no_code_of_a_model_folder_is_run(
    bert: Path, tmp_path: Path, reached: Callable[..., None]
) -> None:
    """Refused in a sentence that names the folder, or opened without running anything."""
    mark, opened, told = tmp_path / "was-run", [], {}
    for attack in ATTACKS:
        folder = Path(shutil.copytree(bert, tmp_path / attack.__name__ / "bert"))
        attack(folder, mark)
        try:
            subject = open_model(locate(str(folder)))
        except (BadInput, Damaged) as problem:
            told[attack] = str(problem)
        else:
            assert type(subject.model).__module__.startswith("transformers.models.bert")
            opened.append(attack)
        assert not mark.exists(), attack.__name__
    assert list(told) == REFUSED
    assert all(one.__name__ in said and "\n" not in said for one, said in told.items())
    naive = naively(bert, tmp_path / "naive", mark)
    assert naive
    reached(
        10,
        "no code of a model folder is ever run",
        f"0 of {len(ATTACKS)} attacks ran: {len(told)} refused, {len(opened)} opened as data",
        f"{len(naive)} run by loading with trust, or without safetensors: {', '.join(naive)}",
    )


def naively(bert: Path, place: Path, mark: Path) -> list[str]:
    """The attacks that succeed where a folder is trusted."""
    import transformers

    def trusting(folder: Path) -> None:
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    def unpickling(folder: Path) -> None:
        torch.load(folder / "pytorch_model.bin", weights_only=False)

    found = []
    for attack, read in ((only_tokenizer, trusting), (pickled, unpickling)):
        folder = Path(shutil.copytree(bert, place / attack.__name__))
        attack(folder, mark)
        mark.unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            read(folder)
        if mark.exists():
            found.append(attack.__name__)
        mark.unlink(missing_ok=True)
    return found
