"""Text that others wrote: without its secrets before it is passed on, without control characters before it is shown."""

import os
import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?$")
_SHORTEST_SECRET = 8  # a shorter value, such as TOKEN=1, would blank out innocent text

# Shapes as the issuers document them: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Weights & Biases.
_START = r"(?<![A-Za-z0-9])"  # a word before it may end in _
_SHAPES = (
    re.compile(_START + r"(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    re.compile(_START + r"(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,})"),
    re.compile(_START + r"sk-[A-Za-z0-9_-]{20,}"),
    re.compile(_START + r"AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
    re.compile(_START + r"wandb_v\d_\w{20,}"),
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_ASSIGNED = re.compile(
    r"(?i)\b([\w.-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|auth[_-]?token|access[_-]?token))"
    r"(\"?\s*[=:]\s*\"?)([^\s\"',;&]{6,})"
)
_WANDB_KEY = re.compile(r"(?i)(wandb\S*[\s=:\"']+)[0-9a-f]{40}\b")  # 40 digits alone may be a commit
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{16,}")
HIDDEN = "[hidden]"


def scrub(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` without tokens of known shapes, logins in URLs, and the values of this process's secret variables."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name.upper()):
            text = text.replace(value, HIDDEN)
    for shape in _SHAPES:
        text = shape.sub(HIDDEN, text)
    text = _URL_LOGIN.sub(HIDDEN, text)
    text = _WANDB_KEY.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _ASSIGNED.sub(rf"\1\2{HIDDEN}", text)


_BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}  # they change the order in which letters are shown
_CONTROLS = {code: None for code in (*range(32), *range(127, 160), *_BIDI) if chr(code) not in "\n\t"}
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")  # bytes of a name that no encoding has
_UNPRINTED = _CONTROLS | _SURROGATES


def harmless(text: str) -> str:
    """`text` without control characters other than newlines and tabs: no dataset, model or file name steers a terminal.

    Everything that Bloomery prints and did not write itself passes through here.
    """
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_UNPRINTED)
