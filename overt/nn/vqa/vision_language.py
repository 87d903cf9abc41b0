"""A small vision-language model that answers questions, in the architecture of LLaVA.

Liu, Li, Wu and Lee, "Visual Instruction Tuning" (LLaVA), NeurIPS 2023,
https://arxiv.org/abs/2304.08485: an image encoder, a projector of two layers, and a decoder that
reads image tokens and words. The model is `LlavaForConditionalGeneration` of transformers, with
random weights and a tokenizer of whole words. So a method for vision-language models can be tested
on a model that is trained in minutes, with answers whose evidence is known.

Axis letters:  b batch  l layer  h head  q query  k image token  n position  c answer
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from overt.attention import AttentionMap, Layout, Span
from overt.capture.session import watch
from overt.data.batch import Batch
from overt.data.vocabulary import BEGIN, END, PAD, SPECIAL, UNKNOWN
from overt.errors import UserError, require_package
from overt.geometry import PixelGeometry
from overt.losses.loss import Loss
from overt.nn.network import Network
from overt.nn.output import Output

IMAGE_TOKEN, QUESTION_MARK = "<image>", "?"
PIXEL_MEAN, PIXEL_SCALE = 127.5, 127.5  # bytes to -1 .. 1


@dataclass(frozen=True)
class VisionLanguageSizes:
    """Sizes of the model and the words that it knows.

    Args:
        words: words of questions, as in `overt.data.vocabulary.Vocabulary`.
        answers: the possible answers, one word each.
        side: side of the images in pixels.
        patch: side of an image token in pixels.
        width: features of the image encoder and of the decoder.
        vision_layers: layers of the image encoder.
        layers: layers of the decoder.
        heads: attention heads of each layer.

    Example:
        >>> VisionLanguageSizes(("what",), ("red", "blue"), side=32).grid
        (4, 4)
    """

    words: tuple[str, ...]
    answers: tuple[str, ...]
    side: int = 64
    patch: int = 8
    width: int = 128
    vision_layers: int = 3
    layers: int = 6
    heads: int = 4

    def __post_init__(self) -> None:
        if self.side % self.patch:
            raise UserError(
                f"expected images whose side is a multiple of the patch of {self.patch} pixels, "
                f"got {self.side}"
            )
        if self.width % (2 * self.heads):
            raise UserError(
                f"expected a width that is a multiple of 2 x {self.heads} heads, got {self.width}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the image tokens."""
        return self.side // self.patch, self.side // self.patch

    @property
    def tokens(self) -> tuple[str, ...]:
        """Every token by id: those of a `Vocabulary`, then the image, "?" and further answers."""
        known = (*SPECIAL, *self.words, IMAGE_TOKEN, QUESTION_MARK)
        return (*known, *(answer for answer in self.answers if answer not in self.words))


