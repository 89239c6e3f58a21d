"""Every class that studio's pages name has a rule, in style.css or of Quasar's, and style.css has no others."""

import ast
import re
from pathlib import Path

import pytest
from studio_for_tests import STYLESHEET, classes_of, classes_of_quasar

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

# Of a template, and of a part of one of Quasar's elements, such as `header-class=`.
ATTRIBUTE = re.compile(r"""class=["']?([\w /:.-]+)""")


def texts_in(*expressions: ast.AST) -> list[str]:
    """All strings, also those of both cases of a condition."""
    nodes = [node for expression in expressions for node in ast.walk(expression)]
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [value for value in values if isinstance(value, str)]


def classes_named_by(module: Path) -> set[str]:
    """Those in the arguments of `.classes(...)`, in arguments `classes=`, and in templates."""
    tree = ast.parse(module.read_text("utf-8"))
    texts = [names for text in texts_in(tree) for names in ATTRIBUTE.findall(text)]
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "classes":
                texts += texts_in(*call.args, *call.keywords)
            texts += texts_in(*[one.value for one in call.keywords if one.arg == "classes"])
    return {name for text in texts for name in text.split()}


def test_the_classes_of_the_pages_are_those_of_the_stylesheets() -> None:
    named = set[str]().union(*map(classes_named_by, STYLESHEET.parent.glob("*.py")))
    # A component puts its classes together.
    components = ast.parse(STYLESHEET.with_name("components.py").read_text("utf-8"))
    offered = {name for text in texts_in(components) for name in text.split()}
    own = classes_of(STYLESHEET)
    # One of each kind of place, so that none is overlooked.
    assert {"studio-name", "md:hidden", "q-ml-sm", "text-weight-medium"} <= named
    assert "whitespace-pre-wrap" in named
    assert named - own - classes_of_quasar() == set()
    of_others = {name for name in own if name.startswith(("q-", "nicegui-", "body--"))}
    assert own - of_others - classes_of_quasar() - named - offered == set()
