"""The templates of our pages, filled: what comes from data is escaped, nothing leads outside."""

from typing import Any

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)


def filled(name: str, **values: Any) -> str:
    """The template `name` of this folder with these values, as text that can be written."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("overt.show", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(name).render(policy=POLICY, **values)
    return page.encode("utf-8", "replace").decode()  # half a surrogate pair is not text
