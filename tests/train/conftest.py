from pathlib import Path

import pytest
from runs_of_the_loop import RECIPE

from bloomery.data.prepare.prepare import prepare
from bloomery.recipe.load import load_recipe


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number in range(40):
        lines = [
            f"def function_{number}_{i}(value):\n    return value * {i} + {number}\n"
            for i in range(8)
        ]
        (folder / "text" / f"{number}.py").write_text("\n".join(lines))
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE)
    prepare(load_recipe(recipe), folder / "prepared")
    return folder / "prepared"
