"""The page of all names is what the package says of them."""

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "reference.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="these tests are not in their repository")


def _reference():
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current_and_every_public_name_has_a_docstring():
    reference = _reference()
    assert reference.PAGE.read_text() == reference.page(), "run python crates/symmem-py/reference.py"


def test_a_name_without_a_docstring_is_told():
    reference = _reference()
    nameless = reference.ast.parse("def nothing(): ...").body[0]
    with pytest.raises(reference.Undocumented, match="nothing has no docstring"):
        reference._entry("symmem._symmetric", "module", nameless)
