// The spans of a trace over time, as a tree that the keyboard walks, and beside it all about the chosen one.

import { chip, clean, el, isNumber, ms, muted, number, panel, roundMs, text, traceHref } from "./dom.js";

const DEEPEST = 16;
const COLOURS = [ // by the beginning of a span's name: the first that fits
  ["kvorum.http.", "http", "HTTP"],
  ["kvorum.router.admit", "queue", "waiting"], ["kvorum.router.", "router", "router"],
  ["kvorum.replica.queue", "queue", "waiting"], ["kvorum.replica.kv_fetch", "fetch", "KV fetch"],
  ["kvorum.replica.prefill", "prefill", "prefill"], ["kvorum.replica.decode", "decode", "decode"],
  ["kvorum.replica.", "replica", "replica"], ["kvorum.engine.", "step", "engine step"], ["", "other", "other"],
];
const kindOf = (span) => COLOURS.find(([prefix]) => String(span.name).startsWith(prefix)).slice(1);
const lasts = (span) => span.end_ms - span.start_ms;

/** The error's type, or just that there is one. */
export const errorOf = (span) => span.attributes?.["error.type"] ?? "error";

export class Waterfall {
  constructor() {
    this.folded = new Set();
    this.chosen = null; // the id of a span
    this.window = null; // [from, to] in ms since the epoch, when zoomed in
    this.tree = el("div", { role: "tree", "aria-label": "Spans", onkeydown: (event) => this.key(event) });
    this.node = panel("Waterfall");
    this.side = el("aside", { class: "panel side", "aria-label": "Span" });
  }

  /** Show these spans (at least one) with the marks of their request. */
  take(spans, marks) {
    this.hadFocus = this.tree.contains(document.activeElement);
    this.spans = spans;
    this.byId = new Map(spans.map((span) => [span.span_id, span]));
    this.below = new Map();
    for (const span of [...spans].sort((a, b) => a.start_ms - b.start_ms)) {
      const parent = this.byId.has(span.parent) && span.parent !== span.span_id ? span.parent : null;
      this.below.set(parent, [...(this.below.get(parent) ?? []), span]);
    }
    this.tops = this.below.get(null) ?? [spans[0]]; // parents in a circle are corrupt, but still shown
    this.root = this.tops[0];
    this.begin = Math.min(...spans.map((span) => span.start_ms));
    this.end = Math.max(...spans.map((span) => span.end_ms), this.begin + 0.001);
    const last = isNumber(marks.tpot_ms) ? `last token · TPOT ${ms(marks.tpot_ms)}` : "last token";
    const both = [["TTFT " + ms(marks.ttft_ms), marks.first_token_ms], [last, marks.last_token_ms]];
    this.marks = both.filter(([, at]) => isNumber(at));
    this.chosen ??= this.root.span_id;
    this.draw();
  }

  restoreFocus() {
    if (this.hadFocus) this.items().find((item) => item.dataset.span === this.chosen)?.focus({ preventScroll: true });
  }

  items() {
    return [...this.tree.children];
  }

  x(at) {
    const [from, to] = this.window ?? [this.begin, this.end];
    return (100 * (at - from)) / Math.max(to - from, 1e-6);
  }

  draw() {
    const [from, to] = this.window ?? [this.begin, this.end];
    const ticks = scale(from - this.begin, to - this.begin);
    const marks = this.marks.filter(([, at]) => at >= from && at <= to);
    const label = (at, word) => el("span", { class: at > 70 ? "left" : "", css: { left: at + "%" } }, word);
    const axis = (kind, labels) => el("div", { class: `row axis ${kind}` },
      el("div"), el("div", { class: "lane" }, labels), el("div"));
    const rule = (kind) => (at) => el("i", { class: kind, css: { left: this.x(at) + "%" } });
    const words = new Map(this.spans.map((span) => kindOf(span)));
    const legend = [...words].map(([tone, word]) => el("span", {}, el("i", { class: "swatch c-" + tone }), word));
    const whole = el("button", { type: "button", hidden: !this.window, onclick: () => this.zoom() }, "Whole trace");
    this.tree.replaceChildren(...this.rows());
    this.node.replaceChildren(
      el("div", { class: "head" }, el("h2", {}, "Waterfall"), el("span", { class: "legend muted" }, legend),
        el("span", { class: "spring" }), whole),
      el("div", { class: "fall" },
        marks.map(([word, at]) => axis("marks", label(this.x(at), word))),
        axis("", ticks.map((at) => [this.x(this.begin + at), roundMs(at)]).filter(([x]) => x < 95).map((tick) =>
          el("span", { css: { left: tick[0] + "%" } }, tick[1]))),
        this.tree,
        el("div", { class: "grid", "aria-hidden": "true" }, el("div", {},
          ticks.map((at) => this.begin + at).map(rule("")), marks.map(([, at]) => at).map(rule("mark"))))));
    this.select(this.chosen, false);
  }

