// The fleet now: replicas as the controller and the routers see them, and what recent requests met there.

import {
  chip, clean, duration, el, isNumber, meter, ms, muted, number, panel, percent, quantile, spark, table, text,
} from "./dom.js";
import { ask } from "./server.js";

const RECENT = 200;
const SAMPLES = 60; // of KV in use: two minutes
const MOST_KEPT = 500;
const TONES = { ready: "good", failed: "bad", draining: "warn", stopped: "muted", out: "bad" };
const keyOf = (replica) => `${replica.replica}@${replica.epoch}`;
const sum = (rows, pick) => rows.reduce((total, row) => total + (pick(row) ?? 0), 0);

/** What the page has seen of the fleet since it was opened. */
export class Watch {
  constructor() {
    this.fleet = {};
    this.usage = new Map(); // by replica and epoch
  }

  see(fleet) {
    this.fleet = fleet ?? {};
    const replicas = this.fleet.replicas ?? [], now = performance.now();
    for (const replica of replicas.filter((one) => one.load)) {
      const seen = [...(this.usage.get(keyOf(replica)) ?? []), replica.load.kv_usage].slice(-SAMPLES);
      this.usage.delete(keyOf(replica)); // to the end: the first is the one seen least lately
      this.usage.set(keyOf(replica), seen);
      if (this.usage.size > MOST_KEPT) this.usage.delete(this.usage.keys().next().value);
    }
    const tokens = sum(replicas, (one) => one.load?.generated_tokens), before = this.last;
    const more = before && tokens >= before.tokens; // else a replica has gone, or begun anew
    this.rate = more ? (1000 * (tokens - before.tokens)) / (now - before.now) : undefined;
    this.last = { now, tokens };
  }

  get line() {
    const { name, model, replicas = [] } = this.fleet;
    const ready = replicas.filter((one) => one.state === "READY").length;
    return name ? `${clean(name, 40)} · ${clean(model?.name, 40)} · ${ready}/${replicas.length} ready` : "";
  }
}

export class Fleet {
  constructor(watch) {
    this.title = "fleet";
    this.watch = watch;
    this.node = el("div", {}, el("div", { class: "empty" }, "Loading …"));
  }

  async tick() {
    this.recent = (await ask("api/requests?limit=" + RECENT)).requests ?? [];
    const fleet = this.watch.fleet, replicas = fleet.replicas ?? [], routing = Object.entries(fleet.routing ?? {});
    const left = this.node.querySelector(".scroll")?.scrollLeft ?? 0;
    this.node.replaceChildren(el("h1", { class: "skip" }, "Fleet"), this.tiles(fleet, replicas, routing),
      panel("Replicas", el("h2", {}, "Replicas"), this.replicas(replicas, routing)),
      routing.length ? panel("Routers", el("h2", {}, "Routers"), this.routers(fleet.routers ?? [], routing)) : "");
    this.node.querySelector(".scroll").scrollLeft = left;
  }

  tiles(fleet, replicas, routing) {
    const tile = (label, value, below) => el("dl", { class: "tile" }, el("dt", {}, label), el("dd", {}, value,
      el("small", { title: below }, below || "\u00a0")));
    const load = (name) => sum(replicas, (one) => one.load?.[name]);
    const at = (name, q) => ms(quantile(this.recent.map((row) => row[name]), q));
    const ended = (status) => this.recent.filter((row) => row.status === status).length;
    const well = ended("ok"), failed = ended("error"), refused = ended("refused");
    const waiting = sum(routing, ([, state]) => sum(state.queues ?? [], (queue) => queue.length));
    const ready = replicas.filter((one) => one.state === "READY").length;
    const { rate } = this.watch, last = `last ${this.recent.length}`;
    const share = (part, whole, digits) => (whole ? percent(part / whole, digits) : "–");
    return el("div", { class: "tiles" },
      tile("replicas ready", `${ready} / ${replicas.length}`, clean(fleet.model?.name, 60)),
      tile("in the engines", number(load("running")), `${load("waiting")} wait there, ${waiting} in routers`),
      tile("generated", isNumber(rate) ? `${number(Math.round(rate))} tok/s` : "–", "by all replicas, now"),
      tile("prefix hits", share(load("prefix_hits_tokens"), load("prefix_queries_tokens")), "of prompt tokens"),
      tile("TTFT p50", at("ttft_ms", 0.5), `p95 ${at("ttft_ms", 0.95)}, ${last}`),
      tile("TPOT p50", at("tpot_ms", 0.5), `p95 ${at("tpot_ms", 0.95)}, ${last}`),
      tile("success", share(well, well + failed + refused, 1), `${failed} failed, ${refused} refused, ${last}`));
  }

