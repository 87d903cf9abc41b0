"""The three ways a command can end badly, told apart by whose move is next.

`overt` prints the sentence of any of them without a traceback. Anything else that is raised is a
defect of ours and keeps its traceback.
"""


class BadInput(ValueError):
    """What the user gave cannot be used: say what, where, and what to do. Exit code 2."""


class Damaged(Exception):
    """A file is not what was written, or not in its format: name it. Exit code 2."""


class Failed(RuntimeError):
    """Work that could not be finished: name it and say what is left. Exit code 1."""
