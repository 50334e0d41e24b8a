"""transformers' models are listed once, and as transformers lists them."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from pathlib import Path
import torchweave.models
from transformers.utils import import_utils
from torchweave.models.model_listing import models_of

lists = import_utils.define_import_structure.cache_info().misses
folder = Path(import_utils.__file__).parents[1] / "models"
assert models_of(import_utils.define_import_structure(folder, prefix="models")) == \\
    import_utils.define_import_structure(str(folder / "__init__.py")), "another list"
assert import_utils.define_import_structure.cache_info().misses == lists + 1  # the second is made here for the first time
from transformers.models import LlamaConfig
from transformers import LlamaForCausalLM
assert not hasattr(sys.modules["transformers.models"], "OneThatIsNotThere")
"""


def test_models_are_listed_once_and_are_all_there() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