  replicas(replicas, routing) {
    if (!replicas.length) return el("div", { class: "empty" }, "The controller names no replicas.");
    const load = (name) => (row) => number(row.load?.[name]);
    const measured = (name, show) => (row) => (row.load?.[name] ? show(row.load[name]) : "–"); // 0: not yet
    const recent = (name, q) => (row) =>
      ms(quantile(this.recent.filter((one) => one.replica === row.replica).map((one) => one[name]), q));
    const hits = ({ load: of }) => of?.prefix_queries_tokens && of.prefix_hits_tokens / of.prefix_queries_tokens;
    return table([
      ["replica", (row) => [text(row.replica), " ", el("span", { class: "mono muted" }, clean(row.epoch, 8))]],
      ["state", state],
      ["standing", (row) => standings(row.replica, routing), "", "as the routers see it"],
      ["KV used", (row) => this.used(row)],
      ["batch", load("running"), "num", "sequences in the engine's batch"],
      ["waiting", load("waiting"), "num"],
      ["prefix hits", (row) => percent(hits(row) || null), "num", "of prompt tokens, since this epoch began"],
      ["TTFT p50", recent("ttft_ms", 0.5), "num", "of recent traced requests"],
      ["p95", recent("ttft_ms", 0.95), "num"],
      ["TPOT p50", recent("tpot_ms", 0.5), "num", "of recent traced requests"],
      ["p95", recent("tpot_ms", 0.95), "num"],
      ["prefill ms/tok", measured("prefill_ms_per_token", number), "num"],
      ["decode step", measured("decode_step_ms", ms), "num"],
      ["backlog", load("prefill_backlog_tokens"), "num", "prompt tokens accepted, not computed"],
      ["preempted", load("preemptions"), "num"],
      ["restarts", (row) => number(row.restarts), "num"],
      ["shards", shards, "num"],
    ], replicas, { under: (row) => row.last_error && el("span", { class: "bad" }, text(row.last_error, 400)) });
  }

  used(row) {
    if (!row.load) return "–";
    const share = row.load.kv_usage, seen = this.watch.usage.get(keyOf(row)) ?? [];
    return [percent(share), meter(share, true), spark(seen)];
  }

  routers(known, routing) {
    const address = new Map(known.map((one) => [one.name, one.address]));
    const queues = (pick) => ([, state]) => number(sum(state.queues ?? [], pick));
    const oldest = ([, state]) => ms(1000 * Math.max(0, ...(state.queues ?? []).map((queue) => queue.oldest_wait_s)));
    const view = (one) => chip(`${clean(one.replica, 40)}: ${number(one.blocks)} · ${number(one.leases)} · ` +
      `${ms(one.ttft_error_ms)} · ${number(Math.round(one.cached_error_tokens))} tok`, one.degraded ? "warn" : "",
      clean(one.degraded || one.standing, 300));
    return table([
      ["router", ([name]) => [text(name), " ", el("span", { class: "mono muted" }, clean(address.get(name), 60))]],
      ["policy", ([, state]) => text(state.policy, 40)], ["in flight", ([, state]) => number(state.in_flight), "num"],
      ["leases", ([, state]) => number(state.leases), "num"], ["queued", queues((queue) => queue.length), "num"],
      ["oldest", oldest, "num"], ["refused", queues((queue) => queue.refused), "num", "since the router's start"],
      ["blocks indexed · leases · TTFT error · hit error, by replica",
        ([, state]) => (state.replicas ?? []).slice(0, 64).flatMap((one) => [view(one), " "])],
    ], routing, { under: ([, state]) => state.error && el("span", { class: "bad" }, text(state.error, 300)) });
  }
}

function state(row) {
  const word = clean(row.state, 20).toLowerCase();
  return el("span", { class: `dot ${TONES[word] ?? "warn"}` }, word, muted(" " + duration(row.state_for_s)));
}

/** What the routers think of a replica, each opinion once. */
function standings(replica, routing) {
  const views = routing.flatMap(([name, router]) => (router.replicas ?? []).map((view) => ({ name, ...view })));
  const mine = views.filter((view) => view.replica === replica);
  const words = [...new Set(mine.map((view) => (view.degraded ? "degraded" : clean(view.standing, 20))))];
  const all = mine.map((view) => `${view.name}: ${view.standing} ${view.degraded}`).join("; ");
  return words.length ? words.map((word) => chip(word, TONES[word] ?? "warn", clean(all, 500))) : "–";
}

function shards({ shards: all = [] }) {
  const dead = all.filter((shard) => shard.pid && !shard.alive).length;
  const where = all.map((one) => `${one.rank}: ${one.node} pid ${one.pid} ${one.collective}`).join("; ");
  const missing = dead ? el("span", { class: "bad" }, ` ${dead} dead`) : "";
  return el("span", { title: clean(where, 500) }, number(all.length), missing);
}
