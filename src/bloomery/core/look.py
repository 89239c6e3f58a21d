"""The look of every page: the tokens of tokens.css as text, and their colors as values."""

import re
from functools import cache
from pathlib import Path

_TOKENS = Path(__file__).with_name("tokens.css")
_BOTH = re.compile(r"--([\w-]+):\s*light-dark\((#[0-9a-f]{6}),\s*(#[0-9a-f]{6})\)")


@cache
def tokens() -> str:
    """The stylesheet with the tokens, without its comments."""
    text = _TOKENS.read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/\s*", "", text, flags=re.DOTALL)


@cache
def colors(*, dark: bool = False) -> dict[str, str]:
    """Each color by its name: {"ember": "#c2410c", ...}."""
    return {name: (light, shade)[dark] for name, light, shade in _BOTH.findall(tokens())}


@cache
def image_tokens(selector: str) -> str:
    """The colors for an SVG file, whose viewers know `prefers-color-scheme` and few `light-dark()`."""

    fonts = "".join(re.findall(r"--(?:font|mono):[^;]+;", tokens()))

    def rule(*, dark: bool) -> str:
        values = "".join(f"--{name}:{color};" for name, color in colors(dark=dark).items())
        return f"{selector}{{{fonts}{values}}}"

    return f"{rule(dark=False)}@media (prefers-color-scheme:dark){{{rule(dark=True)}}}"
