// Elements, texts and numbers. Nothing on the page is ever parsed as HTML: texts become text nodes.

/** Characters that act or hide: controls, direction marks and overrides, lone surrogates, tags; as system/terminal. */
const ACTS =
  /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/** Escape characters that act or hide. @param {unknown} text @returns {string} */
function visible(text) {
  return String(text ?? "").replace(ACTS, (letter) => {
    const code = /** @type {number} */ (letter.codePointAt(0));
    if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  });
}

/**
 * Make an element. Properties: `class`, `title`, `on` (listeners), `style` (CSS properties); others are attributes.
 * @param {string} tag
 * @param {Record<string, any> | null} [given]
 * @param {...(Node | string | number | null | undefined | false)} children
 * @returns {any}
 */
function el(tag, given, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "on") for (const [kind, act] of Object.entries(value)) made.addEventListener(kind, act);
    else if (name === "style") for (const [key, of] of Object.entries(value)) made.style.setProperty(key, String(of));
    else if (name === "value" || name === "checked" || name === "disabled") made[name] = value;
    else made.setAttribute(name, visible(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return made;
}

/** Format a number in at most 4 digits. @param {number | null | undefined} value @returns {string} */
function num(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** Format seconds. @param {number | null | undefined} value @returns {string} */
function duration(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  if (value > 0 && value < 0.1) return `${Number((1000 * value).toPrecision(2))} ms`;
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60
    ? `${minutes} min ${Math.round(value % 60)} s`
    : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** @param {number | null} count @param {string} noun */
const counted = (count, noun) => `${num(count)} ${noun}${count === 1 ? "" : "s"}`;

/** @param {number} value @param {number} low @param {number} high */
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** @param {number[]} values @returns {number} */
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Return the value below which a share of sorted values lies. @param {number[]} sorted @param {number} share */
const quantile = (sorted, share) => sorted[clamp(Math.floor(share * sorted.length), 0, sorted.length - 1)];

/** A select with its label. @param {string} label @param {[string, string][]} options @param {string} value @param {(value: string) => void} act */
function choice(label, options, value, act) {
  const select = el("select", { "aria-label": label, on: { change: () => act(select.value) } });
  for (const [of, text] of options) select.append(el("option", { value: of }, text));
  select.value = value;
  return el("label", { class: "choice" }, label, select);
}

/** A table with a head. @param {[string, string?][]} columns each with its class @param {any[][]} rows @param {string} [kind] */
function table(columns, rows, kind = "") {
  const head = el("tr", null, ...columns.map(([text, of]) => el("th", { class: of ?? "" }, text)));
  const body = rows.map((row) => el("tr", null, ...row.map((cell, at) => el("td", { class: columns[at][1] ?? "" }, cell))));
  return el("div", { class: "scroll" }, el("table", { class: kind }, el("thead", null, head), el("tbody", null, ...body)));
}

const PALETTE = ["#4477dd", "#dd7733", "#339955", "#cc4455", "#8866cc", "#997755", "#cc66aa", "#668899", "#aa9922", "#2299aa"];
