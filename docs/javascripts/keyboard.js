// What scrolls sideways, code and tables, scrolls by keyboard, too: Tab reaches it. The theme does so for code alone, and
// only where a mouse is.
const SCROLLING = ".md-typeset pre > code, .md-typeset__scrollwrap";

function reachScrolling() {
  for (const box of document.querySelectorAll(SCROLLING)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

// After the theme, which wraps tables once it has begun.
addEventListener("load", () => setTimeout(reachScrolling));
addEventListener("resize", () => requestAnimationFrame(() => setTimeout(reachScrolling)));
