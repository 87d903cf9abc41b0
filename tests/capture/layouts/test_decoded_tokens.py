"""Characters of token ids that came without a text."""

from typing import Any

import torch

from overt.capture.layouts.decoded_tokens import decode_geometry

ALPHA = "\N{GREEK SMALL LETTER ALPHA}"


class Bytes:
    """A tokenizer with one token per byte."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


def test_tokens_of_one_character_share_it() -> None:
    ids = torch.tensor([[*f" a{ALPHA}b".encode()]])
    geometry = decode_geometry(Bytes(), ids)
    assert geometry.tokens(0) == [" ", "a", ALPHA, ALPHA, "b"]
    assert geometry.texts == (f" a{ALPHA}b",)


def test_a_text_may_end_inside_a_character() -> None:
    cut = decode_geometry(Bytes(), torch.tensor([[*f"a{ALPHA}".encode()[:-1]]]))
    assert cut.tokens(0)[0] == "a" and len(cut.tokens(0)) == 2


def test_padding_has_no_characters_and_spaces_are_left_out() -> None:
    class Words:
        """Words with a space before each but the first, as Llama writes them."""

        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(f"w{n}" for n in ids)

    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    geometry = decode_geometry(Words(), ids, ids > 0)
    assert geometry.tokens(0) == ["", "w5", "w6"]
    assert geometry.texts == ("w5 w6", "w7 w8 w9")
    assert geometry.spans[1].tolist() == [[0, 2], [3, 5], [6, 8]]