  rows() {
    const rows = [], seen = new Set(), stack = this.tops.map((span) => [span, 1]).reverse();
    while (stack.length) {
      const [span, level] = stack.pop();
      if (seen.has(span)) continue;
      seen.add(span);
      const below = this.below.get(span.span_id) ?? [], open = !this.folded.has(span.span_id);
      rows.push(this.row(span, level, below.length ? open : null));
      if (open) stack.push(...below.map((child) => [child, level + 1]).reverse());
    }
    return rows;
  }

  /** @param {?boolean} open null: there is nothing below it */
  row(span, level, open) {
    const id = span.span_id, left = this.x(span.start_ms), attempt = span.attributes?.["kvorum.attempt"];
    const fold = (event) => {
      event.stopPropagation();
      this.fold(id, open);
    };
    const bar = `bar c-${kindOf(span)[0]} ${span.error ? "failed" : ""} ${open === null ? "" : "parent"}`;
    const event = (one) =>
      el("span", { class: "event", title: clean(one.name, 80), css: { left: this.x(one.time_ms) + "%" } });
    const clocks = () => chip(`clock ${span.skew_ms > 0 ? "+" : "−"}${ms(Math.abs(span.skew_ms))}`, "warn",
      "moved to lie within its parent: the clocks of the two hosts differ");
    const words = `${clean(span.name, 80)}, ${ms(lasts(span))}${span.error ? ", failed" : ""}`;
    return el("div", {
      class: "row", role: "treeitem", "data-span": id, tabindex: -1, "aria-level": level, "aria-label": words,
      "aria-expanded": open === null ? null : String(open),
      onclick: () => this.select(id, true), ondblclick: () => this.zoom(span),
    },
    el("div", { class: "name", css: { "padding-left": 12 + 13 * Math.min(level - 1, DEEPEST) + "px" } },
      el("span", { class: "fold", "aria-hidden": "true", onclick: fold }, open === null ? "" : open ? "▾" : "▸"),
      text(String(span.name).replace(/^kvorum\./, ""), 80, span.error ? "bad" : ""),
      attempt > 1 && chip("attempt " + number(attempt)), span.error && chip(text(errorOf(span), 30), "bad"),
      span.skew_ms ? clocks() : "", text(span.instance || span.service, 60, "where muted")),
    el("div", { class: "lane" },
      el("span", { class: bar, css: { left: left + "%", width: Math.max(0, this.x(span.end_ms) - left) + "%" } }),
      (span.events ?? []).slice(0, 50).map(event)),
    el("div", { class: "took" }, ms(lasts(span))));
  }

  fold(id, open) {
    if (open === null) return;
    if (open) this.folded.add(id);
    else this.folded.delete(id);
    this.tree.replaceChildren(...this.rows());
    this.select(id, true);
  }

  /** To the extent of a span, or back. */
  zoom(span) {
    this.window = span && !this.window ? [span.start_ms, Math.max(span.end_ms, span.start_ms + 0.001)] : null;
    this.draw();
    this.select(this.chosen, true);
  }

