"""The commands. What can be wrong with a command line is found before anything heavy is imported.

Exit codes: 0 done, 2 bad input, 1 failed work, 130 and 143 stopped by a signal. What goes wrong is
said in one sentence on stderr; OVERT_TRACEBACK=1 adds where it happened.
"""

from overt.cli.commands import app, main
from overt.cli.data import data_app
from overt.cli.ending import ended
from overt.cli.printing import listed

__all__ = ["app", "data_app", "ended", "listed", "main"]
