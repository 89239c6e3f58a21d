"""Every page of studio in Chromium, wide and narrow, light and dark: nothing is cut off, and axe finds no fault.

`BLOOMERY_PICTURES=FOLDER pytest -m "soak or not soak" tests/studio/test_studio_in_chromium.py` keeps a picture of each.
"""

import json
import shutil
import time
import urllib.error
import urllib.request
from contextlib import chdir
from pathlib import Path

import psutil
import pytest
from studio_for_tests import (
    BOLD,
    LOOKS,
    PATIENCE,
    STYLESHEET,
    TOKEN,
    classes_of,
    classes_of_quasar,
    click,
    fill,
    make_run,
    picture,
    shows,
)

from bloomery.monitor.events import DeviceStats, EvalDone, EventLog, RunEnded, to_json
from browser import Browser
from runs_for_tests import made_up_run, step_done

PAGES = {
    "run": "run/first",
    "episodes": "run/second",
    "runs": "",
    "chat": "chat",
    "models": "models",
    "compare": "compare?runs=first%2Fsecond",
    "machine": "machine",
    "new": "new",
}
# In the rail, which is wider than a phone.
OPEN_PAGE_IS_NAMED = """(() => {
  const pages = document.querySelector(".pages").getBoundingClientRect();
  const here = document.querySelector(".pages [aria-current=page]")?.getBoundingClientRect();
  return !here || (here.left >= pages.left - 1 && here.right <= pages.right + 1);
})()"""
CASES = [(page, width, dark) for page in PAGES for width, dark in LOOKS]


def open_page(browser: Browser, studio: str, page: str) -> None:
    """Opens a page of PAGES, and waits until it shows what it reads."""
    browser.open(studio + PAGES[page])
    browser.until("!!document.querySelector('main')")
    browser.until("!document.querySelector('.q-table__linear-progress')")
    if page in ("run", "episodes", "compare"):
        browser.until("document.querySelectorAll('canvas').length >= 3")
    if page == "episodes":
        browser.until("document.querySelectorAll('.episode').length === 3")
        browser.value("document.querySelectorAll('details')[0].open = true")
    if page == "new":
        fill(browser, "Model", "HuggingFaceTB/SmolLM2-135M-Instruct")
        fill(browser, "Dataset", "chats.jsonl")
        shows(browser, "bloomery train smollm2-135m-instruct-lora.yaml")
    elif page == "machine":
        shows(browser, "Utilization")


def classes_without_rule(browser: Browser) -> set[str]:
    """Those of the page, also of NiceGUI's own elements, without the names of parts, which need no rule."""
    named = browser.value(
        "[...new Set([...document.querySelectorAll('body *')].flatMap(one => [...one.classList]))]"
    )
    parts = ("q-", "nicegui-", "cm-", "ͼ", "no-touch", "notranslate")
    return {name for name in named if not name.startswith(parts)} - (
        classes_of(STYLESHEET) | classes_of_quasar()
    )


def keyboard_sorts_and_keeps_its_place(browser: Browser, folder: Path) -> None:
    focused = "document.activeElement.dataset.focus"
    # Rows that arrive just now make the headings anew.
    browser.until("!document.querySelector('.q-table__linear-progress')")
    time.sleep(0.5)
    browser.value("document.querySelector('th [role=button]').focus()")
    for order in ("ascending", "descending"):
        browser.press("Enter")
        browser.until(f"document.querySelector('th[aria-sort={order}]')?.innerText.includes('Run')")
        browser.until(f"{focused} === 'Sort by Run'")
    browser.value("document.querySelector('[aria-label=\"Select <b>bold\"]').focus()")
    browser.press(" ")
    browser.until("document.querySelectorAll('tbody [aria-checked=true]').length === 1")
    browser.until(f"{focused} === 'Select <b>bold'")
    # A row that changes is made anew.
    with EventLog(folder / "runs" / BOLD / "events.jsonl") as log:
        log(RunEnded(step=40, status="failed"))
    browser.until("document.body.innerText.includes('failed')")
    browser.until(f"{focused} === 'Select <b>bold'")
    with EventLog(folder / "runs" / BOLD / "events.jsonl") as log:
        log(RunEnded(step=40, status="stopped"))


