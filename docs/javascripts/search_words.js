// The theme's search reads each word as the beginning of one: "convert to gguf" finds torchtune, tokenizers and tools.
// It reads the text of its field, which is given without these words here; what the reader sees stays as typed.
const FILLERS = new Set(
  ("a all an and any are as at be been but by can cannot could do does don't for from had has have how i i'm if in into is it " +
    "it's its me my need no not of on or our please should so some than that the their them then there these they this to " +
    "use used using want was we were what when where which while why will with would you your").split(" "),
);
// What divides words in the index (mkdocs.yml), and what the search's own language reads: `f:` is a field, `-f` is a word
// that no page may have. Error texts and options are pasted with them. "c++" and "'torch'" lose them at their ends.
const DIVIDERS = /[\s\-,;:!=[\](){}`/|<>^~*+]+/;
const ENDS = /^[^\p{L}\p{N}_]+|[^\p{L}\p{N}_]+$/gu;

function searched(typed) {
  const phrases = typed.split(/("[^"]+")/);
  const last = phrases.length - 1;
  return phrases
    .map((part, at) => (part.startsWith('"') && part.length > 1 ? part : withoutFillers(part, at === last)))
    .filter((part) => part !== "")
    .join(" ");
}

function withoutFillers(text, isLast) {
  const words = text
    .split(DIVIDERS)
    .map((word) => word.replace(ENDS, ""))
    .filter((word) => word !== "");
  // The last word may still be typed: "to" may become "tokenizer".
  return words.filter((word, at) => (isLast && at === words.length - 1) || !FILLERS.has(word.toLowerCase())).join(" ");
}

// A screen reader names the dialog; the theme leaves it without a name.
document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search");

const field = document.querySelector("[data-md-component=search-query]");
if (field) {
  const { get, set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
  Object.defineProperty(field, "value", {
    get() {
      return searched(get.call(this));
    },
    set(text) {
      set.call(this, text);
    },
  });
}
