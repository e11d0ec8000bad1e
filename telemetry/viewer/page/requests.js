// Recent requests: filters, a plot of their durations, a table.

import {
  clean, clock, el, meter, ms, number, outcome, panel, percent, roundMs, table, text, traceHref,
} from "./dom.js";
import { askOr } from "./server.js";

const PAGE_ROWS = 100;
const MOST_ROWS = 2000;
const TYPING_MS = 250;

export class Requests {
  /** @param {URLSearchParams} query the filters, as the API takes them: tenant, replica, error, slow_ms */
  constructor(query) {
    this.title = "requests";
    this.query = query;
    this.rows = [];
    this.older = null; // a Map by trace id, once older ones have been asked for
    this.body = el("tbody");
    this.plot = el("div");
    this.list = el("div");
    this.state = el("div", { class: "empty", role: "status" }, "Loading …");
    this.newer = el("button", { type: "button", hidden: true, onclick: () => this.show(true) });
    this.more = el("button", { type: "button", hidden: true, onclick: () => this.reload(true) }, "Older requests");
    this.form = this.filters();
    const title = el("h1", { class: "skip" }, "Recent requests");
    this.node = el("div", {}, title, this.form, panel("Requests", this.plot, this.list, this.state), this.more);
  }

  tick() {
    return this.load();
  }

