"""Page templates: content security policy and missing values."""

import pytest

from overt.viz.templates import POLICY, compact_script, compact_style, render_template


def test_policy_allows_no_outside_resources() -> None:
    parts = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))
    assert parts["default-src"] == "'none'" and parts["img-src"] == "data:"
    assert "http" not in POLICY and "*" not in POLICY


def test_missing_template_value_raises() -> None:
    with pytest.raises(Exception, match="undefined"):
        render_template("report.html.jinja")


def test_scripts_and_styles_are_compacted_outside_of_strings() -> None:
    assert (
        compact_script("  // a line\n\n  if (a) {\n    b('https://c'); // d\n  }\n")
        == "if (a) {\nb('https://c');\n}"
    )
    style = (
        'a::after, b > c { content: ": x; y"; margin: 0 1px; }\n:root :is(d) { top: 0; } /* e, f */'
    )
    wanted = 'a::after,b > c{content:": x; y";margin:0 1px;}:root :is(d){top:0;}'
    assert compact_style(style) == wanted
