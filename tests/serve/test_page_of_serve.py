"""The page of the server in a headless Chromium: by keyboard alone, in the light and the dark, wide and narrow.

`BLOOMERY_PICTURES=FOLDER pytest -m soak tests/serve/test_page_of_serve.py` keeps a picture of each view.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from server_for_tests import LIMITS, Running, running
from test_server_tools import FILE, call, plan_of, tool_server

from browser import PROGRAM, Browser
from models_for_tests import make_chat_model, make_model
from pictures_for_tests import png, receipt, save_base

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed"),
]
FOCUSED = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
FORGET = """new Promise(done => {
  const asked = indexedDB.open("bloomery-chat", 1);
  asked.onsuccess = () => {
    const change = asked.result.transaction("conversations", "readwrite");
    change.objectStore("conversations").clear();
    change.oncomplete = () => { asked.result.close(); done(); };
  };
})"""
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const below = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const kinds = "h1, h2, label, button:not(:disabled), .user, .facts, .hint, .detail, input, select";
  const texts = [...document.querySelectorAll(kinds)].filter((one) => one.offsetParent && (one.innerText || one.value));
  return texts.map((one) => {
    const [a, b] = [light(rgba(getComputedStyle(one).color)), light(below(one))];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), one.id || one.className || one.tagName];
  }).sort((a, b) => a[0] - b[0])[0];
})()"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_model(tmp_path_factory.mktemp("page") / "tiny")
    with running(
        {"tiny": folder, "other": folder}, limits=replace(LIMITS, body_bytes=200_000)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def again(browser: Browser, url: str) -> None:
    """Leaves the page and comes back."""
    browser.open("about:blank")
    browser.open(url)


def forget(browser: Browser) -> None:
    """The conversations and settings that other tests have left in the browser."""
    browser.value(FORGET)
    again(browser, browser.value("location.href"))
    browser.until("columns.length > 0")


def opened(browser: Browser, server: Running, *, width: int = 1280, dark: bool = False) -> None:
    browser.problems.clear()
    browser.look(width=width, dark=dark)
    browser.open(server.url)
    browser.until("columns.length === 2")
    forget(browser)
    browser.value("$('max_tokens').value = 20")


def answered(browser: Browser, count: int = 2) -> None:
    browser.until(f"!running && document.querySelectorAll('.facts, .error').length === {count}")


def test_a_conversation_by_keyboard_alone(browser: Browser, server: Running) -> None:
    opened(browser, server)
    assert browser.value("$('settings').hidden")
    browser.value("$('color').checked = true; $('toggle').focus()")
    browser.press("Enter")
    assert not browser.value("$('settings').hidden")
    browser.press("Escape")
    assert browser.value(FOCUSED) == "prompt"
    browser.write("def f")
    browser.press("Enter", shift=True)
    assert browser.value("$('prompt').value") == "def f\n"
    browser.press("Enter")
    answered(browser)
    assert browser.value("$('prompt').value") == ""
    assert browser.value("columns.every((each) => each.records.flatMap(messagesOf).length === 2)")
    reached = []
    for _ in range(40):  # every control is reached with Tab
        browser.press("Tab")
        reached.append(browser.value(FOCUSED))
    assert {
        "one",
        "two",
        "color",
        "toggle",
        "temperature",
        "earlier",
        "system",
        "tools",
        "send",
        "clear",
        "log",
        "tokens",
    } <= {each.split()[0] for each in reached}
    browser.value("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.value("document.querySelectorAll('.tokens span')[1].className") == "chosen"
    assert "%" in browser.value("document.querySelector('.detail').textContent")
    browser.value("$('max_tokens').value = 100; $('prompt').focus()")
    browser.write("x")
    browser.press("Enter")
    browser.press("Escape")
    answered(browser, 4)
    assert browser.value(FOCUSED) == "prompt"
    assert not browser.problems, browser.problems


def test_a_conversation_longer_than_the_context_goes_on_and_says_so(
    browser: Browser, server: Running
) -> None:
    opened(browser, server)
    browser.value("$('two').value = ''; arrange()")
    for number in range(1, 6):  # a context of 120 tokens
        browser.value(
            f"$('prompt').value = 'message {number} ' + 'x y '.repeat(6); $('form').requestSubmit()"
        )
        answered(browser, number)
    assert not browser.value("document.querySelectorAll('.error').length")
    said = browser.value("[...document.querySelectorAll('.facts')].at(-1).textContent")
    assert "without the oldest" in said and "120 tokens" in said, said
    browser.value("$('prompt').value = 'x y '.repeat(400); $('form').requestSubmit()")
    answered(browser, 6)
    said = browser.value("document.querySelector('.error').textContent")
    assert "--max-context" in said and "120" in said, said
    assert browser.value("$('prompt').value").startswith("x y x y")  # to be shortened


def test_a_limit_of_the_history(browser: Browser, server: Running) -> None:
    opened(browser, server)
    browser.value(
        "$('max_tokens').value = 2; $('earlier').value = 0; $('two').value = ''; arrange()"
    )
    browser.value(
        "window.sent = []; const real = fetch; window.fetch = (url, asked) => {"
        " sent.push(JSON.parse(asked.body).messages.length); return real(url, asked); }; undefined"
    )
    for number in range(1, 5):
        browser.value(f"$('prompt').value = 'a{number}'; $('form').requestSubmit()")
        answered(browser, number)
    browser.value("$('earlier').value = ''; $('prompt').value = 'b'; $('form').requestSubmit()")
    answered(browser, 5)
    assert browser.value("sent.slice(0, 5)") == [1, 1, 1, 1, 9]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 375])
def test_views(browser: Browser, server: Running, width: int, dark: bool, tmp_path: Path) -> None:
    opened(browser, server, width=width, dark=dark)
    browser.value("$('prompt').value = 'def f(x):'; $('form').requestSubmit()")
    answered(browser)
    browser.value("$('color').click(); document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    # nothing is cut off at the side
    assert browser.value("document.documentElement.scrollWidth") <= width
    least, where = browser.value(CONTRAST)
    assert least >= 4.5, where
    kept = Path(os.environ.get("BLOOMERY_PICTURES", tmp_path))
    name = f"page-{width}-{'dark' if dark else 'light'}"
    browser.picture(kept / f"{name}.png")
    browser.value("show($('settings').hidden)")
    browser.picture(kept / f"{name}-settings.png")
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_a_finger_hits_every_target_on_a_phone(browser: Browser, server: Running) -> None:
    opened(browser, server, width=375)
    browser.look(width=375, touch=True)
    try:
        browser.value("$('prompt').value = 'def f(x):'; $('form').requestSubmit()")
        answered(browser)
        browser.value("show($('settings').hidden)")
        assert browser.small_targets() == []
    finally:
        browser.look(width=1280)


def test_a_thought_is_shown_before_the_answer_and_sent_back(
    browser: Browser, tmp_path: Path
) -> None:
    folder = make_chat_model(tmp_path / "chat", "<think>", "</think>")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with running({"chat": folder}, template=template) as server:
        browser.problems.clear()
        browser.open(server.url)
        browser.until("columns.length === 1")
        browser.value("$('max_tokens').value = 20; $('prompt').focus()")
        browser.write("a")
        browser.press("Enter")
        answered(browser, 1)
        thought = browser.value("columns[0].records.flatMap(messagesOf)[1].reasoning_content")
        fold = "document.querySelector('details.thought')"
        assert not browser.value(f"{fold}.open")
        assert browser.value(f"{fold}.querySelector('summary').textContent").startswith("Thought")
        assert browser.value(f"{fold}.querySelector('div').textContent") == thought != ""
        browser.value(f"{fold}.querySelector('summary').focus()")
        browser.press("Enter")
        assert browser.value(f"{fold}.open")
        browser.write("b")
        browser.press("Enter")
        answered(browser, 2)
        assert browser.value("document.querySelectorAll('.error').length") == 0


def test_the_markup_of_a_thought_in_an_answer_is_found_however_it_is_cut(
    browser: Browser, server: Running
) -> None:
    """A model whose template has no place for thoughts writes them into its answer."""
    opened(browser, server)
    text = "<think>\nA < B, so </thin\n</think>\n\nYes, <think> is a word."
    for size in (1, 3, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parts = browser.value(
            f"(split => {json.dumps(pieces)}.flatMap(piece => split(piece)).concat(split('', true)))(splitter())"
        )
        thought = "".join(part for is_thought, part in parts if is_thought)
        answer = "".join(part for is_thought, part in parts if not is_thought)
        assert (thought, answer) == ("A < B, so </thin\n", "Yes, <think> is a word.")
    unfinished = "(split => [...split('<think>a </th'), ...split('', true)])(splitter())"
    assert browser.value(unfinished) == [[True, "a "], [True, "</th"]]


def test_an_answer_in_markdown_becomes_blocks_and_no_markup_of_its_own(
    browser: Browser, server: Running
) -> None:
    opened(browser, server)
    text = (
        "# Title\nA **b *c*** and `<i>`, [x](https://a.b/c) [y](javascript:alert(1)) 2 * 3 * 4\n\n"
        "- one\n  - two\n- three\n3. four\n\n```py\nif a:\n    <b>\n```\n> quoted\n\n"
        "| a | b |\n|---|---|\n| 1 | **2** |\n\n<img src=x>\n```\nopen"
    )
    browser.value(f"window.box = made('div'); box.append(...blocks({json.dumps(text)})); undefined")
    assert browser.value("box.innerHTML").replace(' class=""', "") == (
        '<h3 class="large">Title</h3>'
        "<p>A <strong>b <em>c</em></strong> and <code>&lt;i&gt;</code>, "
        '<a href="https://a.b/c" target="_blank" rel="noopener noreferrer">x</a> [y](javascript:alert(1)) 2 * 3 * 4</p>'
        "<ul><li>one<ul><li>two</li></ul></li><li>three</li><li>four</li></ul>"
        '<pre tabindex="0"><code>if a:\n    &lt;b&gt;</code></pre><blockquote><p>quoted</p></blockquote>'
        '<table tabindex="0"><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><strong>2</strong></td></tr></table>'
        '<p>&lt;img src=x&gt;</p><pre tabindex="0"><code>open</code></pre>'
    )


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_calls_of_tools_are_folded_and_the_user_types_their_results(
    browser: Browser, tmp_path: Path
) -> None:
    """The model is made to call; the page itself leaves it the choice."""
    folder = make_chat_model(tmp_path / "chat", "<tool_call>", "</tool_call>")
    limits = replace(LIMITS, context=2048, new_tokens=400)
    with running({"chat": folder}, template="qwen", limits=limits) as server:
        browser.problems.clear()
        browser.look(width=1280)
        browser.open(server.url)
        browser.until("columns.length === 1")
        browser.value("$('max_tokens').value = 60")
        browser.value(
            "window.sent = []; const real = fetch; window.fetch = (url, asked) => {"
            " const body = JSON.parse(asked.body); sent.push(body);"
            " const choice = body.messages.at(-1).role === 'user' ? 'required' : 'none';"
            " const forced = {...body, tool_choice: choice, parallel_tool_calls: false};"
            " return real(url, {...asked, body: JSON.stringify(forced)}); };"
            " undefined"
        )
        # A mistake in the list is told where it is, and nothing is sent.
        browser.value(
            "$('tools').value = '[{]'; $('prompt').value = 'Rain?'; $('form').requestSubmit()"
        )
        assert browser.value(FOCUSED) == "tools"
        assert "Not a list of tools" in browser.value("$('tools-hint').textContent")
        assert browser.value("sent.length") == 0
        browser.value("$('tools').select()")
        browser.write(json.dumps(WEATHER))
        assert browser.value("$('set').textContent") == "1 tool"

        browser.value("$('form').requestSubmit()")
        browser.until("!running && !!document.querySelector('.results')")
        assert browser.value("sent[0].tools") == [{"type": "function", "function": WEATHER}]
        fold = "document.querySelector('details.call')"
        assert not browser.value(f"{fold}.open")
        assert browser.value(f"{fold}.querySelector('summary').textContent") == (
            'Calls weather(city: "Bern")'
        )
        assert json.loads(browser.value(f"{fold}.querySelector('pre').textContent")) == {
            "city": "Bern"
        }
        assert browser.value("document.activeElement.closest('.results') !== null")
        assert not browser.faults()
        browser.write("sunny")
        browser.value("document.querySelector('.results button').click()")
        browser.until("!running && columns[0].records.flatMap(messagesOf).length === 4")
        call, result = browser.value("sent[1].messages.slice(-2)")
        assert result == {
            "role": "tool",
            "tool_call_id": call["tool_calls"][0]["id"],
            "content": "sunny",
        }
        assert browser.value("document.querySelectorAll('.error').length") == 0

        # A call without a result: the next message goes on.
        browser.value("$('prompt').value = 'Again?'; $('form').requestSubmit()")
        browser.until("!running && !!document.querySelector('.results')")
        browser.value("$('prompt').value = 'Never mind.'; $('form').requestSubmit()")
        browser.until("!running && sent.length === 4")
        roles = browser.value("sent[3].messages.map(message => message.role)")
        assert roles[-2:] == ["assistant", "user"]
        assert browser.value("document.querySelectorAll('.error').length") == 0
        assert not browser.problems, browser.problems


def test_calls_that_the_server_makes_are_folded_with_their_results(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_chat_model(tmp_path / "chat", "<tool_call>", "</tool_call>")
    (folder / "user_tools.py").write_text(FILE)
    answers = [f"I add. {call('add', a=1, b=2)}", "It is 3."]
    with tool_server(folder, monkeypatch, plan_of(folder, "add"), answers) as (server, _):
        browser.problems.clear()
        browser.look(width=1280)
        browser.open(server.url)
        browser.until("columns.length === 1")
        browser.value("$('prompt').value = 'What is 1 + 2?'; $('form').requestSubmit()")
        browser.until("!running && columns[0].records.flatMap(messagesOf).length === 2")
        fold = "document.querySelector('details.call')"
        assert (
            browser.value(f"{fold}.querySelector('summary').textContent") == "Calls add(a: 1, b: 2)"
        )
        shown = browser.value(f"[...{fold}.querySelectorAll('pre')].map(pre => pre.textContent)")
        assert shown[1] == "3"
        text = browser.value("columns[0].records.flatMap(messagesOf)[1].content")
        assert " ".join(text.split()) == "I add. It is 3."
        assert not browser.value("!!document.querySelector('.results')")
        assert browser.value("document.querySelectorAll('.error').length") == 0
        assert not browser.problems, browser.problems


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("seeing")
    save_base("qwen3_vl", folder / "seeing", weights=True, seed=1)
    limits = replace(LIMITS, context=400, body_bytes=3 * 2**20, pictures=4)
    models = {"seeing": folder / "seeing", "text": make_model(folder / "text")}
    with running(models, limits=limits, template=None) as server:
        yield server


def thumbnails(browser: Browser, count: int) -> None:
    shown = "[...document.querySelectorAll('#pictures img')].filter((one) => one.naturalWidth)"
    browser.until(f"{shown}.length === {count}")


def test_images_are_dropped_pasted_removed_and_sent(browser: Browser, seeing: Running) -> None:
    opened(browser, seeing)
    browser.value("$('two').value = ''; arrange()")
    browser.give("$('prompt')", "drop", receipt=receipt(), red=png())
    browser.give("$('prompt')", "paste", blue=png(color="blue"))
    thumbnails(browser, 3)
    browser.click("document.querySelectorAll('#pictures button')[1]")
    assert browser.value("pictures.map((one) => one.name)") == ["receipt.png", "blue.png"]
    assert browser.value(FOCUSED) == "prompt"
    browser.write("Color?")
    browser.press("Enter")
    answered(browser, 1)
    assert not browser.value("document.querySelectorAll('.error').length")
    sent = browser.value("columns[0].records.flatMap(messagesOf)[0].content.map((part) => part.type)")
    assert sent == ["image_url", "image_url", "text"]
    assert browser.value("document.querySelectorAll('.user img').length") == 2
    assert browser.value("pictures.length") == 0
    assert not browser.problems, browser.problems


def test_an_image_that_is_refused_can_be_removed(browser: Browser, seeing: Running) -> None:
    opened(browser, seeing)
    browser.value("$('two').value = ''; arrange()")
    browser.give("$('prompt')", "drop", whole=png(), broken=png()[:-30])
    browser.until("pictures.length === 2")
    browser.value("$('prompt').value = 'Color?'; $('form').requestSubmit()")
    answered(browser, 1)
    assert "image 2 is damaged" in browser.value("document.querySelector('.error').textContent")
    browser.click("document.querySelectorAll('#pictures button')[1]")
    browser.value("$('form').requestSubmit()")
    browser.until("!running && columns[0].records.flatMap(messagesOf).length === 2")


def test_a_model_that_reads_text_takes_no_image(browser: Browser, seeing: Running) -> None:
    opened(browser, seeing)
    browser.value("$('one').value = 'text'; $('two').value = ''; arrange()")
    assert browser.value("$('add').hidden")
    browser.give("$('prompt')", "drop", red=png())
    browser.until("$('said').textContent")
    assert browser.value("pictures.length") == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_views_with_images(
    browser: Browser, seeing: Running, width: int, dark: bool, tmp_path: Path
) -> None:
    opened(browser, seeing, width=width, dark=dark)
    browser.value("$('two').value = ''; arrange()")
    browser.give("$('prompt')", "drop", receipt=receipt(), wide=png(300, 90, "orange"))
    thumbnails(browser, 2)
    browser.value("$('prompt').value = 'What is the total?'; $('form').requestSubmit()")
    answered(browser, 1)
    browser.give("$('prompt')", "drop", receipt=receipt(), wide=png(300, 90, "orange"))
    thumbnails(browser, 2)
    assert not browser.overflow()
    least, where = browser.value(CONTRAST)
    assert least >= 4.5, where
    assert not browser.faults()
    kept = Path(os.environ.get("BLOOMERY_PICTURES", tmp_path))
    name = f"page-images-{width}-{'dark' if dark else 'light'}"
    browser.picture(kept / f"{name}.png")
    browser.give("$('prompt')", "dragover", red=png())
    browser.picture(kept / f"{name}-drop.png")


def shown(browser: Browser) -> dict[str, object]:
    """What a reader sees of the conversation and its settings."""
    return browser.value(
        """({
          texts: [...document.querySelectorAll('.column')].map(one => one.querySelector('.log').innerText),
          tokens: [...document.querySelectorAll('.tokens span')].map(one => [one.textContent, one.chances.length]),
          asked: columns.map(one => JSON.stringify(one.records.flatMap(messagesOf))),
          system: $('system').value, draft: $('prompt').value,
        })"""
    )


def test_a_conversation_survives_a_reload_until_it_is_deleted(
    browser: Browser, server: Running
) -> None:
    opened(browser, server)
    browser.value("$('system').value = 'Be brief.'; $('prompt').focus()")
    for text in ("def f", "def g"):
        browser.write(text)
        browser.press("Enter")
        answered(browser, 2 if text == "def f" else 4)
    browser.write("half a thou")
    before = shown(browser)
    assert before["tokens"]

    again(browser, server.url)
    browser.until("document.querySelectorAll('.facts').length === 4")
    assert shown(browser) == before
    browser.value("$('color').click(); document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    assert "%" in browser.value("document.querySelector('.detail').textContent")

    # One model alone has a conversation of its own.
    browser.value("$('two').value = ''; $('two').dispatchEvent(new Event('change'))")
    browser.until("columns.length === 1")
    assert browser.value("columns[0].records.length") == 0
    browser.value("$('two').value = 'other'; $('two').dispatchEvent(new Event('change'))")
    browser.until("document.querySelectorAll('.facts').length === 4")

    # Deleted, brought back, deleted for good.
    browser.click("$('clear')")
    browser.until("document.querySelectorAll('.facts').length === 0")
    browser.click("[...document.querySelectorAll('button')].find(one => one.innerText.startsWith('Bring'))")
    browser.until("document.querySelectorAll('.facts').length === 4")
    assert shown(browser)["asked"] == before["asked"]
    browser.click("$('clear')")
    browser.until("document.querySelectorAll('.facts').length === 0")
    again(browser, server.url)
    browser.until("columns.length === 2")
    assert browser.value("columns.flatMap(one => one.records)") == []
    assert browser.value("$('system').value") == "Be brief."
    assert not browser.problems, browser.problems


def test_an_answer_that_is_left_before_its_end_is_kept_until_there(
    browser: Browser, server: Running
) -> None:
    opened(browser, server)
    browser.value("$('max_tokens').value = 100; $('prompt').focus()")
    browser.write("x")
    browser.press("Enter")
    browser.until("running && columns[0].pending?.().tokens.length > 2")
    again(browser, server.url)
    browser.until("document.querySelectorAll('.facts').length === 2")
    texts = browser.value("columns.map(one => one.records[0].whole.length)")
    assert min(texts) > 0
    facts = browser.value("document.querySelector('.facts').innerText")
    assert "stopped" in facts or "fill the context" in facts


def test_a_browser_without_a_place_for_conversations_says_so(
    browser: Browser, server: Running
) -> None:
    opened(browser, server)
    browser.value("kept.write = async () => null; $('prompt').focus()")
    browser.write("x")
    browser.press("Enter")
    answered(browser)
    browser.until("$('said').textContent.includes('no room')")
