"""The code of docs/contributing/life-of-a-request.md runs as it stands; it gives the texts of `generate`."""

import re
from pathlib import Path

from bloomery.infer.generate import generate, load_model
from bloomery.infer.sampling import Sampling
from models_for_tests import make_run

PAGE = Path(__file__).parents[2] / "docs/contributing/life-of-a-request.md"


def test_the_loop_of_the_page_gives_the_texts_of_generate(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    folder = make_run(tmp_path / "runs" / "mine", 4)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, PAGE.name, "exec"), names)
    decoder, tokenizer = load_model(folder)
    sampling = Sampling(max_new_tokens=20, seed=1)
    expected = {
        prompt: "".join(generate(decoder, tokenizer, prompt, sampling))
        for prompt in ("def f(", "import ", "for ")
    }
    assert names["answers"] == expected
