"""Until the cases live here: those of `grounding_speed`."""

from grounding_speed import *  # noqa
