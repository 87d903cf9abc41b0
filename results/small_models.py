"""Copy the models of `overt demo` into the package.

overt demo --out runs/demo
python results/small_models.py runs/demo
"""

import sys
from pathlib import Path

from overt.inspect import small_models

if __name__ == "__main__":
    small_models.copy_models(Path(sys.argv[1]), small_models.FOLDER)