  filters() {
    const soon = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refilter(), TYPING_MS);
    };
    const now = (event) => {
      event.preventDefault();
      this.refilter();
    };
    const box = (label, attributes) => {
      const value = this.query.get(attributes.name) ?? "";
      return el("label", {}, label, el("input", { autocomplete: "off", spellcheck: "false", ...attributes, value }));
    };
    const checked = this.query.get("error") === "1";
    return el("form", { class: "filters", role: "search", "aria-label": "Filter", oninput: soon, onsubmit: now },
      box("tenant", { name: "tenant", list: "tenants", maxlength: 256, size: 14 }),
      box("replica", { name: "replica", list: "replicas", maxlength: 128, size: 12 }),
      box("slower than", { name: "slow_ms", type: "number", min: 0, step: "any", placeholder: "ms" }),
      el("label", { title: "and those that were cancelled" },
        el("input", { type: "checkbox", name: "error", checked }), "errors only"),
      el("button", { type: "button", onclick: () => this.clear() }, "Clear"),
      el("span", { class: "spring" }), this.newer,
      el("datalist", { id: "tenants" }), el("datalist", { id: "replicas" }));
  }

  clear() {
    for (const input of this.form.elements) {
      if (input.name) [input.value, input.checked] = [input.type === "checkbox" ? "on" : "", false];
    }
    this.refilter();
  }

  refilter() {
    const found = new URLSearchParams();
    for (const [name, value] of new FormData(this.form)) {
      if (value.trim()) found.set(name, name === "error" ? "1" : value.trim());
    }
    if (String(found) === String(this.query)) return;
    this.query = found;
    this.older = null;
    history.replaceState(null, "", found.size ? "#/requests?" + found : "#/requests");
    dispatchEvent(new Event("filtered"));
    this.reload(false, true);
  }

  /** `load`, for those who do not wait for it. */
  reload(...how) {
    this.load(...how).catch((error) => dispatchEvent(new CustomEvent("failed", { detail: error })));
  }

  async load(further = false, forced = further) {
    const query = new URLSearchParams(this.query);
    query.set("limit", PAGE_ROWS);
    if (further && this.cursor) query.set("before", this.cursor);
    const asked = this.query;
    const answer = await askOr("api/requests?" + query, [400], { misunderstood: true });
    if (asked !== this.query) return; // the filter has changed meanwhile
    const found = answer.requests ?? [];
    if (further && !this.older) this.older = new Map(this.rows.map((row) => [row.trace_id, row]));
    if (further || !this.older) this.cursor = answer.next;
    for (const row of this.older ? found : []) this.older.set(row.trace_id, row);
    const all = this.older ? [...this.older.values()].sort((a, b) => b.start_ms - a.start_ms) : found;
    this.next = all.slice(0, MOST_ROWS);
    this.misunderstood = answer.misunderstood;
    this.show(forced);
  }

  /** Put up what came last; but rows do not move away from under someone who points at them. */
  show(forced) {
    const known = new Set(this.rows.map((row) => row.trace_id));
    const fresh = this.next.filter((row) => !known.has(row.trace_id)).length;
    const busy = !forced && known.size > 0 && fresh > 0 && this.list.matches(":hover, :focus-within");
    this.newer.hidden = !busy;
    this.newer.textContent = `Show ${fresh} newer`;
    if (busy) return;
    const focused = document.activeElement?.dataset?.trace;
    this.rows = this.next;
    this.list.replaceChildren(this.rows.length ? this.table() : "");
    this.plot.replaceChildren(...plot(this.rows));
    this.links().find((link) => link.dataset.trace === focused)?.focus({ preventScroll: true });
    this.more.hidden = !this.cursor || this.rows.length >= MOST_ROWS;
    this.state.hidden = this.rows.length > 0;
    this.state.textContent = this.misunderstood ? "The viewer does not understand this filter."
      : this.query.size ? "No recent request matches these filters."
      : "No requests yet. Send one: it appears here when it ends.";
    for (const name of ["tenant", "replica"]) {
      const values = [...new Set(this.rows.map((row) => row[name]).filter(Boolean))].sort().slice(0, 100);
      const options = values.map((value) => el("option", { value: clean(value, 256) }));
      this.form.querySelector(`#${name}s`).replaceChildren(...options);
    }
  }

  links() {
    return [...this.list.querySelectorAll("a[data-trace]")];
  }

  table() {
    const longest = Math.max(1, ...this.rows.map((row) => row.duration_ms));
    const started = (row) => {
      const address = { href: traceHref(row.trace_id), "data-trace": row.trace_id, title: clean(row.name) };
      return el("a", address, clock(row.start_ms));
    };
    const ended = (row) => {
      const [tone, word] = outcome(row);
      return el("span", { class: `dot ${tone}` }, text(word, 40));
    };
    const open = (row) => (event) => {
      if (!event.target.closest("a") && !String(getSelection())) location.hash = traceHref(row.trace_id);
    };
    const found = table([
      ["started", started], ["outcome", ended, "clip"],
      ["duration", (row) => ms(row.duration_ms), "num"], ["", (row) => meter(row.duration_ms / longest)],
      ["TTFT", (row) => ms(row.ttft_ms), "num", "time to first token"],
      ["TPOT", (row) => ms(row.tpot_ms), "num", "time per output token after the first"],
      ["prompt", (row) => number(row.input_tokens), "num", "tokens"],
      ["cached", (row) => (row.input_tokens ? percent(row.cached_tokens / row.input_tokens) : "–"), "num muted",
        "share of the prompt found in the prefix cache"],
      ["output", (row) => number(row.output_tokens), "num", "tokens"],
      ["replica", (row) => text(row.replica), "clip"], ["tenant", (row) => text(row.tenant), "clip"],
      ["spans", (row) => number(row.spans), "num muted"],
      ["trace", (row) => clean(row.trace_id, 64).slice(0, 8), "mono muted"],
    ], this.rows, { attributes: (row) => ({ "data-go": true, onclick: open(row) }) });
    found.addEventListener("keydown", (event) => this.key(event));
    return found;
  }

  key(event) {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const links = this.links();
    links[Math.min(links.length - 1, Math.max(0, links.indexOf(document.activeElement) + step))]?.focus();
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Each request a dot: when it began, and on a log scale how long it took. The table says the same in words. */
function plot(rows) {
  if (rows.length < 2) return [];
  const begin = Math.min(...rows.map((row) => row.start_ms));
  const extent = Math.max(...rows.map((row) => row.start_ms - begin), 1);
  const logs = rows.map((row) => Math.log10(Math.max(row.duration_ms, 0.1)));
  const low = Math.floor(Math.min(...logs)), high = Math.max(Math.ceil(Math.max(...logs)), low + 1);
  const top = (log) => 100 - (100 * (log - low)) / (high - low) + "%";
  const rules = [];
  for (let power = low; power <= high; power += high - low > 3 ? 2 : 1) {
    rules.push(el("div", { class: "rule", css: { top: top(power) } }, el("span", {}, roundMs(10 ** power))));
  }
  const dots = rows.map((row, at) => el("a", {
    class: outcome(row)[0], href: traceHref(row.trace_id), tabindex: -1,
    title: `${clock(row.start_ms)}  ${ms(row.duration_ms)}  ${clean(row.replica, 60)}`,
    css: { left: (100 * (row.start_ms - begin)) / extent + "%", top: top(logs[at]) },
  }));
  const ends = [clock(begin), "duration by start", clock(begin + extent)].map((word) => el("span", {}, word));
  return [
    el("div", { class: "plot", "aria-hidden": "true" }, rules, dots),
    el("div", { class: "ends muted", "aria-hidden": "true" }, ends),
  ];
}
