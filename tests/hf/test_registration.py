"""Importing zipmoe is enough, whatever is imported first, and costs nothing until a model is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zipmoe

LOAD = """
from pathlib import Path
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model.zipmoe_engine is not None
"""
ORDERS = {
    "zipmoe first": "import sys, zipmoe, transformers",
    "transformers first": "import sys, transformers, zipmoe",
    "after the modelling code": "import sys, transformers; transformers.MixtralForCausalLM; import zipmoe",
    "zipmoe.load first": "import sys, zipmoe; zipmoe.load; import transformers",
    "the configuration first": "import sys, zipmoe.hf.configuration, transformers",
    "the quantizer first": "import sys, zipmoe.hf.quantizer, transformers",
    "the guards first": "import sys, zipmoe.hf.model_guards, transformers",
    "after somebody has looked for the modelling code": (
        "import sys, importlib.util, zipmoe; importlib.util.find_spec('transformers.modeling_utils'); "
        "import transformers; transformers.MixtralForCausalLM; "
        "assert not any(type(finder).__module__.startswith('zipmoe') for finder in sys.meta_path)"
    ),
    "twice": "import sys, zipmoe, transformers; from zipmoe.hf.registration import register; register(); register()",
}


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ORDERS)
def test_import_order_does_not_matter(mixtral, order):
    run(ORDERS[order] + LOAD, str(mixtral.folder))


def test_importing_zipmoe_imports_neither_torch_nor_transformers():
    run("import sys, zipmoe, zipmoe.cli.main; assert not {'torch', 'transformers'} & sys.modules.keys()")


def test_a_failing_registration_does_not_break_transformers():
    code = (
        "import sys, warnings\n"
        "warnings.simplefilter('always')\n"
        "import zipmoe\n"
        "sys.modules['zipmoe.hf.registration'] = None\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import transformers.modeling_utils\n"
        "assert any('packed folders will not load' in str(w.message) for w in caught), caught\n"
    )
    run(code)


def test_public_names():
    assert set(zipmoe.__all__) == {"ZipMoEConfig", "__version__", "errors", "load"}
    assert all(getattr(zipmoe, name) for name in zipmoe.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = zipmoe.no_such_name
