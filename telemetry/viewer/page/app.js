// The frame: which view is on show, the two-second round, themes, keys.

import { clock } from "./dom.js";
import { Fleet, Watch } from "./fleet.js";
import { Requests } from "./requests.js";
import { askOr, Refused, Silent } from "./server.js";
import { Trace } from "./trace.js";

const POLL_MS = 2000;
const THEMES = ["auto", "light", "dark"];
const byId = (id) => document.getElementById(id);
const watch = new Watch();
let view, list = "#/requests", paused = false, ticking = false, again = false, seen = 0;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?"), [name, id] = path.split("/");
  if (name === "trace" && id) view = new Trace(decoded(id), list);
  else view = name === "fleet" ? new Fleet(watch) : new Requests(new URLSearchParams(query));
  remember();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view.title) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = "Kvorum · " + view.title;
  byId("main").replaceChildren(view.node);
  scrollTo(0, 0);
  tick(true);
}

/** Where a trace leads back to. */
function remember() {
  if (view instanceof Requests) list = location.hash || "#/requests";
}

function decoded(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id; // a percent sign that encodes nothing
  }
}

/** The fleet for the header, then what is on show. Rounds do not overlap, and none runs while nobody looks. */
async function tick(now = false) {
  again ||= now && ticking;
  if (ticking || (!now && (paused || document.hidden))) return;
  ticking = true;
  try {
    watch.see(await askOr("api/fleet", [404, 503], null));
    await view.tick();
    seen = Date.now();
    pulse(paused ? "idle" : "", paused ? "paused" : "live");
  } catch (error) {
    report(error);
  } finally {
    ticking = false;
  }
  byId("cluster").textContent = watch.line;
  if (again) {
    again = false;
    tick(true);
  }
}

function report(error) {
  if (error instanceof Refused) pulse("late", error.message);
  else if (error instanceof Silent) {
    pulse("late", seen ? `no answer since ${clock(seen)}` : "the viewer does not answer");
  } else {
    pulse("late", "this page failed: see its console");
    console.error(error);
  }
}

function pulse(kind, words) {
  const sign = byId("pulse");
  sign.className = kind;
  if (sign.textContent !== words) sign.textContent = words;
}

function pause() {
  paused = !paused;
  pulse(paused ? "idle" : "", paused ? "paused" : "live");
  tick();
}

/** Without storage (private windows) a choice lasts as long as the page. */
function theme(name) {
  const chosen = THEMES.includes(name) ? name : "auto";
  document.documentElement.dataset.theme = chosen;
  byId("theme").textContent = "Theme: " + chosen;
  try {
    localStorage.setItem("theme", chosen);
  } catch { /* see above */ }
}
function storedTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  if (event.target.matches("input")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const actions = {
    ArrowDown: () => document.querySelector('a[data-trace], [role="treeitem"][tabindex="0"]')?.focus(),
    "/": () => (document.querySelector("main input") ?? document.querySelector("#jump input")).focus(),
    "?": () => byId("keys").showModal(),
    f: () => { location.hash = "#/fleet"; },
    g: () => { location.hash = list; },
    p: pause,
  };
  actions.j = actions.ArrowDown;
  if (view instanceof Trace) actions.Escape = actions.g;
  if (!Object.hasOwn(actions, event.key)) return;
  if (event.key === "ArrowDown" && !document.querySelector("a[data-trace], [role=treeitem]")) return; // scroll
  actions[event.key]();
  event.preventDefault();
}

if (new URLSearchParams(location.search).has("key")) {
  history.replaceState(null, "", location.pathname + location.hash); // a key is not for shoulders and bookmarks
}
byId("jump").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = new FormData(event.target).get("id").trim().toLowerCase();
  if (id) location.hash = "#/trace/" + encodeURIComponent(id);
});
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("theme").addEventListener("click", () => {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
document.addEventListener("keydown", key);
document.addEventListener("visibilitychange", () => tick());
addEventListener("hashchange", route);
addEventListener("filtered", remember);
addEventListener("failed", (event) => report(event.detail));
theme(storedTheme());
route();
setInterval(tick, POLL_MS);
