"""The program that a completion makes: the prompt and what continues it, or the code block of an answer."""

import pytest

from bloomery.core.sandbox.programs import program_of

PROMPT = "import math\ndef f(x):\n    '''Twice x.'''\n"
TEST = "def check(c):\n    assert c(2) == 4\n"


@pytest.mark.parametrize(
    ("completion", "chat", "is_right"),
    [
        ("    return x * 2", False, True),
        ("\n    return x * 2\n", False, True),
        ("    return x", False, False),
        ("Sure:\n```python\ndef f(x):\n    return math.floor(x * 2)\n```\nDone.", True, True),
        ("```\n    return 2 * x\n```", True, True),
        ("def f(x): return x + x", True, True),
        ("I cannot.", True, False),
    ],
)
def test_a_program_is_the_prompt_and_its_completion_or_a_code_block(completion, chat, is_right):
    program = program_of(completion, prompt=PROMPT, entry_point="f", chat=chat)
    tested_program = f"{program}\n{TEST}\ncheck(f)\n"
    if is_right:
        exec(tested_program, {})
        return
    with pytest.raises((AssertionError, SyntaxError)):
        exec(tested_program, {})
