"""Templates of the pages, autoescaped and without network requests, and data embedded in them."""

import base64
import io
import re
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from overt.errors import require_package

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)


def render_template(name: str, **values: Any) -> str:
    """Render a template of this package."""
    require_package("jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("overt.viz", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"compact_script": compact_script, "compact_style": compact_style}
    page = environment.get_template(name).render(policy=POLICY, **values)
    return page.encode("utf-8", "replace").decode()  # lone surrogates cannot be encoded


def compact_script(text: str) -> str:
    """Drop the indentation, empty lines and comments of a script.

    Scripts of this package have no string of several lines, and no quote in a comment after code.
    """
    lines = (re.sub(r"\s// [^\"'`]*$", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def compact_style(text: str) -> str:
    """Drop the comments of a style sheet, and spaces outside of its strings."""
    tokens = r'("[^"]*")|/\*.*?\*/|(:)\s+|\s*([{};,])\s*'
    return re.sub(tokens, lambda one: one[1] or one[2] or one[3] or "", text, flags=re.DOTALL)


def sandboxed_frame(page: str, title: str, height: int) -> str:
    """Return a page in a sandboxed iframe, for notebooks."""
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{height}px;border:0" '
        f'title="{escape(title)}"></iframe>'
    )


def base64_text(values: np.ndarray) -> str:
    """Return the bytes of an array as base64."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def encode_image(picture: Image.Image, kind: str, **options: Any) -> bytes:
    """Return the file of an image in a format such as png or jpeg."""
    out = io.BytesIO()
    picture.save(out, format=kind.upper(), **options)
    return out.getvalue()


def data_uri(data: bytes, kind: str) -> str:
    """Return the data URI of an image."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
