"""A tiny Qwen2-VL with random weights, a processor of videos and words, and a moving square."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from overt.inspect.loaded_model import LoadedModel
from tests.capture.layouts import vision_language as families

MARKS = {families.IMAGE: "<image>", families.VIDEO: "<video>", families.START: "<start>",
         families.END: "<end>"}  # fmt: skip
WORDS = {5: "what", 6: "moves", 7: "here"}


class Processor:
    """Texts and videos to the inputs of Qwen2-VL; the video processor is that of the families."""

    video_token = "<video>"
    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, None
        self.video_processor = families.QwenVideos()

    def __call__(
        self, text: str, videos: Sequence[Any] = (), return_tensors: str = "pt"
    ) -> dict[str, torch.Tensor]:
        given = self.video_processor(videos=videos)
        steps, rows, columns = given["video_grid_thw"][0]
        cells = " ".join([self.video_token] * int(steps * rows * columns // 4))
        text = text.replace(self.video_token, f"<start> {cells} <end>")
        ids = torch.tensor(self.tokenizer(text)["input_ids"])[None]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": 2 * (ids == families.VIDEO).long(),
            **{name: torch.as_tensor(value) for name, value in given.items()},
        }


def tokenizer(size: int) -> Any:
    """A tokenizer of whole words; other ids are w0, w1 and so on."""
    import tokenizers
    import transformers

    words = {MARKS.get(n, WORDS.get(n, f"w{n}")): n for n in range(size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="w0", additional_special_tokens=[*MARKS.values()]
    )


def loaded_model() -> LoadedModel:
    """The model with weights so large that its attention is not even."""
    model, _ = families.qwen("Qwen2VL")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "language" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    text = tokenizer(model.config.text_config.vocab_size)
    return LoadedModel("tiny-qwen2-vl", model.eval(), Processor(text), text)


def frames(count: int = 6, size: tuple[int, int] = (72, 96)) -> tuple[np.ndarray, ...]:
    """A bright square that moves to the right over a shaded background."""
    height, width = size
    made = []
    for at in range(count):
        photo = np.linspace(40, 110, width).astype(np.uint8)[None, :, None].repeat(height, 0)
        photo = photo.repeat(3, 2)
        left = round((width - 24) * at / max(1, count - 1))
        photo[24:48, left : left + 24] = (250, 210, 40)
        made.append(photo)
    return tuple(made)
