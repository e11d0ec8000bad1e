// Why this replica, and what its engine did: the candidates with every term of their cost, the linked engine steps.

import { chip, el, isNumber, ms, muted, number, panel, percent, split, table, text } from "./dom.js";

const MOST_ROWS = 500;
const TERMS = [ // and the colour of each
  ["queue", "queue"], ["prefill", "prefill"], ["fetch", "fetch"], ["interference", "replica"], ["overhead", "other"],
];

/** @param {(name: string) => any} any the first value of an attribute in the trace */
export function decision(candidates, any) {
  const rows = candidates.slice(0, MOST_ROWS);
  if (!rows.length) return "";
  const longest = Math.max(1, ...rows.map((row) => row.ttft ?? 0));
  const figure = (value, shown) => (value === 0 ? muted(shown) : shown);
  const term = (name) => (row) => (isNumber(row[name]) ? figure(row[name], row[name].toFixed(1)) : "–");
  const count = (name) => (row) => figure(row[name], number(row[name]));
  const decisions = [...new Set(rows.map((row) => row.span_id))];
  const attempt = (row) => decisions.length > 1 && chip(`attempt ${decisions.indexOf(row.span_id) + 1}`);
  const columns = [
    ["replica", (row) => [text(row.replica), " ", row.chosen && chip("chosen", "good"), attempt(row)]],
    ["cached", count("cached"), "num", "prompt tokens resident there"],
    ["in flight", count("pending"), "num", "further ones, of a prompt that is being computed there"],
    ["pooled", count("pooled"), "num", "further ones, to be fetched"],
    ["to compute", count("uncached"), "num", "prompt tokens"],
    ["queue", term("queue"), "num"], ["prefill", term("prefill"), "num"], ["fetch", term("fetch"), "num"],
    ["decodes", term("interference"), "num", "interference of running decodes"], ["other", term("overhead"), "num"],
    ["TTFT", term("ttft"), "num", "predicted: the five before it"],
    ["", (row) => split(TERMS.map(([name, tone]) => [tone, row[name] ?? 0]), longest, "small"), "wide"],
    ["harm", term("harm"), "num", "what the request costs running decodes"],
    ["session", term("affinity"), "num", "credit for the session's replica"],
    ["score", term("score"), "num", "TTFT + harm − session: the least wins"],
    ["seqs", count("sequences"), "num"], ["backlog", count("backlog"), "num", "prompt tokens accepted, not computed"],
    ["KV", (row) => percent(row.kv), "num"],
  ];
  const found = table(columns, rows, {
    attributes: (row) => ({ class: row.chosen ? "chosen" : "" }),
    under: (row) => row.degraded && el("span", { class: "warn" }, "no cache credit: ", text(row.degraded, 300)),
  });
  const why = muted("policy ", text(any("kvorum.policy"), 40), "; ", text(any("kvorum.why"), 300), "; predicted ms");
  return panel("Routing decision", el("h2", {}, "Routing decision", why), found);
}

/** @param spans those of the request itself, whose beginning is 0 */
export function steps(found, spans) {
  const rows = found.slice(0, MOST_ROWS).map((span) => {
    const of = (name) => span.attributes?.["kvorum.step." + name];
    const time = (name) => (isNumber(of(name + "_s")) ? of(name + "_s") * 1000 : undefined);
    return { span, of, time, forward: span.end_ms - span.start_ms };
  });
  if (!rows.length) return "";
  const begin = Math.min(...spans.map((span) => span.start_ms));
  const longest = Math.max(0.001, ...rows.map((row) => row.forward));
  const bar = ({ forward, time }) => {
    const exposed = time("exposed") ?? 0;
    return split([["step", Math.max(0, forward - exposed)], ["bad", exposed]], longest, "small");
  };
  const columns = [
    ["step", ({ of }) => number(of("number"))],
    ["rank", ({ span }) => number(span.attributes?.["kvorum.rank"]), "num"],
    ["starts", ({ span }) => "+" + ms(span.start_ms - begin), "num"],
    ["tokens", ({ of }) => number(of("tokens")), "num", "of all requests in the step"],
    ["of this", ({ of }) => number(of("request_tokens")), "num", "tokens of this request"],
    ["path", ({ of }) => text(of("path"), 20)], ["chunks", ({ of }) => number(of("chunks")), "num"],
    ["forward", ({ forward }) => ms(forward), "num"], ["compute", ({ time }) => ms(time("compute")), "num"],
    ["AllReduce", ({ time }) => ms(time("all_reduce")), "num"],
    ["exposed", ({ time }) => ms(time("exposed")), "num", "the part of AllReduce that nothing hid"],
    ["", bar, "wide"],
  ];
  const why = muted("a step serves many requests, so these are a trace of their own; red: exposed AllReduce");
  return panel("Engine steps", el("h2", {}, "Engine steps of the prefill", why), table(columns, rows));
}
