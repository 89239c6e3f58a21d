"""The commands of a tutorial below `<!-- run -->` run as printed, on tiny data."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from words_of_docs import ROOT

RUN = re.compile(r"<!-- run -->\n```bash\n(.*?)```", re.DOTALL)
FILES = re.compile(
    r"`([\w-]+\.(?:yaml|py))`[^`\n]*(?:`[^`]*`)?:\n\n```(?:yaml|python)\n(.*?)```", re.DOTALL
)


@pytest.mark.soak  # the commands of the README, which are as many, are in `make test`
@pytest.mark.parametrize("page", ["dpo", "pretrain-on-your-code"])
def test_every_command_succeeds(page: str, tmp_path: Path) -> None:
    text = (ROOT / f"docs/tutorials/{page}.md").read_text(encoding="utf-8")
    for name, content in FILES.findall(text):
        (tmp_path / name).write_text(content, encoding="utf-8")
    code = tmp_path / "my-code"
    code.mkdir()
    # Python's own source stands for your code
    for source in sorted(Path(os.__file__).parent.glob("a*.py")):
        (code / source.name).write_bytes(source.read_bytes())
    (commands,) = RUN.findall(text)
    for line in commands.splitlines():
        words = shlex.split(line)
        command = (
            [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", *words]
        )
        command += ["train.tokens_per_step=2048"] if words[1:3] == ["train", "mine.yaml"] else []
        # Threads of other tests slow down tiny models; the cache must not know this machine's measurements.
        env = os.environ | {
            "OMP_NUM_THREADS": "2",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (tmp_path / ("my-adapter" if page == "dpo" else "my-model")).is_dir()
