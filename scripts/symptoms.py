"""Rewrites docs/reference/error-messages.md from the table of symptoms: `python scripts/symptoms.py`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from bloomery.hardware.doctor.symptoms import Symptom, filled, symptoms  # noqa: E402

TABLE = ROOT / "src/bloomery/hardware/doctor/symptoms.toml"
PAGE = ROOT / "docs/reference/error-messages.md"
LEVELS = {"blocks": "Blocks training", "slows": "Slows training", "note": "Note"}
HEAD = """\
# Error messages of PyTorch, ROCm and CUDA: cause and fix

Look up an error message of PyTorch, ROCm, CUDA or the operating system: its cause and its fix. As a command:

```bash
bloomery doctor --explain train.log     # a file
bloomery doctor --explain -             # stdin
```

On your machine the command names the PyTorch build that fits; this page shows `bloomery doctor` there. `bloomery train`
compares the output of a run that crashed with the same table, and prints cause and fix as its last lines.

Each message is from the thread named after it, and is shortened.
<!-- `python scripts/symptoms.py` writes this page from src/bloomery/hardware/doctor/symptoms.toml: to add a symptom,
add a table there. -->
Where no other command is named, `bloomery doctor --probe` verifies a fix.
"""
PROBE = "bloomery doctor --probe"


def sections() -> dict[str, list[Symptom]]:
    """Heading -> its symptoms, in the order of the table."""
    known = {one.id: one for one in symptoms()}
    found: dict[str, list[Symptom]] = {}
    heading = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        title = re.fullmatch(r"# --- (.+?) -+", line)
        name = re.fullmatch(r'id = "(.+)"', line)
        if title:
            heading = title[1][0].upper() + title[1][1:]
        elif name:
            found.setdefault(heading, []).append(known[name[1]])
    return found


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for heading, known in sections().items():
        lines += [f"## {heading}", ""]
        for symptom in known:
            lines += [*_symptom(symptom), ""]
    return "\n".join(lines).rstrip() + "\n"


LONGEST = 72  # letters of a message in a heading
# What stands before the words that people search: a place, a time, the class of an exception.
BEFORE = re.compile(
    r"^(?:\[[^\]]*\]\s*|\S+:\d+(?::\d+)?:? |(?:[\w.]+\.)?\w*(?:Error|Exception|Warning): |NCCL WARN |error: )"
)


def message_of(log: str) -> str:
    """The words of a message for its heading, which the search of the site ranks first; "" where it has no words."""
    message = log.strip().splitlines()[0].replace("`", "").replace('"', "")
    while (shorter := BEFORE.sub("", message)) != message:
        message = shorter
    if message.startswith("{") or len(message) < 12:
        return ""
    if len(message) > LONGEST:
        message = message[:LONGEST].rpartition(" ")[0]
    return message.strip(' ".,:')


def slug(title: str) -> str:
    """The anchor of a title, by which other pages and threads may know a symptom."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title)).strip("-").lower()


def _symptom(symptom: Symptom) -> Iterator[str]:
    title = symptom.title[0].upper() + symptom.title[1:]
    message = message_of(symptom.log)
    if message:
        yield f'<a id="{slug(title)}"></a>'
        yield ""
        yield f"### {title}: `{message}`"
    else:
        yield f"### {title}"
    yield from ("```", symptom.log, "```")
    yield f"{LEVELS[symptom.level]}: {symptom.cause}."
    yield from ("```", *(filled(step, None).removeprefix("# ") for step in symptom.fix), "```")
    cites = ", ".join(dict.fromkeys(_linked(cite) for cite in (*symptom.cites, symptom.log_from)))
    verify = "" if symptom.verify == PROBE else f"Verify: `{symptom.verify}`. "
    yield f"{verify}Sources: {cites}. (`{symptom.id}`)"


def _linked(cite: str) -> str:
    thread = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", cite)
    return f"[{cite}](https://github.com/{thread[1]}/issues/{thread[2]})" if thread else cite


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
