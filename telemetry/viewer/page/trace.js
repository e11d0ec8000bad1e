// One trace: a summary, where its time went, and below that the waterfall and the tables.

import { clean, el, isNumber, ms, muted, note, number, outcome, panel, percent, split, text } from "./dom.js";
import { decision, steps } from "./decision.js";
import { askOr } from "./server.js";
import { errorOf, Waterfall } from "./waterfall.js";

const FORWARD = "kvorum.router.forward"; // one attempt at a replica
const MOST_SPANS = 2000;
const FRESH_MS = 8000; // spans of a trace younger than this may still be on their way

export class Trace {
  /** @param {string} back where the list of requests is, with its filters */
  constructor(id, back) {
    this.title = "trace " + clean(id, 8);
    this.id = id;
    this.back = back;
    this.waterfall = new Waterfall();
    this.end = Infinity;
    this.node = el("div", {}, el("div", { class: "empty" }, "Loading …"));
  }

  tick() {
    return Date.now() - this.end < FRESH_MS || this.end === Infinity ? this.load() : undefined;
  }

  async load() {
    const found = await askOr("api/requests/" + encodeURIComponent(this.id), [400, 404], null);
    const shape = JSON.stringify(found);
    if (shape === this.shape) return;
    this.shape = shape;
    const spans = (found?.spans ?? []).slice(0, MOST_SPANS);
    if (!spans.length) {
      const why = ". Spans appear within a second of their end; the oldest are deleted.";
      this.node.replaceChildren(el("div", { class: "empty" }, "No trace ", text(this.id, 64, "mono"), why));
      return;
    }
    this.end = Math.max(...spans.map((span) => span.end_ms));
    this.waterfall.take(spans, found.marks ?? {});
    this.draw(found, spans);
    this.waterfall.restoreFocus();
  }

  draw(found, spans) {
    const any = (name) => spans.find((span) => span.attributes?.[name] !== undefined)?.attributes[name];
    const copy = el("button", { type: "button", onclick: () => this.copy(copy) }, "Copy id");
    const json = { href: "jaeger/api/traces/" + encodeURIComponent(this.id), target: "_blank", rel: "noopener" };
    const request = found.request ?? {}, marks = found.marks ?? {};
    this.node.replaceChildren(
      el("div", { class: "title" }, el("a", { href: this.back }, "‹ Requests"),
        el("h1", {}, text(this.waterfall.root.name, 80)), el("span", { class: "mono muted" }, clean(this.id, 64)),
        copy, el("a", json, "JSON")),
      ...remarks(request, spans, any("kvorum.sampled_by")),
      panel("Summary", this.facts(request, marks, spans, any), phases(spans)),
      el("div", { class: "trace" },
        el("div", {}, this.waterfall.node, decision(found.candidates ?? [], any), steps(found.steps ?? [], spans)),
        this.waterfall.side));
  }

  async copy(button) {
    await navigator.clipboard?.writeText(this.id);
    button.textContent = "Copied";
  }

  facts(request, marks, spans, any) {
    const fact = (label, ...value) => el("div", {}, el("dt", {}, label), el("dd", {}, ...value));
    const aside = (known, words) => (known ? muted(` (${words()})`) : "");
    const [tone, word] = outcome(request), { input_tokens: prompt, cached_tokens: cached } = request;
    const predicted = any("kvorum.predicted.ttft_s"), attempts = spans.filter((span) => span.name === FORWARD);
    const processes = new Set(spans.map((span) => `${span.service}\n${span.instance}`)).size;
    return el("dl", { class: "facts" },
      fact("outcome", text(word, 40, tone), aside(attempts.length > 1, () => `${attempts.length} attempts`)),
      fact("started", new Date(request.start_ms).toLocaleString()),
      fact("duration", ms(request.duration_ms)),
      fact("TTFT", ms(marks.ttft_ms), aside(isNumber(predicted), () => `predicted ${ms(predicted * 1000)}`)),
      fact("TPOT", ms(marks.tpot_ms)),
      fact("prompt", number(prompt), aside(prompt && isNumber(cached), () => percent(cached / prompt) + " cached")),
      fact("output", number(request.output_tokens)),
      fact("model", text(any("gen_ai.response.model") ?? any("gen_ai.request.model"))),
      fact("replica", text(request.replica)),
      fact("tenant", text(request.tenant)),
      fact("spans", `${spans.length} in ${processes} process${processes === 1 ? "" : "es"}`));
  }
}

