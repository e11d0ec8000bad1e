// Elements, tables and figures. What the server sends is text of strangers: it reaches the document as text
// (`append` of a string) and as quoted attributes, never as markup, as an address or as a class.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "polyline"]);
// Control, zero-width and direction characters; not tab and newline.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/** An element. Strings among `children` become text; `css` goes through the object model, as the CSP asks. */
export function el(tag, attributes = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Foreign text without characters that nobody sees, at most `most` long. */
export function clean(value, most = 300) {
  const text = String(value ?? "").replace(UNSEEN, "\ufffd");
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}
/** The same as an element that cannot reorder its neighbours. */
export const text = (value, most = 60, kind = "") =>
  el("span", { class: `text ${kind}`, title: clean(value, 1000) }, clean(value, most) || "–");

/** `columns` are [heading, row => cell, class, title]; `under(row)` is a remark below the row, if any. */
export function table(columns, rows, { attributes = () => ({}), under = () => null } = {}) {
  const line = (row) => {
    const own = attributes(row), remark = under(row);
    const cells = columns.map(([, cell, kind = ""]) => el("td", { class: kind }, cell(row)));
    return [
      el("tr", own, cells),
      remark && el("tr", { class: `sub ${own.class ?? ""}` }, el("td", { colspan: columns.length }, remark)),
    ].filter(Boolean);
  };
  const heads = columns.map(([head, , kind, title]) => el("th", { class: kind, scope: "col", title }, head));
  const body = el("tbody", {}, rows.flatMap(line));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body));
}
export const panel = (label, ...inside) => el("section", { class: "panel", "aria-label": label }, ...inside);
export const note = (kind, ...inside) => el("div", { class: `note ${kind}` }, ...inside);
export const chip = (word, kind = "", title = undefined) => el("span", { class: `chip ${kind}`, title }, word);
export const muted = (...inside) => el("span", { class: "muted" }, ...inside);

/** A bar of `parts`, [colour, value], on a scale where `whole` fills it. */
export function split(parts, whole, kind = "") {
  const part = ([tone, value]) => el("i", { class: "c-" + tone, css: { width: (100 * value) / whole + "%" } });
  const seen = parts.filter(([, value]) => value > 0);
  return el("div", { class: `split ${kind}`, "aria-hidden": "true" }, seen.map(part));
}
/** A share, 0 to 1, as a small bar; with `alarm`, in other colours when it is nearly full. */
export function meter(share, alarm = false) {
  if (!isNumber(share)) return "";
  const kind = !alarm || share <= 0.8 ? "" : share > 0.95 ? "full" : "high";
  const width = Math.min(100, Math.max(0, share * 100)) + "%";
  return el("span", { class: "meter", "aria-hidden": "true" }, el("i", { class: kind, css: { width } }));
}
/** Shares, 0 to 1, over time. */
export function spark(values) {
  if (values.length < 2) return "";
  const y = (value) => 19 - 18 * Math.min(1, Math.max(0, value));
  const points = values.map((value, at) => `${((100 * at) / (values.length - 1)).toFixed(1)},${y(value).toFixed(1)}`);
  const box = { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" };
  return el("svg", box, el("polyline", { points: points.join(" ") }));
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const number = (value) =>
  isNumber(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 2 }) : "–";
export const percent = (value, digits = 0) => (isNumber(value) ? (value * 100).toFixed(digits) + " %" : "–");
export function ms(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 60000) return (value / 60000).toFixed(1) + " min";
  if (size >= 1000) return (value / 1000).toFixed(size >= 10000 ? 1 : 2) + " s";
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2) + " ms";
}
/** For scales: 50 ms, not 50.0 ms. */
export const roundMs = (value) => (value === 0 ? "0" : ms(value).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " "));
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, unit] = units.find(([length]) => seconds >= length) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}
export function clock(epochMs) {
  const at = new Date(epochMs);
  if (Number.isNaN(at.getTime())) return "–";
  const time = at.toLocaleTimeString("en-GB");
  return Date.now() - epochMs < 43200000 ? time : `${at.toLocaleDateString("sv-SE").slice(5)} ${time}`;
}
export function quantile(values, q) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : undefined;
}

export const traceHref = (id) => "#/trace/" + encodeURIComponent(String(id));
const TONES = { ok: "good", error: "bad", refused: "warn" };
/** [class, word] of how a request ended: ok, its error's type, or cancelled, or incomplete. */
export const outcome = ({ status, error_type: error }) => [TONES[status] ?? "muted", error || status];
