"""The catalog of recipes and tables: listing, imports, and frozen names."""

import json
import subprocess
import sys
from pathlib import Path

from overt.papers.catalog import listing, networks, recipes, tables


def test_the_listing_has_every_recipe() -> None:
    found = listing()
    assert [one["name"] for one in found["recipes"]] == list(recipes())
    assert json.loads(json.dumps(found)) == found


def test_making_all_recipes_imports_no_large_packages() -> None:
    code = (
        "import sys\n"
        "from overt.papers.catalog import recipes; from overt.experiments import settings\n"
        "[settings.describe(make()) for make in recipes().values()]\n"
        "print(*{'torch', 'numpy', 'scipy', 'transformers', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_recipe_names_are_frozen() -> None:
    """They seed random streams, `mixed(seed, recipe.name, stage)`: results depend on them."""
    frozen = (Path(__file__).parent / "recipe_names.txt").read_text().split()
    assert list(recipes()) == frozen


def test_table_names_and_file_names_are_frozen() -> None:
    """Results are stored under these names; tables of one paper may share a folder."""
    assert {name: table.stem for name, table in tables().items()} == {
        **dict.fromkeys(("scenes", "baselines", "vlm-pruning", "vlm-boxes"), "table"),
        **dict.fromkeys(("ltpa-1", "ltpa-scenes"), "table"),
        **dict.fromkeys(("ssa-1", "ssa-1-hops", "ssa-2", "ssa-3", "ssa-4", "ssa-weights"), "table"),
        **dict.fromkeys(("ssa-scenes", "ssa-shapes", "ssa-masks", "ssa-words"), "table"),
        **dict.fromkeys(("han-1", "han-clevr", "han-sortclevr", "han-crowded"), "table"),
        **dict.fromkeys(("han-scenes", "han-easyvqa", "han-daquar"), "table"),
        **dict.fromkeys(
            ("vgp-scenes", "vgp-entities", "a2-3", "a2-scenes", "a2-flickr8k"), "table"
        ),
        **dict.fromkeys(("vgp-scenes-pretrained", "vgp-entities-pretrained"), "table"),
        **{name: name for name in ("ltpa-2", "ltpa-3", "ltpa-fig6", "ltpa-fig9", "ltpa-fig10")},
        **{name: name for name in ("ltpa-parts", "ltpa-scenes-parts")},
        **{name: name for name in ("han-2", "han-3", "han-simple", "han-fig3", "han-fig3a")},
        **{name: name for name in ("vgp-1", "a2-1", "a2-fig4")},
    }


def test_saved_class_names_of_networks_are_frozen() -> None:
    """Run folders name their network by these strings."""
    assert set(networks()) == {
        *("VQA", "ShowAskAttend", "StackedAttention", "HAN", "SmallCNN", "AttentiveCNN"),
        *("TextClassifier", "StructuredClassifier"),
        *("VGG", "VGGGap", "VGGAttention", "VGGProgressive", "ResNet", "ResNetAttention"),
        *("VLBert", "Captioner", "AlignedCaptioner", "VisionLanguageVQA"),
    }
