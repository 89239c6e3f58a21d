// What studio's pages do in the browser: charts, colors, the clipboard, dropped files, the keyboard's focus.

// A token of the look as charts need it, which cannot read it themselves.
const studioColors = new Map();
window.studioColor = (name, opacity = 1) => {
  const key = [document.body.className, name, opacity].join();
  if (!studioColors.has(key)) studioColors.set(key, studioReadColor(name, opacity));
  return studioColors.get(key);
};
const studioReadColor = (name, opacity) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `color-mix(in srgb, var(--${name}) ${100 * opacity}%, transparent)`;
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
  canvas.fillStyle = getComputedStyle(probe).color;
  probe.remove();
  canvas.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
  return `rgba(${red}, ${green}, ${blue}, ${(alpha / 255).toFixed(3)})`;
};

// A chart as soon as it is drawn: all charts of a page show the same place and the same part, and a mouse zooms.
window.studioChart = id => {
  const chart = getElement(id)?.chart;
  if (!chart) return;
  if (!chart.group) {
    chart.group = "studio";
    import("nicegui-echart").then(({echarts}) => echarts.connect("studio"));
    chart.getZr().on("dblclick", () => chart.dispatchAction({type: "dataZoom", dataZoomIndex: 0, start: 0, end: 100}));
  }
  const drawn = chart.getOption().series.length;
  if (chart.studioDrawn !== drawn && !matchMedia("(pointer: coarse)").matches) {
    chart.studioDrawn = drawn;
    chart.dispatchAction({type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true});
  }
};

// Charts are drawn again where the page turns from light to dark.
{
  let wasDark = null;
  new MutationObserver(() => {
    const isDark = document.body.classList.contains("body--dark");
    if (wasDark !== null && isDark !== wasDark) {
      document.querySelector("[data-colors]")?.dispatchEvent(new CustomEvent("redraw"));
    }
    wasDark = isDark;
  }).observe(document.documentElement, {attributes: true, attributeFilter: ["class"], subtree: true});
}

// Replaces the end of some series of a chart: [[index, first changed point, points from there], ...]. The options are
// those with which a chart begins that is not drawn yet.
window.studioTails = (id, tails) => {
  const element = getElement(id);
  if (!element) return;
  const changed = element.options.series.map(() => ({}));
  for (const [index, from, points] of tails) {
    const data = element.options.series[index].data;
    data.splice(from, Infinity, ...points);
    changed[index] = {data};
  }
  element.chart?.setOption({series: changed});
};

// The values of all curves at a place of the horizontal axis, and the events near it, as text.
window.studioTooltip = (id, values) => {
  const {chart, options} = getElement(id);
  const place = values[0].axisValue;
  const near = 6 * Math.abs(chart.convertFromPixel({xAxisIndex: 0}, 1) - chart.convertFromPixel({xAxisIndex: 0}, 0));
  const box = document.createElement("div");
  const add = (text, style) => {
    const line = document.createElement("div");
    line.textContent = text;
    line.style = style;
    box.append(line);
  };
  add(place.toLocaleString("en-US"), "font-weight: 500");
  for (const one of values) {
    add(`${one.seriesName}: ${one.value[1]}`, `border-left: 8px solid ${options.series[one.seriesIndex].lineStyle?.color ?? one.color}; padding-left: 6px`);
  }
  for (const mark of options.series[0].markLine.data) {
    if (Math.abs(mark.xAxis - place) <= near) add(`step ${mark.xAxis.toLocaleString("en-US")}: ${mark.name}`, "");
  }
  return box;
};

// Plus and minus zoom around the middle, arrow keys move the part that is shown, 0 shows the whole run.
window.studioKeys = (id, event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;  // those of the browser
  const {chart} = getElement(id);
  const {start, end} = chart.getOption().dataZoom[0];
  const width = end - start;
  const middle = (start + end) / 2;
  const around = half => [middle - half, middle + half];
  const moved = by => {
    const left = Math.min(Math.max(start + by, 0), 100 - width);
    return [left, left + width];
  };
  const part = {
    "+": around(width / 4), "=": around(width / 4), "-": around(width), "0": [0, 100],
    ArrowLeft: moved(-width / 4), ArrowRight: moved(width / 4),
  }[event.key];
  if (!part || part[1] - part[0] < 0.01) return;
  event.preventDefault();
  chart.dispatchAction(
    {type: "dataZoom", dataZoomIndex: 0, start: Math.max(part[0], 0), end: Math.min(part[1], 100)});
};

// To light or to dark, kept in a cookie. Returns whether it is dark now.
window.studioSwitchColors = cookie => {
  const dark = !document.body.classList.contains("body--dark");
  document.cookie = `${cookie}=${dark ? "dark" : "light"}; path=/; max-age=31536000; SameSite=Strict`;
  return dark;
};

// Whether the text is in the clipboard now. Without encryption, a browser has a clipboard for pages of its own machine
// alone: others copy a selection.
window.studioCopy = async text => {
  const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  if (copied) return true;
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
};

