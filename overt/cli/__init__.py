"""The command line. Arguments are checked before heavy packages are imported.

Exit codes: 0 success, 2 bad input, 1 failure, 130 and 143 stopped by a signal. Errors are printed
as one line on stderr; OVERT_TRACEBACK=1 adds a traceback.
"""

from overt.cli.commands import app, main
from overt.cli.data import data_app
from overt.cli.exit_codes import report_error
from overt.cli.output import list_text

__all__ = ["app", "data_app", "list_text", "main", "report_error"]
