"""Write src/bloomery/evals/stdlib-functions.jsonl: function tasks from the standard library of this Python.

    python scripts/mine_functions.py [--check]

A task is the signature and docstring of a pure function of the library, two calls with their values, and a test of all
calls below. The values are those of the library itself. Docstrings of Python are under the license of the Python
Software Foundation, version 2: https://docs.python.org/3/license.html. `--check`: exit code 1 when the file differs.
"""

import ast
import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

PLACE = (
    Path(__file__).resolve().parents[1]
    / "src"
    / "bloomery"
    / "evals"
    / "stdlib-functions.jsonl"
)
SHOWN = 2  # calls in the prompt
LONGEST = 1200  # characters of a docstring
PATHS = ["os", "posixpath", "ntpath", "genericpath", "pathlib"]
SAME = """def same(a, b):
    if isinstance(a, float) or isinstance(b, float):
        return abs(a - b) <= 1e-9 * max(1.0, abs(b))
    if isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
"""
DATA = "([2.75, 1.75, 1.25, 0.25, 0.5, 1.25, 3.5],); ([1, 5],); ([4, 4, 4],); ([1.5, 2.5, 2.5, 2.75, 3.25, 4.75],)"
ORDERED = "([1, 3, 5],); ([1, 3, 5, 7],); ([2],); ([9, -4, 0, 6, 1.5, 2],)"
PAIRS = "([1, 2, 3, 4], [1, 2, 1, 2]); ([1, 2, 3], [9, 8, 6]); ([0.5, 1.5, 9], [4, 4.5, 1]); ([1, 5], [2, 4])"
SEARCH = "([1, 2, 2, 4], 2); ([1, 2, 2, 4], 3); ([], 5); ([1, 2, 2, 4], 9); ([1, 2, 4], 0); ([1, 3, 5, 7, 9], 5, 1, 2)"
# module.function (and the modules that a solution must not import): arguments of calls, separated by semicolons
CALLS = {
    "base64.b16encode binascii codecs": "(b'abc',); (b'',); (b'\\x00\\xff',); (b'hello world',)",
    "base64.b32encode binascii codecs": "(b'a',); (b'hello',); (b'',); (b'ab',); (b'\\xff\\x00\\x10abc',)",
    "base64.b64decode binascii codecs": "(b'aGVsbG8=',); (b'YQ==',); (b'',); (b'YWI=',); (b'AP8Q',)",
    "base64.b64encode binascii codecs": "(b'hello',); (b'a',); (b'',); (b'ab',); (b'\\x00\\xff\\x10abcd',)",
    "bisect.bisect_left _bisect": SEARCH,
    "bisect.bisect_right _bisect": SEARCH,
    "calendar.isleap datetime": "(2000,); (1900,); (2024,); (2023,); (2100,)",
    "calendar.leapdays datetime": "(2000, 2001); (1900, 2000); (2001, 2004); (1996, 2024)",
    "calendar.weekday datetime time": "(2000, 1, 1); (2024, 2, 29); (1999, 12, 31); (1970, 1, 1); (2026, 7, 4)",
    "colorsys.hls_to_rgb": "(0.5, 0.5, 1.0); (0.0, 0.25, 0.5); (0.9, 0.8, 0.3); (0.3, 0.7, 0.0)",
    "colorsys.hsv_to_rgb": "(0.5, 0.5, 1.0); (0.0, 0.25, 0.5); (0.9, 0.8, 0.3); (0.3, 0.0, 0.7)",
    "colorsys.rgb_to_hls": "(1.0, 0.5, 0.0); (0.2, 0.4, 0.6); (0.3, 0.3, 0.3); (0.1, 0.9, 0.4)",
    "colorsys.rgb_to_hsv": "(1.0, 0.5, 0.0); (0.2, 0.4, 0.6); (0.3, 0.3, 0.3); (0.1, 0.9, 0.4)",
    "difflib.IS_CHARACTER_JUNK": "(' ',); ('x',); ('\\t',); ('\\n',)",
    "email.utils.quote": "('a\"b',); ('plain',); ('back\\\\slash',); ('\\\\\"',)",
    "email.utils.unquote": "('\"a b\"',); ('<x@y>',); ('plain',); ('\"a\\\\\"b\"',); ('\"',)",
    "fnmatch.fnmatchcase re": (
        "('a.txt', '*.txt'); ('b.py', '*.txt'); ('abc', 'a?c'); ('a1', 'a[0-9]'); ('ab', 'a[!b]'); "
        "('', '*')"
    ),
    "fnmatch.filter re posixpath os": (
        "(['a.py', 'b.txt', 'c.py'], '*.py'); (['x'], '?'); ([], '*'); (['ab', 'b', 'abb'], 'a*b')"
    ),
    "genericpath.commonprefix " + " ".join(PATHS): (
        "(['/usr/lib', '/usr/local'],); (['abc', 'abd'],); ([],); (['a', ''],); (['x'],)"
    ),
    "glob.escape re": "('a*b',); ('plain',); ('[x]?',); ('**',)",
    "heapq.nlargest _heapq": "(2, [5, 1, 9, 3]); (1, [2, 2]); (0, [1]); (9, [3, 1, 2])",
    "heapq.nsmallest _heapq": "(2, [5, 1, 9, 3]); (1, [2, 2]); (0, [1]); (9, [3, 1, 2])",
    "html.escape": "('<a href=\"x\">',); (\"it's\",); ('a & b', False); ('\"', False); ('',)",
    "html.unescape": "('&lt;b&gt;',); ('&amp;&quot;',); ('&#65;&#x42;',); ('plain',)",
    "math.comb itertools": "(5, 2); (10, 0); (3, 4); (20, 10)",
    "math.dist": "([0, 0], [3, 4]); ([1.5], [1.5]); ([1, 2, 3], [4, 6, 3])",
    "math.factorial": "(5,); (0,); (1,); (20,)",
    "math.gcd fractions": "(12, 18); (0, 5); (7,); (24, 36, 60); (-8, 12)",
    "math.isqrt cmath": "(16,); (17,); (0,); (10**20 + 1,)",
    "math.lcm fractions": "(4, 6); (0, 5); (7,); (2, 3, 8)",
    "math.perm itertools": "(5, 2); (5,); (3, 4); (10, 0)",
    "math.prod functools operator": "([2, 3, 4],); ([],); ([1.5, 2],)",
    "ntpath.splitdrive "
    + " ".join(PATHS): "('c:/dir',); ('plain',); ('//host/computer/dir',); ('d:',)",
    "operator.countOf _operator": "([1, 2, 1], 1); ('banana', 'a'); ([], 3)",
    "operator.indexOf _operator": "([4, 2, 1], 2); ('banana', 'n'); ((3,), 3)",
    "pickle.decode_long": "(b'',); (b'\\xff\\x00',); (b'\\xff\\x7f',); (b'\\x00\\xff',); (b'\\x80',); (b'\\x7f',)",
    "pickle.encode_long": "(0,); (255,); (32767,); (-256,); (-128,); (127,); (-32768,)",
    "posixpath.basename " + " ".join(PATHS): "('/a/b.txt',); ('plain',); ('/a/b/',); ('/',)",
    "posixpath.commonpath " + " ".join(PATHS): (
        "(['/usr/lib', '/usr/local/lib'],); (['a/b', 'a/c'],); (['/a', '/a/b/c'],); "
        "(['x//y/', 'x/y'],)"
    ),
    "posixpath.dirname " + " ".join(PATHS): "('/a/b.txt',); ('plain',); ('/a/b/',); ('/a//b',)",
    "posixpath.join "
    + " ".join(PATHS): "('a', 'b'); ('a/', 'b', 'c'); ('a', '/b'); ('', 'x'); ('a', '')",
    "posixpath.normpath "
    + " ".join(PATHS): "('a//b/../c',); ('./a/.',); ('',); ('/../a',); ('../../x',); ('//a',)",
    "posixpath.split " + " ".join(PATHS): "('/a/b.txt',); ('plain',); ('/a/b/',); ('/',)",
    "posixpath.splitext "
    + " ".join(PATHS): "('a.tar.gz',); ('/x.y/z',); ('.bashrc',); ('a.',); ('..a.b',)",
    "quopri.quote": "(b'=',); (b'\\xe4',); (b' ',)",
    "quopri.unhex": "(b'ff',); (b'0A',); (b'3d',)",
    "re.escape": "('a.b',); ('plain',); ('1+1=2?',); ('[x]',)",
    "shlex.join": "(['ls', '-l'],); (['echo', 'a b'],); ([\"it's\"],); ([''],)",
    "shlex.quote": "('plain',); ('a b',); (\"it's\",); ('',); ('x;y',)",
    "statistics.correlation": PAIRS,
    "statistics.covariance": PAIRS,
    "statistics.fmean": ORDERED,
    "statistics.geometric_mean": "([54, 24, 36],); ([1, 1],); ([2.0, 8.0],); ([5],)",
    "statistics.harmonic_mean": "([40, 60],); ([40, 60], [5, 30]); ([2.5, 3, 10],); ([7],); ([0, 3],)",
    "statistics.median": ORDERED,
    "statistics.median_high": ORDERED,
    "statistics.median_low": ORDERED,
    "statistics.mode collections": "([1, 1, 2, 3, 3, 3],); ('red',); ([2, 1],); ('mississippi',)",
    "statistics.multimode collections": "('aabbbbccddddeeffffgg',); ('',); ([1, 2],); ([3, 3, 1],)",
    "statistics.pstdev": DATA,
    "statistics.pvariance": DATA,
    "statistics.stdev": DATA,
    "statistics.variance": DATA,
    "string.capwords": "('hello world',); ('  a  b ',); ('x-y-z', '-'); ('ABC dEF',); ('',)",
    "textwrap.dedent": "('  a\\n    b\\n  c',); ('a\\n b',); ('\\ta\\n\\t\\n\\tb',); (' \\n  x\\n',)",
    "textwrap.indent": "('a\\nb', '  '); ('a\\n\\nb\\n', '> '); ('', 'x'); ('\\n', '-')",
    "textwrap.shorten": "('Hello  world!', 12); ('Hello  world!', 11); ('one  two three four', 13); ('abc', 9)",
    "urllib.parse.quote": "('a b/c',); ('x=1&y=2',); ('\\u00fc',); ('a/b', ''); ('~x_y.z-',)",
    "urllib.parse.quote_plus": "('a b/c',); ('x=1&y=2',); ('\\u00fc',); ('1+1',)",
    "urllib.parse.unquote": "('a%20b',); ('%C3%BC',); ('100%',); ('%zz%41',)",
    "urllib.parse.unquote_plus": "('a+b',); ('%2B+%20',); ('plain',)",
    "xml.sax.saxutils.escape html": "('a < b & c',); ('>',); ('\"x\"', {'\"': '&quot;'}); ('',)",
    "xml.sax.saxutils.unescape html": "('a &lt; b &amp; c',); ('&gt;',); ('&amp;lt;',); ('&quot;', {'&quot;': '\"'})",
    "zlib.adler32 binascii": "(b'abc',); (b'',); (b'hello', 7)",
    "zlib.crc32 binascii": "(b'abc',); (b'',); (b'hello', 7)",
}


