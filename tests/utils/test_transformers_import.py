"""Modules that transformers imports needlessly are imported lazily and behave as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from torchweave.utils.transformers_import import postponed

PACKAGES = {
    "sklearn/__init__.py": "",
    "sklearn/metrics.py": "def roc_curve(hits, scores, *, first=0): return ('curve', hits, scores, first)\nlater = 3\n",
    "scipy/__init__.py": "",
    "scipy/optimize.py": "def linear_sum_assignment(cost): return ('assigned', cost)\ndef minimize(x): return -x\n",
    "curves.py": "from sklearn.metrics import roc_curve\n",
    "other.py": "from scipy.optimize import linear_sum_assignment, minimize\nimport scipy.optimize\n",
}


# Programs that are run one after the other in a process of their own, since importing transformers takes seconds.
FIRST = {
    "unused modules": """
import sys
from importlib import metadata
read = metadata.packages_distributions
import torchweave.models
from torchweave.utils.transformers_import import DEFERRED_FUNCTIONS
assert not {"sklearn", "scipy", *DEFERRED_FUNCTIONS} & set(sys.modules), "imported for nothing"
assert metadata.packages_distributions is read
from transformers.utils import is_scipy_available, is_sklearn_available, is_torch_available
assert is_scipy_available() and is_sklearn_available() and is_torch_available()
""",
    "an engine": """
import sys
import torchweave.engine.startup.open
unwanted = "torchweave.models.drafters", "transformers.models.llama.modeling_llama", "torch.distributed.checkpoint"
assert not set(unwanted) & set(sys.modules), "imported for nothing"
""",
    "a function": """
import sys
from torchweave.utils.transformers_import import postponed
with postponed():
    from curves import roc_curve
assert "sklearn" not in sys.modules and "sklearn.metrics" not in sys.modules
assert roc_curve([1], [2], first=4) == ("curve", [1], [2], 4)
import sklearn.metrics
assert sklearn.metrics.later == 3 and sklearn.metrics.roc_curve is not roc_curve
""",
    "losses": """
import sys, torch
import torchweave.models
from transformers.loss import loss_deformable_detr as loss
box = torch.tensor([[2.0, 2.0, 2.0, 4.0]])
assert loss.center_to_corners_format(box).tolist() == [[1, 0, 3, 4]]
from transformers.image_transforms import center_to_corners_format
assert torch.equal(center_to_corners_format(box), loss.center_to_corners_format(box))
assert "scipy" not in sys.modules
assert loss.linear_sum_assignment(5) == ("assigned", 5)
""",
}
SECOND = {
    "other attributes": """
import sys
from torchweave.utils.transformers_import import postponed
with postponed():
    import other
    assert other.minimize(3) == -3 and other.linear_sum_assignment(5) == ("assigned", 5)
    assert sys.modules["scipy.optimize"] is other.scipy.optimize
    assert other.scipy.optimize.minimize is other.minimize
    import sklearn
    assert sklearn.__file__
    try:
        from sklearn.metrics import nothing
    except ImportError as error:
        assert "nothing" in str(error)
    else:
        raise AssertionError
assert sys.modules["scipy.optimize"].__file__ and sys.modules["sklearn.metrics"].later == 3
""",
    "list": """
import sys
from pathlib import Path
import torchweave.models
from transformers.utils import import_utils
from torchweave.utils.transformers_import import models_of

lists = import_utils.define_import_structure.cache_info().misses
folder = Path(import_utils.__file__).parents[1] / "models"
assert models_of(import_utils.define_import_structure(folder, prefix="models")) == \\
    import_utils.define_import_structure(str(folder / "__init__.py")), "another list"
assert import_utils.define_import_structure.cache_info().misses == lists + 1  # the second is made here for the first time
from transformers.models import LlamaConfig
from transformers import LlamaForCausalLM
assert not hasattr(sys.modules["transformers.models"], "OneThatIsNotThere")
""",
}
RUN = """
import json, sys, traceback
faults = {}
for name, code in json.loads(sys.argv[1]).items():
    try:
        exec(code, {})
        faults[name] = ""
    except BaseException:
        faults[name] = traceback.format_exc()
print(json.dumps(faults))
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program raised; empty if nothing."""
    folder, found = tmp_path_factory.mktemp("packages"), {}
    for name, text in PACKAGES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    for programs in (FIRST, SECOND):
        command = [sys.executable, "-c", RUN, json.dumps(programs)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def test_model_import_skips_unused_modules(faults: dict[str, str]) -> None:
    assert not faults["unused modules"], faults["unused modules"]


def test_engine_imports_no_drafters_and_no_writers_of_checkpoints(faults: dict[str, str]) -> None:
    assert not faults["an engine"], faults["an engine"]


def test_a_function_is_imported_when_it_is_called(faults: dict[str, str]) -> None:
    assert not faults["a function"], faults["a function"]


def test_losses_work_when_somebody_takes_one(faults: dict[str, str]) -> None:
    assert not faults["losses"], faults["losses"]


def test_other_attributes_import_the_real_module(faults: dict[str, str]) -> None:
    assert not faults["other attributes"], faults["other attributes"]


def test_models_are_listed_once_and_are_all_there(faults: dict[str, str]) -> None:
    assert not faults["list"], faults["list"]


def test_already_imported_module_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    there = type(sys)("scipy.optimize")
    monkeypatch.setitem(sys.modules, "scipy.optimize", there)
    with postponed():
        assert sys.modules["scipy.optimize"] is there
    assert sys.modules["scipy.optimize"] is there


def test_distributions_are_those_that_are_there() -> None:
    with postponed():
        found = metadata.packages_distributions()
    assert found.get("torch") == metadata.packages_distributions()["torch"] == ["torch"]
    assert dict(found) == metadata.packages_distributions()
    assert len(found) == len(metadata.packages_distributions())
    assert found.get("no_such_package", []) == []
