"""Let tox find a Python 3.12 that pyenv holds but does not put on PATH.

tox reads this file by its name. Megatron-Core 0.17 and later need Python 3.12; where another one
is pyenv's default, `python3.12` on PATH is a stub that refuses. The folders go to the end of PATH,
so that nothing already found changes.
"""

import os
from pathlib import Path

_ROOT = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
_FOLDERS = sorted(str(folder) for folder in _ROOT.glob("versions/3.12.*/bin"))
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *_FOLDERS])