def pointing_at_a_run_reads_it(browser: Browser, folder: Path) -> None:
    """Watched by the bytes that studio has read: the list needs both ends of a long file alone."""
    long_run = folder / "runs" / "long"
    long_run.mkdir()
    (long_run / "recipe.yaml").write_text("model: {preset: go-coder-tiny}\n")
    events = long_run / "events.jsonl"
    events.write_text(f"{to_json(step_done(1))}\n" * 10_000)
    browser.until("document.querySelectorAll('tbody tr').length === 4")
    studio = next(
        process
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE  # of another test, which nobody has waited for
        and "studio" in process.cmdline()
        and process.cwd() == str(folder)
    )
    before = studio.io_counters().read_chars
    time.sleep(0.2)
    assert studio.io_counters().read_chars - before < events.stat().st_size // 2
    browser.point("document.querySelector('a[data-focus=\"/run/long\"]')")
    end = time.monotonic() + PATIENCE
    while studio.io_counters().read_chars - before < events.stat().st_size:
        assert time.monotonic() < end
        time.sleep(0.05)
    shutil.rmtree(long_run)
    browser.until("document.querySelectorAll('tbody tr').length === 3")


def keys_zoom_a_chart(browser: Browser) -> None:
    chart = "document.querySelector('main [aria-roledescription=chart]')"
    zoomed = f"getElement(+{chart}.id.slice(1)).chart.getOption().dataZoom[0]"
    zoom = f"(part => part.start + ' ' + part.end)({zoomed})"
    browser.value(f"{chart}.focus()")
    for key, part in (
        ("+", "25 75"),
        ("ArrowRight", "37.5 87.5"),
        ("+", "50 75"),
        ("-", "37.5 87.5"),
        *[("ArrowRight", "50 100")] * 2,  # no further than the end of the run
        ("ArrowLeft", "37.5 87.5"),
        ("-", "12.5 100"),
        ("0", "0 100"),
    ):
        browser.press(key)
        browser.until(f"{zoom} === {part!r}")


def a_mouse_reads_and_zooms_all_charts(browser: Browser) -> None:
    charts = "[...document.querySelectorAll('main [aria-roledescription=chart]')]"
    of_each = f"{charts}.map(one => getElement(+one.id.slice(1)).chart)"
    x, y = browser.point(f"{charts}[0]")
    # The values at one step, in every chart.
    browser.until(f"{charts}.every(one => /\\d: |: \\d/.test(one.innerText))")
    browser.drag(x - 120, y, x, y)
    part = "(zoom => zoom.start > 0 && zoom.end < 100)"
    browser.until(f"{of_each}.every(one => {part}(one.getOption().dataZoom[0]))")
    browser.press_mouse(x, y)
    browser.press_mouse(x, y, count=2)
    browser.until(f"{of_each}.every(one => one.getOption().dataZoom[0].end === 100)")
    browser.click("document.querySelector('.chart-card .q-toggle')")
    browser.until(f"{of_each}[0].getOption().yAxis[0].type === 'log'")
    browser.click("document.querySelector('.chart-card .q-btn-group button')")  # no smoothing
    names = f"{of_each}[0].getOption().series.map(one => one.name).join()"
    browser.until(f"{names} === 'training,validation'")