// NiceGUI makes the cells of a table anew whenever a row changes, and the keyboard's focus would be gone with them.
{
  let focused = null;
  document.addEventListener("focusin", event => { focused = event.target; });
  new MutationObserver(() => {
    const name = focused?.dataset?.focus;
    if (!name || focused.isConnected || document.activeElement !== document.body) return;
    const again = [...document.querySelectorAll("[data-focus]")].find(one => one.dataset.focus === name);
    again?.focus({preventScroll: true});
  }).observe(document.documentElement, {childList: true, subtree: true});
}

// Of runs as lines across axes: the one that the pointer or the keyboard is at, in words.
for (const kind of ["mouseover", "focusin"]) {
  document.addEventListener(kind, event => {
    const line = event.target.closest?.(".parallel a");
    if (line) line.closest(".parallel").nextElementSibling.textContent = line.getAttribute("aria-label");
  });
}

// The arrow keys go through the list below a field that is typed into; a letter goes on typing.
document.addEventListener("keydown", event => {
  const picker = event.target.closest?.(".picker");
  if (!picker || event.altKey || event.ctrlKey || event.metaKey) return;
  const input = picker.querySelector("input");
  const rows = [...picker.querySelectorAll(".picker-list .picker-row:not([disabled])")].filter(row => row.offsetParent);
  const at = rows.indexOf(event.target);
  const by = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (by && rows.length && (at >= 0 || event.target === input)) {
    event.preventDefault();
    (at + by < 0 ? input : rows[Math.min(at + by, rows.length - 1)]).focus();
  } else if (at >= 0 && event.key === "Escape") {
    input.focus();
    input.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
  } else if (at >= 0 && event.key.length === 1 && event.key !== " ") {
    input.focus();
  }
});

// Files that are dropped onto the page go to its uploader, those of folders under their path.
{
  const uploader = () => document.querySelector("[data-drop]");
  const holdsFiles = event => event.dataTransfer?.types.includes("Files") && uploader();
  const mark = on => uploader()?.toggleAttribute("data-dropping", on);
  const filesOf = async (entry, folder) => {
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      return [folder ? new File([file], folder + file.name, {type: file.type}) : file];
    }
    const reader = entry.createReader();
    const files = [];
    for (;;) {
      const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (!entries.length) return files;
      for (const inner of entries) {
        if (!inner.name.startsWith(".")) files.push(...await filesOf(inner, folder + entry.name + "/"));
      }
    }
  };
  let depth = 0;  // of the elements that the files are over
  document.addEventListener("dragenter", event => { if (holdsFiles(event) && ++depth) mark(true); });
  document.addEventListener("dragleave", event => { if (holdsFiles(event) && !--depth) mark(false); });
  document.addEventListener("dragover", event => { if (holdsFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", async event => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    depth = 0;
    mark(false);
    const given = [...event.dataTransfer.items].filter(item => item.kind === "file");
    const entries = given.map(item => item.webkitGetAsEntry?.()).filter(Boolean);
    const files = entries.length ? (await Promise.all(entries.map(one => filesOf(one, "")))).flat() : [...event.dataTransfer.files];
    getElement(Number(uploader().dataset.drop)).$refs.qRef.addFiles(files);
  });
}

// How much of an upload is sent, of all its files together, until the server has answered.
window.studioUpload = (id, {files, xhr}) => {
  const box = getHtmlElement(id);
  const [words, track] = box.children;
  const name = files.length === 1 ? files[0].name : `${files.length.toLocaleString("en-US")} files`;
  const size = bytes => bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(0)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  const show = (loaded, total) => {
    const isSent = loaded >= total;
    words.textContent = isSent ? `${name}: writing` : `${name}: ${size(loaded)} of ${size(total)}`;
    track.firstElementChild.style.width = `${100 * loaded / Math.max(total, 1)}%`;
  };
  show(0, files.reduce((sum, file) => sum + file.size, 0) || 1);
  box.hidden = false;
  xhr.upload.addEventListener("progress", ({loaded, total}) => show(loaded, total));
  xhr.addEventListener("loadend", () => { box.hidden = true; });
};

// The address of a page with what has been answered on it, so that reloading it or coming back loses nothing.
window.studioAddress = address => history.replaceState(history.state, "", address);

// On a phone the rail is wider than the window: it shows the name of the page that is open.
new MutationObserver((_, observer) => {
  const pages = document.querySelector(".pages");
  if (!pages) return;
  observer.disconnect();
  const here = pages.querySelector("[aria-current=page]");
  if (!here) return;
  // Names have their width once their font is there, and the rail has that of the window.
  const sizes = new ResizeObserver(() => {
    pages.scrollLeft = here.offsetLeft - pages.offsetLeft - (pages.clientWidth - here.offsetWidth) / 2;
  });
  for (const one of [pages, ...pages.children]) sizes.observe(one);
}).observe(document.documentElement, {childList: true, subtree: true});