  select(id, focus) {
    const items = this.items(), chosen = items.find((item) => item.dataset.span === id) ?? items[0];
    this.chosen = chosen.dataset.span;
    for (const item of items) {
      item.setAttribute("aria-selected", item === chosen);
      item.tabIndex = item === chosen ? 0 : -1;
    }
    if (focus) chosen.focus();
    this.side.replaceChildren(...this.details(this.byId.get(this.chosen)));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const items = this.items(), at = items.findIndex((item) => item.dataset.span === this.chosen);
    const moves = { ArrowDown: at + 1, j: at + 1, ArrowUp: at - 1, k: at - 1, Home: 0, End: items.length - 1 };
    const to = moves[event.key], open = items[at].getAttribute("aria-expanded"), span = this.byId.get(this.chosen);
    if (to !== undefined) this.select(items[Math.min(items.length - 1, Math.max(0, to))].dataset.span, true);
    else if (event.key === "ArrowLeft" && open === "true") this.fold(this.chosen, true);
    else if (event.key === "ArrowRight" && open === "false") this.fold(this.chosen, false);
    else if (event.key === "ArrowLeft" && this.byId.has(span.parent)) this.select(span.parent, true);
    else if (event.key === "z") this.zoom(span);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  details(span) {
    const pair = (name, ...value) => [el("dt", {}, text(name, 100)), el("dd", { class: "text" }, ...value)];
    const section = (title, pairs) => pairs.length ? [el("h3", {}, title), el("dl", { class: "pairs" }, pairs)] : [];
    const word = this.window ? "Whole trace" : "Zoom";
    const zoom = el("button", { type: "button", onclick: () => this.zoom(span) }, word);
    const values = (all) => Object.entries(all ?? {}).map(([name, value]) => `${name}=${shown(value)}`).join(" ");
    const link = (one) => el("a", { class: "mono", href: traceHref(one.trace_id) }, clean(one.trace_id, 32));
    return [
      el("div", { class: "head" }, el("h2", {}, text(span.name, 80)), el("span", { class: "spring" }), zoom),
      el("dl", { class: "pairs" },
        pair("process", clean(span.instance || "–", 100), " ", muted(clean(span.service, 60))),
        pair("starts", "+" + ms(span.start_ms - this.begin)), pair("lasts", ms(lasts(span))),
        span.error ? pair("error", clean([errorOf(span), span.status_message].filter(Boolean).join(": "), 700)) : [],
        span.skew_ms ? pair("clock", `moved by ${ms(span.skew_ms)} to lie within its parent`) : [],
        span.parent && !this.byId.has(span.parent) ? pair("parent", clean(span.parent, 16), " (not recorded)") : [],
        pair("span", el("span", { class: "mono" }, clean(span.span_id, 32)))),
      section("Attributes", ordered(span.attributes).flatMap(([name, value]) =>
        pair(name, name === "kvorum.candidates" ? "see the routing decision" : shown(value)))),
      section("Events", (span.events ?? []).slice(0, 100).flatMap((one) =>
        pair(one.name, "+" + ms(one.time_ms - this.begin), " ", clean(values(one.attributes), 500)))),
      section("Links", (span.links ?? []).slice(0, 50).flatMap((one) =>
        pair("trace", link(one), " ", clean(values(one.attributes), 200)))),
    ].flat();
  }
}

/** Round steps from `from` to `to`, about six. */
function scale(from, to) {
  const rough = Math.max(to - from, 1e-6) / 6, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((size) => size >= rough * 0.999);
  const first = Math.ceil(from / step);
  const length = Math.min(20, Math.max(0, Math.floor(to / step) - first + 1));
  return Array.from({ length }, (_, at) => (first + at) * step);
}

/** Ours first, then the conventions', then the rest. */
function ordered(attributes) {
  const prefixes = ["error.type", "kvorum.", "gen_ai.", ""];
  const rank = ([name]) => prefixes.findIndex((prefix) => name.startsWith(prefix));
  return Object.entries(attributes ?? {}).sort((a, b) => rank(a) - rank(b) || (a[0] < b[0] ? -1 : 1)).slice(0, 200);
}

function shown(value) {
  if (Array.isArray(value)) return clean("[" + value.slice(0, 100).map(shown).join(", ") + "]", 2000);
  return isNumber(value) && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : clean(value, 2000);
}
