"""The ways a command can end without being done, told apart by whose move is next.

`overt` prints the sentence of any of them and no traceback. Anything else that is raised is a
defect of ours: `OVERT_TRACEBACK=1` shows where.
"""


class BadInput(ValueError):
    """What the user gave cannot be used: say what, where, and what to do. Exit code 2."""


class Damaged(Exception):
    """A file is not what was written, or not in its format: name it. Exit code 2."""


class Failed(RuntimeError):
    """Work that could not be finished: name it and say what is left. Exit code 1."""


class Stopped(Exception):
    """The user or the system asked for an end: say what is saved and how to go on.

    `code` is the exit code, 128 and the signal's number: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, sentence: str, signal: int) -> None:
        super().__init__(sentence)
        self.code = 128 + signal