def task_of(key: str, calls: str) -> dict[str, Any]:
    name, *banned = key.split()
    module, _, short = name.rpartition(".")
    function = getattr(importlib.import_module(module), short)
    arguments = eval(f"[{calls.replace('); (', '), (')}]")
    values = [(each, function(*each)) for each in arguments]
    assert all(ast.literal_eval(repr(value)) == value for _, value in values), name
    words = inspect.cleandoc(function.__doc__ or "").partition(">>>")[0].strip()
    words = words if len(words) <= LONGEST else words[:LONGEST].rpartition("\n\n")[0]
    shown = [
        f">>> {short}({', '.join(map(repr, each))})\n{value!r}" for each, value in values[:SHOWN]
    ]
    quoted = '"""' + "\n".join([words, "", *shown, '"""']).lstrip("\n")
    quoted = textwrap.indent("r" * ("\\" in quoted) + quoted, "    ")
    prompt = f"def {short}{inspect.signature(function)}:\n{quoted}\n"
    ast.parse(prompt)
    lines = [
        f"    assert same(candidate({', '.join(map(repr, each))}), {value!r})"
        for each, value in values
    ]
    test = "\n".join([f"{SAME}", "def check(candidate):", *lines, ""])
    return {
        "task_id": name,
        "prompt": prompt,
        "entry_point": short,
        "test": test,
        "banned": [module, *banned],
    }


def main() -> int:
    text = "".join(json.dumps(task_of(key, calls)) + "\n" for key, calls in CALLS.items())
    if "--check" in sys.argv:
        print(
            f"{len(CALLS)} tasks, {'as written' if PLACE.read_text() == text else 'the file differs'}"
        )
        return PLACE.read_text() != text
    PLACE.write_text(text)
    print(f"{PLACE.name}: {len(CALLS)} tasks, {len(text):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