def test_the_list_and_a_run_and_nothing_without_the_token(
    studio: str, browser: Browser, folder: Path
) -> None:
    for path in ("", "run/first", "_nicegui_ws/socket.io/?EIO=4&transport=polling"):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(studio + path)
        assert refusal.value.code == 401

    # A link on a page of another site, as from a terminal in a browser.
    browser.open(f"data:text/html,<a href='{studio}?token={TOKEN}'>studio</a>")
    browser.value("document.querySelector('a').click()")
    browser.until("document.querySelectorAll('tbody tr').length === 3")
    assert browser.value("location.search") == ""
    assert browser.value("document.cookie") == ""  # HttpOnly
    assert browser.value("document.querySelector('tbody td b')") is None
    browser.look(width=390)  # a card per run
    browser.open(studio)
    browser.until("document.querySelectorAll('.q-table--grid .q-checkbox').length === 3")
    browser.look(width=1400)
    browser.open(studio)
    browser.until("document.querySelectorAll('tbody tr').length === 3")
    # ECharts is loaded before a chart is.
    browser.until(
        "performance.getEntriesByType('resource').filter(one => one.name.includes('/esm/')).length === 2"
    )
    # No compiler of styles, which would run at every change of the page.
    loaded = "performance.getEntriesByType('resource').map(one => one.name)"
    assert not browser.value(f"{loaded}.filter(name => /tailwind|unocss/.test(name))")
    keyboard_sorts_and_keeps_its_place(browser, folder)
    pointing_at_a_run_reads_it(browser, folder)
    browser.click("document.querySelector('[aria-label^=Switch]')")
    browser.until("document.body.classList.contains('body--dark')")
    click(browser, BOLD)
    browser.until("document.querySelectorAll('canvas').length >= 5")
    assert browser.value("document.body.classList.contains('body--dark')")  # on every page
    assert json.loads(browser.value("JSON.stringify(document.title)")) == "<b>bold · Bloomery"
    shows(browser, "stopped")
    keys_zoom_a_chart(browser)
    a_mouse_reads_and_zooms_all_charts(browser)
    assert browser.problems == []


@pytest.mark.sampled(14)
@pytest.mark.parametrize("page, width, dark", CASES)
def test_a_page_fits_its_window_and_has_no_serious_fault(
    studio: str, browser: Browser, page: str, width: int, dark: bool
) -> None:
    browser.look(width=width, dark=dark)
    open_page(browser, studio, page)
    picture(browser, page, width, dark)
    assert browser.overflow() == []
    assert browser.value(OPEN_PAGE_IS_NAMED)
    assert classes_without_rule(browser) == set()
    faults = browser.faults()
    assert not faults, "\n".join(faults)
    assert browser.problems == []


@pytest.mark.parametrize("page", PAGES)
def test_a_finger_hits_every_target_on_a_phone(studio: str, browser: Browser, page: str) -> None:
    browser.look(width=390, height=844, touch=True)
    try:
        open_page(browser, studio, page)
        assert browser.value("matchMedia('(pointer: coarse)').matches")
        # All pages of studio and the switch of colors are in one line.
        assert browser.value("document.querySelector('.rail').offsetHeight") < 60
        targets = browser.small_targets()
        assert targets == [], "\n".join(targets)
        assert browser.overflow() == []
    finally:
        browser.look(width=1400)


def test_a_finger_on_a_chart_moves_the_page(studio: str, browser: Browser) -> None:
    """A page of charts, each as wide as the phone, would stand still."""
    browser.look(width=390, height=844, touch=True)
    try:
        open_page(browser, studio, "run")
        x, y = browser.point("document.querySelector('main canvas')")
        before = browser.value("scrollY")
        browser.swipe(x, y, up=200)
        browser.until(f"scrollY > {before} + 100")
    finally:
        browser.look(width=1400)


@pytest.mark.soak
@pytest.mark.parametrize("width, dark", LOOKS)
def test_what_opens_on_a_page_fits_and_has_no_serious_fault(
    studio: str, browser: Browser, width: int, dark: bool
) -> None:
    """Files of a run, dialogs, a recipe with a mistake, and a recipe as YAML."""

    def check(part: str) -> None:
        time.sleep(0.5)  # animations begin
        faults.extend(f"{part}: {fault}" for fault in [*browser.overflow(), *browser.faults()])

    faults = list[str]()
    browser.look(width=width, dark=dark)
    open_page(browser, studio, "run")
    for title in ("Plan", "Log", "Recipe"):
        click(browser, title, kinds=".q-expansion-item .q-item")
    shows(browser, "model: {preset: go-coder-tiny}")
    check("files of a run")
    click(browser, "Export")
    shows(browser, "Start the export")
    check("export")

    open_page(browser, studio, "runs")
    browser.click("document.querySelector('tbody .q-checkbox, .q-table--grid .q-checkbox')")
    click(browser, "Delete")
    shows(browser, "This cannot be undone")
    check("delete")

    open_page(browser, studio, "new")
    click(browser, "What fits this machine?")
    shows(browser, "1,000 chats of 600 tokens")
    check("what fits")
    browser.press("Escape")
    browser.until("!document.querySelector('.q-dialog')")
    browser.click("document.querySelector('[aria-label=Model]')")
    shows(browser, "Packaged recipes")
    check("models to choose from")
    fill(browser, "Model", "openai-community/gpt2")
    shows(browser, "124 M parameters")
    fill(browser, "Dataset", "absent.jsonl")
    shows(browser, "no such file or folder")
    check("error")
    fill(browser, "Dataset", "odd.csv")
    shows(browser, "Which one is which?")
    check("columns")
    click(browser, "Use these columns")
    shows(browser, "bloomery train gpt2-lora.yaml")
    check("plan")
    click(browser, "All settings", kinds=".q-expansion-item .q-item")
    fill(browser, "Micro-batch size", "many")
    shows(browser, "must be auto or a whole number")
    check("mistake")
    click(browser, "YAML")
    browser.until("!!document.querySelector('.cm-content')")
    check("YAML")
    assert not faults, "\n".join(faults)
    assert browser.problems == []