/** What a reader must know before believing the picture. */
function remarks(request, spans, sampledBy) {
  const found = [], moved = spans.filter((span) => span.skew_ms);
  const failed = spans.find((span) => span.error);
  if (failed) {
    const message = failed.status_message ? [": ", text(failed.status_message, 400)] : "";
    const said = [el("strong", {}, text(errorOf(failed))), message];
    found.push(request.status === "ok" ? note("", "Served all the same, after this: ", said) : note("error", said));
  }
  if (request.status === "incomplete") {
    found.push(note("", "Its topmost span is not here: it has not ended, or was not recorded."));
  }
  if (sampledBy !== undefined) {
    const why = { error: "it failed", slow: "it was slow" }[sampledBy] ?? sampledBy;
    found.push(note("", "This trace was not sampled: HTTP face and router kept their own spans, because ",
      text(why, 40), ". The replica's spans are missing."));
  }
  if (moved.length) {
    const most = ms(Math.max(...moved.map((span) => Math.abs(span.skew_ms))));
    const hosts = new Set(moved.map((span) => span.host)).size;
    found.push(note("", `Clocks differ: ${moved.length} spans of ${hosts} host${hosts === 1 ? "" : "s"} `
      + `were moved, by ${most} at most, to lie within their parents.`));
  }
  const cut = (request.spans ?? 0) - spans.length;
  if (cut > 0) found.push(note("", `${spans.length} spans are shown, ${cut} more are not.`));
  return found;
}

/** Where the time went: what follows on from each other, by name; the rest is what no span accounts for. */
function phases(spans) {
  const sums = new Map();
  for (const span of spans) sums.set(span.name, (sums.get(span.name) ?? 0) + span.end_ms - span.start_ms);
  const of = (name) => sums.get("kvorum." + name) ?? 0;
  const total = Math.max(...spans.map((span) => span.end_ms)) - Math.min(...spans.map((span) => span.start_ms));
  const lost = spans.filter((span) => span.name === FORWARD && span.error && errorOf(span) !== "cancelled")
    .reduce((sum, span) => sum + span.end_ms - span.start_ms, 0);
  const engine = of("replica.queue") + of("replica.kv_fetch") + of("replica.prefill") + of("replica.decode");
  const parts = [
    ["http", "HTTP face", of("router.request") && of("http.request") - of("router.request")],
    ["router", "tokenise and decide", of("router.tokenize") + of("router.route")],
    ["queue", "wait in router", of("router.admit")],
    ["queue", "wait in engine", of("replica.queue")],
    ["fetch", "KV fetch", of("replica.kv_fetch")],
    ["prefill", "prefill", of("replica.prefill")],
    ["decode", "decode", of("replica.decode")],
    ["replica", "network and replica", of("replica.generate") && of("router.forward") - lost - engine],
    ["bad", "failed attempts", lost],
  ].filter(([, , value]) => value > 0);
  const known = parts.reduce((sum, [, , value]) => sum + value, 0);
  if (total - known > total * 0.001) parts.push(["other", "not accounted for", total - known]);
  const whole = Math.max(total, known, 0.001);
  const entry = ([tone, label, value]) => el("span", {}, el("i", { class: "swatch c-" + tone }), label,
    el("b", {}, ms(value)), muted(" " + percent(value / whole, 1)));
  const bar = split(parts.map(([tone, , value]) => [tone, value]), whole);
  return el("div", { class: "phases" }, bar, el("div", { class: "legend" }, parts.map(entry)));
}