@dataclass(frozen=True, eq=False)
class Prompts:
    """Inputs of the model: begin, the image tokens, the question and "?", padded at the end.

    Args:
        pixel_values: the image of each sample, from -1 to 1.
        input_ids: token ids.
        attention_mask: 1 for tokens, 0 for padding and hidden image tokens.
        last: position of the last token, from which the answer is predicted.
        geometry: geometry of the image of each sample.
    """

    pixel_values: Float[Tensor, "b 3 y x"]
    input_ids: Int[Tensor, "b n"]
    attention_mask: Int[Tensor, "b n"]
    last: Int[Tensor, " b"]
    geometry: PixelGeometry | None = None

    def as_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the Hugging Face model."""
        return {
            "pixel_values": self.pixel_values,
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
        }


class VisionLanguageVQA(Network[Prompts]):
    """A vision-language model that answers questions about images in one word.

    `model.vlm` is the Hugging Face model, for `generate` and every tool that takes one, and
    `model.processor()` makes its inputs from photos and texts. `decide` returns the scores of the
    answers and, if `maps` is true, the attention of the token before the answer to the image: the
    mean over the layers of the decoder, for every head. `attend` has every layer.

    Args:
        sizes: sizes and words.

    Attributes:
        maps: whether `decide` captures attention.

    Example:
        >>> sizes = VisionLanguageSizes(("what", "color"), ("red", "blue"), side=16, width=16)
        >>> model = VisionLanguageVQA(sizes).eval()
        >>> batch = Batch(
        ...     ids=("a",),
        ...     images=torch.zeros(1, 3, 16, 16, dtype=torch.uint8),
        ...     tokens=torch.tensor([[5, 6]]),
        ...     token_mask=torch.ones(1, 2, dtype=torch.bool),
        ... )
        >>> output = model(batch)
        >>> output.prediction.shape, output.attention_to("image").shape  # b l h q k
        (torch.Size([1, 2]), (1, 1, 4, 1, 4))
    """

    answer_ids: Int[Tensor, " c"]

    def __init__(self, sizes: VisionLanguageSizes) -> None:
        require_package("transformers")
        from transformers import (
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
            SiglipVisionConfig,
        )

        super().__init__()
        self.sizes = sizes
        tokens = sizes.tokens
        self.image_id, self.mark_id = tokens.index(IMAGE_TOKEN), tokens.index(QUESTION_MARK)
        layer: dict[str, Any] = {
            "hidden_size": sizes.width,
            "intermediate_size": 2 * sizes.width,
            "num_attention_heads": sizes.heads,
            "initializer_range": sizes.width**-0.5,  # 0.02 is for wide models: image tokens vanish
        }
        special: dict[str, Any] = {
            "pad_token_id": PAD,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
        }
        encoder: dict[str, Any] = {**layer, "vision_use_head": False}
        vision = SiglipVisionConfig(
            **encoder,
            num_hidden_layers=sizes.vision_layers,
            image_size=sizes.side,
            patch_size=sizes.patch,
        )
        text = LlamaConfig(
            **layer,
            num_hidden_layers=sizes.layers,
            vocab_size=len(tokens),
            max_position_embeddings=1024,
            **special,
        )
        config = LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=self.image_id,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",  # SigLIP has no class token
            image_seq_length=sizes.grid[0] * sizes.grid[1],
            **special,
        )
        config.initializer_range = sizes.width**-0.5  # of the projector
        self.vlm: Any = LlavaForConditionalGeneration(config)
        self.vlm.set_attn_implementation("sdpa")
        found = [tokens.index(answer) for answer in sizes.answers]
        self.register_buffer("answer_ids", torch.tensor(found), persistent=False)
        self.maps = True

    def config(self) -> dict[str, Any]:
        """Return the sizes."""
        sizes = asdict(self.sizes)
        return {**sizes, "words": [*self.sizes.words], "answers": [*self.sizes.answers]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VisionLanguageVQA":
        """Build the model that `config` describes, with random weights."""
        sizes: dict[str, Any] = dict(config)
        sizes["words"], sizes["answers"] = tuple(config["words"]), tuple(config["answers"])
        return cls(VisionLanguageSizes(**sizes))

    # --- inputs

    def encode(self, batch: Batch) -> Prompts:
        """Return the prompts of a batch of questions."""
        if batch.images is None or batch.tokens is None or batch.token_mask is None:
            raise ValueError("expected a batch with images and tokens of questions")
        own = batch.with_own_images()
        assert own.images is not None
        pixels = self.normalize_pixels(own.images)
        question, count = batch.tokens, batch.token_mask.sum(dim=1)
        b, k = len(batch), self.cells
        ids = question.new_full((b, 1 + k + question.shape[1] + 1), PAD)
        ids[:, 0] = BEGIN
        ids[:, 1 : 1 + k] = self.image_id
        ids[:, 1 + k : -1] = question.masked_fill(~batch.token_mask, PAD)
        last = 1 + k + count
        ids.scatter_(1, last[:, None], self.mark_id)
        there = torch.arange(ids.shape[1], device=ids.device) <= last[:, None]
        return Prompts(pixels, ids, there.long(), last, own.geometry)

    def normalize_pixels(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i 3 y x"]:
        """Return bytes as numbers from -1 to 1; floating-point images are not changed."""
        pixels = images.to(self.vlm.dtype)
        return pixels if images.is_floating_point() else (pixels - PIXEL_MEAN) / PIXEL_SCALE

    @property
    def cells(self) -> int:
        """Number of image tokens of an image."""
        return self.sizes.grid[0] * self.sizes.grid[1]

    def layout(self, length: int, geometry: PixelGeometry | None = None) -> Layout:
        """Return the layout of prompts of `length` tokens: "begin", "image" and "text"."""
        end = 1 + self.cells
        return Layout(
            (
                Span("begin", (1,), slice(0, 1)),
                Span("image", self.sizes.grid, slice(1, end), geometry),
                Span("text", (length - end,), slice(end, length)),
            ),
            length,
        )

    def processor(self) -> Any:
        """Return the processor of transformers: photos and texts to the inputs of `model.vlm`.

        A text is "<image>" and a question that ends with "?".

        Example:
            >>> from PIL import Image
            >>> model = VisionLanguageVQA(VisionLanguageSizes(("what",), ("red",), side=16))
            >>> photo = Image.new("RGB", (40, 30))
            >>> found = model.processor()(images=photo, text="<image> what ?", return_tensors="pt")
            >>> found["input_ids"].tolist()  # begin, four image tokens, "what" and "?"
            [[3, 6, 6, 6, 6, 5, 7]]
        """
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

        tokens = self.sizes.tokens
        words = models.WordLevel(
            {token: at for at, token in enumerate(tokens)}, unk_token=SPECIAL[UNKNOWN]
        )
        fast = Tokenizer(words)
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        fast.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[BEGIN]} $A", special_tokens=[(SPECIAL[BEGIN], BEGIN)]
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=fast,
            pad_token=SPECIAL[PAD],
            unk_token=SPECIAL[UNKNOWN],
            bos_token=SPECIAL[BEGIN],
            eos_token=SPECIAL[END],
            additional_special_tokens=[IMAGE_TOKEN],
            padding_side="left",
        )
        square = {"height": self.sizes.side, "width": self.sizes.side}
        images = CLIPImageProcessor(
            size=square, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        return LlavaProcessor(
            images,
            tokenizer,
            patch_size=self.sizes.patch,
            vision_feature_select_strategy="full",
            image_token=IMAGE_TOKEN,
            num_additional_image_tokens=0,
        )

    def image_features(self, pixel_values: Float[Tensor, "i 3 y x"]) -> Float[Tensor, "i k d"]:
        """Return the image tokens that the decoder reads: those of the encoder, projected.

        Args:
            pixel_values: images from -1 to 1, as in `Prompts`.
        """
        found = self.vlm.model.get_image_features(pixel_values).pooler_output
        return torch.stack([*found])  # one entry per image

    # --- answers

    def decide(self, features: Prompts, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return the scores of the answers; a mask "image" hides image tokens from the decoder."""
        prompts = hide_image_tokens(features, (mask or {}).get("image"))
        if not self.maps:
            return Output(self._answer_scores(prompts))
        scores, attention = self.attend(prompts)
        return Output(scores, (attention.over_layers(),))

    def attend(self, prompts: Prompts) -> tuple[Float[Tensor, "b c"], AttentionMap]:
        """Return the scores of the answers and the attention to the image in every decoder layer.

        Args:
            prompts: inputs of the model.

        Returns:
            The scores, and the map of the token before the answer, renormalized over the image.
        """
        layout = self.layout(prompts.input_ids.shape[1], prompts.geometry)
        with watch(self.vlm.model.language_model, layout=layout) as trace:
            scores = self._answer_scores(prompts)
        return scores, trace.log_block(prompts.last[:, None], "image")

    def _answer_scores(self, prompts: Prompts) -> Float[Tensor, "b c"]:
        logits = self.vlm(**prompts.as_kwargs(), use_cache=False).logits
        rows = torch.arange(len(logits), device=logits.device)
        return logits[rows, prompts.last][:, self.answer_ids]

    def answer_loss(self, prompts: Prompts, labels: Int[Tensor, " b"]) -> Loss:
        """Compute the cross-entropy of the answer and of the end after it, over all tokens.

        Args:
            prompts: inputs of the model.
            labels: the answer of each sample.

        Returns:
            The sum over both tokens of every sample, and their number.
        """
        taught, wanted = self.append_answers(prompts, labels)
        # labels also say where the prompt ends: pruned tokens must not depend on the answer
        mean = self.vlm(**taught.as_kwargs(), labels=wanted, use_cache=False).loss
        count = torch.tensor(2.0 * len(labels), device=mean.device)
        return Loss(mean * count, count)

    def append_answers(
        self, prompts: Prompts, labels: Int[Tensor, " b"]
    ) -> tuple[Prompts, Int[Tensor, "b n"]]:
        """Return the prompts with answer and end appended, and the labels of Hugging Face models.

        Args:
            prompts: inputs of the model.
            labels: the answer of each sample.
        """
        ids = torch.nn.functional.pad(prompts.input_ids, (0, 2), value=PAD)
        there = torch.nn.functional.pad(prompts.attention_mask, (0, 2))
        wanted = torch.full_like(ids, -100)
        ends = torch.full_like(labels, END)
        for at, token in enumerate((self.answer_ids[labels], ends), start=1):
            place = (prompts.last + at)[:, None]
            ids = ids.scatter(1, place, token[:, None])
            there = there.scatter(1, place, 1)
            wanted = wanted.scatter(1, place, token[:, None])
        return replace(prompts, input_ids=ids, attention_mask=there), wanted


def hide_image_tokens(prompts: Prompts, keep: Float[Tensor, "b k"] | None) -> Prompts:
    """Return the prompts with some image tokens hidden from the decoder; None hides none.

    Args:
        prompts: inputs of the model.
        keep: 1 for image tokens that stay visible, 0 for hidden ones.
    """
    if keep is None:
        return prompts
    there = prompts.attention_mask.clone()
    there[:, 1 : 1 + keep.shape[1]] = (keep > 0).long()
    return replace(prompts, attention_mask=there)