def test_a_file_is_dropped_a_model_chosen_by_keys_and_a_reload_loses_nothing(
    browser: Browser, studio: str, folder: Path
) -> None:
    browser.open(f"{studio}new")
    card = "document.querySelector('[data-drop]')"
    browser.until(f"!!{card}", PATIENCE)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    dropped = {"my chats.jsonl": f"{json.dumps(chat)}\n".encode() * 30}
    browser.give_files(card, "dragenter", dropped)
    browser.until(f"{card}.hasAttribute('data-dropping')")
    browser.give_files(card, "drop", dropped)
    shows(browser, "30 conversations, JSONL")
    assert not browser.value(f"{card}.hasAttribute('data-dropping')")
    assert (folder / "my-chats.jsonl").read_bytes() == dropped["my chats.jsonl"]

    # Arrow keys go into the list and out of it; a letter goes on typing.
    field = "document.querySelector('[aria-label=Model]')"
    browser.click(field)
    shows(browser, "Packaged recipes")
    browser.press("ArrowDown")
    browser.until("document.activeElement.classList.contains('picker-row')")
    browser.press("ArrowUp")
    browser.until(f"document.activeElement === {field}")
    browser.write("qwen2.5-0.5b-lora")
    browser.until("document.querySelectorAll('.picker-row').length === 1", PATIENCE)
    browser.press("ArrowDown", "Enter")
    shows(browser, "packaged recipe")
    shows(browser, "bloomery train")
    browser.until("location.search.includes('data=my-chats.jsonl')", PATIENCE)
    browser.open(browser.value("location.href"))
    browser.until(f"{field}?.value === 'qwen2.5-0.5b-lora'", PATIENCE)
    shows(browser, "bloomery train")

    # The back button, too.
    browser.open(f"{studio}machine")
    browser.value("history.back()")
    browser.until(f"{field}?.value === 'qwen2.5-0.5b-lora'", PATIENCE)
    assert browser.problems == []


def test_the_list_with_every_column_needs_no_scrolling_at_1400_px(
    browser: Browser, studio: str, folder: Path
) -> None:
    """Neither do the marks below a figure break; every column sorts, also those that stand below another one."""
    name = "smollm2-135m-instruct-lora-20261130-101010"
    evaluation = EvalDone(
        step=40, loss=3.25, perplexity=25.8, bits_per_byte=1.397, tokens=9, seconds=1.0,
        metrics={"reward": 0.625},
    )  # fmt: skip
    stats = DeviceStats(step=40, device=0, temperature=81.0, power=1250.0, memory_gib=188.4)
    long_ago = [step_done(1_000_000, time=1.7e9), evaluation, stats]
    with chdir(folder):
        run = make_run(name, events=[*made_up_run(), *long_ago])
    try:
        for width in (1400, 1300):
            browser.look(width=width, height=900)
            browser.open(studio)
            shows(browser, name)
            browser.until("!!document.querySelector('.q-table__middle tbody tr')")
            box = "document.querySelector('.q-table__middle')"
            assert browser.value(f"{box}.scrollWidth - {box}.clientWidth") <= 0, width
        lines = browser.value(
            "[...document.querySelectorAll('.run-figure .run-about')].map(one => one.getClientRects().length "
            "&& one.getBoundingClientRect().height / parseFloat(getComputedStyle(one).lineHeight))"
        )
        assert lines and max(lines) < 1.5
        link = "[...document.querySelectorAll('tbody a')].find(one => one.innerText.startsWith('smollm2'))"
        assert browser.value(f"{link}.getClientRects().length") == 1  # one box, also of two lines
        click(browser, "Sort by", kinds="label.q-field")
        click(browser, "Duration", kinds=".q-item")
        browser.until("!document.querySelector('.q-menu')")
    finally:
        shutil.rmtree(folder / run)


