"""The answer of a vision-language model about a video: maps of words on every frame.

The model is a tiny Qwen2-VL with random weights; its videos are prepared by the tests, because the
video processors of transformers need torchvision.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.capture import watch
from overt.errors import UserError
from overt.inspect.inputs import ModelInput, prepare_call, read_inputs, takes_video
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import ModelView, ViewOptions, check_request, view_model
from overt.inspect.written_answer import prepare_written_call
from overt.viz.panel import grid_spans, grid_weights
from tests.experiments import foreign
from tests.inspect import tiny_video

pytestmark = pytest.mark.newer("transformers>=5")
FRAMES = tiny_video.frames()
GIVEN = ModelInput("what moves here", frames=FRAMES)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_video.loaded_model()


@pytest.fixture(scope="module")
def viewed(loaded: LoadedModel) -> ModelView:
    return view_model(loaded, GIVEN)


def test_each_time_step_is_a_frame_with_its_photo(viewed: ModelView) -> None:
    for shown in viewed.panels:
        spans = grid_spans(shown.attention.keys)
        assert [(span.name, span.shape) for span in spans] == [
            (f"frame {step}", (3, 4)) for step in (1, 2, 3)
        ]
        assert all(span.geometry is not None for span in spans)
        for step, span in enumerate(spans):  # two frames are one time step
            np.testing.assert_array_equal(shown.photos[span.name], FRAMES[2 * step])


@torch.no_grad()
def test_the_map_of_a_word_on_a_frame_is_the_attention_to_its_tokens(
    loaded: LoadedModel, viewed: ModelView
) -> None:
    prepared = prepare_written_call(loaded, GIVEN)
    answer = prepared.answer
    assert answer is not None and viewed.panels[0].queries == answer.words
    with watch(loaded.model.model.language_model) as trace:
        prepared.call(prepared.inputs)
    ids = prepared.inputs["input_ids"][0]
    video = (ids == tiny_video.families.VIDEO).nonzero()[:, 0].reshape(3, -1)
    rows = len(ids) - len(answer.ids) + (answer.word_of_token == 5).nonzero()[:, 0]
    weights = trace.map(-1).weights[0, 0][:, rows].mean(dim=1)  # h k
    shown = viewed.panels[0]
    found = shown.attention.weights[0, -1, :, 5].numpy()
    for span, places in zip(grid_spans(shown.attention.keys), video, strict=True):
        for head in range(4):
            np.testing.assert_allclose(
                grid_weights(span, found[head]).ravel(), weights[head, places], atol=1e-6
            )


def test_a_planted_change_of_a_frame_changes_the_tokens_of_its_step(loaded: LoadedModel) -> None:
    changed = [*FRAMES]
    changed[2] = changed[2] // 2
    embedded = []
    for frames in (FRAMES, tuple(changed)):
        inputs = prepare_call(loaded, ModelInput("what moves here", frames=frames)).inputs
        with torch.no_grad():
            made = loaded.model.model.get_video_features(
                inputs["pixel_values_videos"], inputs["video_grid_thw"]
            ).pooler_output
        embedded.append(torch.cat([*made]).reshape(3, 12, -1))
    change = (embedded[0] - embedded[1]).abs().sum(dim=(1, 2))
    assert int(change.argmax()) == 1 and float(change[1]) > 100 * float(change[[0, 2]].max())


def test_several_image_files_are_the_frames(tmp_path: Path) -> None:
    files = []
    for at, photo in enumerate(FRAMES[:2]):
        files.append(str(tmp_path / f"{at}.png"))
        Image.fromarray(photo).save(files[-1])
    found = read_inputs([*files, "what moves here"])
    assert found.photo is None and found.text == "what moves here" and len(found.frames) == 2
    np.testing.assert_array_equal(found.frames[1], FRAMES[1])
    Image.fromarray(FRAMES[0][:-1]).save(files[1])
    with pytest.raises(UserError, match="96 x 71.*96 x 72"):
        read_inputs(files)


def test_what_a_video_cannot_do_raises(
    loaded: LoadedModel, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(UserError, match="page.*html"):
        check_request(tmp_path / "a.png", ["1.png", "2.png", "what"], ViewOptions())
    with pytest.raises(UserError, match="--deletion"):
        check_request(tmp_path / "a.html", ["1.png", "2.png"], ViewOptions(deletion=True))
    with pytest.raises(UserError, match="--deletion"):
        view_model(loaded, GIVEN, ViewOptions(deletion=True))
    with pytest.raises(UserError, match="text.*video"):
        prepare_call(loaded, ModelInput(frames=FRAMES))
    still = load_model(foreign.Shelf(tmp_path_factory.mktemp("models"))["llava"])
    assert takes_video(loaded) and not takes_video(still)
    with pytest.raises(UserError, match="no video"):
        view_model(still, GIVEN)
    with pytest.raises(UserError, match="no video"):
        prepare_call(still, GIVEN)
