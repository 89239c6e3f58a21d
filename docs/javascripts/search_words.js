// The theme's search reads each word as the beginning of one: "convert to gguf" finds torchtune, tokenizers and tools.
// It reads the text of its field, which is given without these words here; what the reader sees stays as typed.
const FILLERS = new Set(
  ("a an and are as at be by can could do does for from get have how i if in into is it my of on or our " +
    "should that the their there these this to was what when where which while will with you your").split(" "),
);

function withoutFillers(text) {
  const words = text.split(/\s+/);
  // The last word may still be typed: "to" may become "tokenizer".
  const kept = words.filter((word, at) => at === words.length - 1 || !FILLERS.has(word.toLowerCase()));
  return text.includes('"') || kept.join("") === "" ? text : kept.join(" ");
}

// A screen reader names the dialog; the theme leaves it without a name.
document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search");

const field = document.querySelector("[data-md-component=search-query]");
if (field) {
  const { get, set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
  Object.defineProperty(field, "value", {
    get() {
      return withoutFillers(get.call(this));
    },
    set(text) {
      set.call(this, text);
    },
  });
}