def test_an_upload_has_one_bar_for_all_its_files(browser: Browser, studio: str, folder: Path) -> None:
    browser.open(f"{studio}new")
    card = "document.querySelector('[data-drop]')"
    browser.until(f"!!{card}", PATIENCE)
    browser.value(
        """window.bars = []; new MutationObserver(() => {
          const bar = document.querySelector('.upload-progress');
          if (!bar.hidden) bars.push([bar.innerText.trim(), bar.querySelector('i').style.width]);
        }).observe(document.querySelector('.upload-progress'),
          {subtree: true, attributes: true, childList: true, characterData: true}); 0"""
    )
    row = json.dumps({"text": "abcd" * 250}).encode() + b"\n"
    browser.give_files(card, "drop", {f"part-{number}.jsonl": row * 1500 for number in range(3)})
    shows(browser, "4,500 rows")
    bars = browser.value("bars")
    assert bars[0] == ["3 files: 0 KiB of 4.3 MiB", "0%"]
    assert bars[-1] == ["3 files: writing", "100%"]
    assert all(words.startswith("3 files") for words, _ in bars)
    assert browser.value("document.querySelector('.upload-progress').hidden")
    assert len(list((folder / "uploaded").iterdir())) == 3


def test_a_setting_is_found_by_its_words_and_by_its_key(browser: Browser, studio: str) -> None:
    browser.open(f"{studio}new?recipe=extends%3A+go-coder-tiny%0A")
    click(browser, "All settings", kinds=".q-expansion-item .q-item")
    search = "document.querySelector('[aria-label=\"Search the settings\"]')"
    browser.until(f"!!{search}", PATIENCE)
    shown = "[...document.querySelectorAll('.q-field__label:has(.key)')].filter(one => one.offsetParent)"
    browser.until(f"{shown}.length > 5", PATIENCE)
    for words in ("micro-batch size", "train.micro_batch_size", "micro_batch"):
        browser.click(search)
        browser.value(f"{search}.select()")
        browser.write(words)
        named = f"{shown}.map(one => one.innerText.replace(/\\s+/g, ' ').trim())"
        browser.until(f"{named}.includes('Micro-batch size micro_batch_size') && {named}.length < 6")


@pytest.mark.parametrize("page", PAGES)
def test_two_fingers_zoom_a_phone_and_the_layout_stays(
    studio: str, browser: Browser, page: str
) -> None:
    width = "[innerWidth, document.documentElement.clientWidth, document.documentElement.scrollWidth]"
    browser.look(width=390, height=844, touch=True)
    open_page(browser, studio, page)
    before = browser.value(width)
    try:
        browser.pinch(2)
        browser.until("visualViewport.scale === 2")
        assert browser.value(width) == before
        browser.pinch(1)
        browser.until("visualViewport.scale === 1")
        assert browser.value(width) == before
    finally:
        browser.pinch(1)
        browser.look(width=1400)


def test_the_models_need_no_scrolling_at_1400_px_also_with_long_names(
    browser: Browser, studio: str, folder: Path
) -> None:
    name = "smollm2-135m-instruct-lora-20261130-101010-18-merged"
    model = folder / "exports" / name
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    adapter = folder / "exports" / f"{name}-adapter"
    adapter.mkdir()
    base = json.dumps({"base_model_name_or_path": f"/models/{name}"})
    (adapter / "adapter_config.json").write_text(base, encoding="utf-8")
    card = f"---\nbase_model: organization/{name}\n---\n"
    for made in (model, adapter):
        (made / "README.md").write_text(card, encoding="utf-8")
    try:
        browser.look(width=1400, height=900)
        browser.open(f"{studio}models")
        shows(browser, name)
        box = "document.querySelector('.q-table__middle')"
        assert browser.value(f"{box}.scrollWidth - {box}.clientWidth") <= 0
    finally:
        shutil.rmtree(folder / "exports")
