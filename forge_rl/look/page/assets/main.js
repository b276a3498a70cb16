// Which view is shown, the keys, the theme, and news of a live run.

/** @typedef {{view: string, run: number, name: string, args: URLSearchParams}} Place what the address names after # */

const VIEWS = /** @type {[string, string, (main: HTMLElement, place: Place, store: Store) => any][]} */ ([
  ["curves", "Curves", curvesView],
  ["episodes", "Episodes", episodesView],
  ["episode", "Episode", episodeView],
  ["groups", "Groups", groupsView],
  ["timeline", "Timeline", timelineView],
  ["tasks", "Data", tasksView],
  ["faults", "Faults", faultsView],
  ["compare", "Compare", compareView],
  ["settings", "Settings", settingsView],
]);
const KEYS = [
  ["1 … 9", "views"],
  ["/", "find"],
  ["j k", "next and previous row or turn"],
  ["Enter", "open the row"],
  ["← →", "previous and next episode, token or step"],
  ["t", "conversation or tokens"],
  ["c", "next colour of tokens"],
  ["Esc", "back"],
  ["?", "these keys"],
];
const REFRESH_MS = 4000;
const store = new Store();
const app = /** @type {HTMLElement} */ (document.getElementById("app"));
/** @type {Record<string, () => void>} */
let keys = {};
let drawing = 0;

/** @param {string} view @param {number} run @param {string} [name] @param {Record<string, string>} [args] */
function link(view, run, name = "", args = {}) {
  const given = new URLSearchParams(Object.entries(args).filter(([, value]) => value));
  return `#${view}/${run}/${encodeURIComponent(name)}${given.size ? `?${given}` : ""}`;
}

/** @param {string} view @param {number} run @param {string} [name] @param {Record<string, string>} [args] @param {boolean} [replace] */
function go(view, run, name = "", args = {}, replace = false) {
  const to = link(view, run, name, args);
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  show();
}

/** @returns {Place} */
function here() {
  const [path, query] = location.hash.slice(1).split("?");
  const [view, run, name] = path.split("/");
  let decoded = "";
  try {
    decoded = decodeURIComponent(name ?? "");
  } catch {
    // a broken address names no episode
  }
  return { view: VIEWS.some(([known]) => known === view) ? view : "curves", run: store.runs[Number(run)] ? Number(run) : 0, name: decoded, args: new URLSearchParams(query ?? "") };
}

/** @param {string} text */
const nothing = (text) => el("p", { class: "nothing" }, text);

/** @param {Place} place @param {Store} of */
function runChoice(place, of) {
  if (of.runs.length < 2) return "";
  return choice("run", of.runs.map((run, at) => [String(at), `${"AB"[at]} ${run.raw.name}`]), String(place.run), (value) => go(place.view, Number(value)));
}

/** A field that filters the view, kept in the address. @param {string} view @param {Place} place @param {string} hint */
function finder(view, place, hint) {
  const field = el("input", { class: "find", type: "search", placeholder: `${hint}  ( / )`, "aria-label": hint, value: place.args.get("find") ?? "" });
  let waiting = 0;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      go(view, place.run, "", { ...Object.fromEntries(place.args), find: field.value }, true);
      const again = /** @type {HTMLInputElement | null} */ (document.querySelector(".find"));
      again?.focus();
      again?.setSelectionRange(field.value.length, field.value.length);
    }, 250);
  });
  return field;
}

async function show() {
  const place = here();
  const mine = ++drawing;
  forgetCharts();
  keys = {};
  const main = el("main", { class: place.view });
  const nav = el("nav", null, ...VIEWS.filter(([view]) => view !== "compare" || store.runs.length > 1).map(([view, title]) => el("a", { class: view === place.view ? "on" : "", href: link(view, place.run) }, title)));
  const run = store.runs[place.run].raw;
  document.title = visible(`${run.name} – forge_rl`);
  const about = [
    `step ${run.step}${run.steps === null ? "" : ` of ${run.steps}`}`,
    run.seconds === null ? "" : duration(run.seconds),
    run.score_after === null ? "" : `score ${run.score_before === null ? "" : `${num(run.score_before)} → `}${num(run.score_after)}`,
    run.best_step === null ? "" : `best at step ${run.best_step}`,
    run.model,
  ].filter(Boolean);
  const theme = el("button", { class: "theme", title: "light or dark", "aria-label": "light or dark", on: { click: switchTheme } }, "◐");
  const header = el("header", null, el("div", { class: "title" }, el("h1", null, run.name), el("span", { class: `state ${run.state}` }, run.state), el("span", { class: "about" }, about.join(" · ")), theme), nav);
  const problems = run.problems.map((/** @type {string} */ text) => el("p", { class: "problem" }, text));
  app.replaceChildren(header, ...problems, main);
  const tab = nav.querySelector(".on");
  if (tab) nav.scrollLeft = tab.offsetLeft - nav.clientWidth / 2;
  /** @type {any} */
  let found;
  try {
    found = await /** @type {any} */ (VIEWS.find(([view]) => view === place.view))[2](main, place, store);
  } catch (error) {
    console.error(error);
    main.append(el("p", { class: "problem" }, `This view failed: ${error}`));
  }
  if (mine === drawing) {
    keys = found ?? {};
    // Charts are drawn in the first frame, once they are known to be on the screen.
    requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.opened ??= String(Math.round(performance.now())))));
  }
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  show();
}

function help() {
  const known = document.querySelector("dialog");
  if (known) return known.remove();
  const dialog = el("dialog", { open: "" }, el("h2", null, "Keys"), el("dl", { class: "facts" }, ...KEYS.flatMap(([key, text]) => [el("dt", null, key), el("dd", null, text)])));
  app.append(dialog);
}

addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) {
    if (event.key === "Escape" || event.key === "Enter") target.blur();
    return;
  }
  const view = VIEWS[Number(event.key) - 1];
  if (event.key === "/") /** @type {HTMLElement | null} */ (document.querySelector(".find"))?.focus();
  else if (event.key === "?") help();
  else if (view) go(view[0], here().run);
  else if (keys[event.key] && !(event.key === "Enter" && target.tagName === "A")) keys[event.key]();
  else return;
  event.preventDefault();
});
addEventListener("hashchange", show);
addEventListener("popstate", show);

/** Say that the server does not answer, above the page. @param {string} text */
function say(text) {
  document.querySelector(".lost")?.remove();
  if (text) app.prepend(el("p", { class: "problem lost" }, text));
}

/** Draw again if there is news, unless somebody reads an episode. */
async function watch() {
  try {
    if (document.visibilityState === "visible" && (await store.refresh()) && !["episode", "compare"].includes(here().view)) {
      const [top, list] = [scrollY, document.querySelector(".list")?.scrollTop ?? 0];
      if (document.activeElement?.tagName !== "INPUT") await show();
      scrollTo(0, top);
      document.querySelector(".list")?.scrollTo(0, list);
    }
    say("");
  } catch (error) {
    say(`The dashboard does not answer: ${error instanceof Error ? error.message : error}`);
  }
  setTimeout(watch, REFRESH_MS);
}

async function open() {
  if (!store.live) {
    store.read();
    return show();
  }
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem("key", given);
    history.replaceState(null, "", location.pathname);
  }
  store.key = sessionStorage.getItem("key") ?? "";
  try {
    await store.refresh();
  } catch (error) {
    return say(`The dashboard does not answer: ${error instanceof Error ? error.message : error}. Open the address that it printed.`);
  }
  await show();
  setTimeout(watch, REFRESH_MS);
}
open();
