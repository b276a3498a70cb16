// The list of episodes: filtered, sorted, and drawn only where it is on the screen.

const ROW = 30;
/** @type {{run: number, names: string[]}} the list that j, k and the arrows step through */
let browsed = { run: 0, names: [] };

/** @type {[string, string][]} */
const ORDERS = [
  ["newest", "newest"],
  ["worst", "lowest reward"],
  ["best", "highest reward"],
  ["advantage", "largest advantage"],
  ["longest", "most tokens"],
  ["slowest", "slowest"],
];

/** Return the places of matching episodes, in order. @param {Run} run @param {Place} place @returns {number[]} */
function matching(run, place) {
  const args = place.args;
  const step = args.get("step") ? Number(args.get("step")) : null;
  const [kind, source, outcome] = [args.get("kind"), args.get("source"), args.get("outcome")];
  const words = (args.get("find") ?? "").toLowerCase();
  /** Codes of texts that hold the words. */
  const holds = (/** @type {string} */ column) =>
    new Set(words ? run.texts[column].flatMap((/** @type {string} */ text, /** @type {number} */ at) => (text.toLowerCase().includes(words) ? [at] : [])) : []);
  const searched = ["task", "asked", "answer", "said", "problem"].map((column) => /** @type {const} */ ([run.columns[column], holds(column)]));
  /** @type {number[]} */
  const found = [];
  for (let at = run.size - 1; at >= 0; at--) {
    if (step !== null && run.steps[at] !== step) continue;
    if (kind && run.kinds[at] !== kind) continue;
    if (source && run.text("source", at) !== source) continue;
    if (outcome && run.text("outcome", at) !== outcome) continue;
    if (words && !searched.some(([codes, those]) => those.has(codes[at]))) continue;
    found.push(at);
  }
  const by = (/** @type {string} */ column, /** @type {number} */ sign, /** @type {(value: number) => number} */ of = (value) => value) => {
    const values = run.columns[column];
    const known = found.filter((at) => values[at] !== null);
    return known.sort((a, b) => sign * (of(values[a]) - of(values[b])) || b - a);
  };
  switch (args.get("order")) {
    case "worst":
      return by("reward", 1);
    case "best":
      return by("reward", -1);
    case "advantage":
      return by("advantage", -1, Math.abs);
    case "longest":
      return by("tokens", -1);
    case "slowest":
      return by("seconds", -1);
    default: {
      // the newest step first, but its episodes in their order
      const start = (/** @type {number} */ at) => at - run.rows[at];
      return found.sort((a, b) => start(b) - start(a) || a - b);
    }
  }
}

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
function episodesView(main, place, store) {
  const run = store.runs[place.run];
  const set = (/** @type {string} */ name) => (/** @type {string} */ value) => go("episodes", place.run, "", { ...Object.fromEntries(place.args), [name]: value });
  const options = (/** @type {string[]} */ names) => [["", "all"], ...names.map((name) => [name, name])];
  const steps = [...new Set(run.raw.episodes.files.map((/** @type {any} */ file) => String(file[0])))].reverse();
  const filters = [
    ["step", options(steps)],
    ["kind", options(["trained", "evaluated", "failed"])],
    ["source", options([...run.texts.source].sort())],
    ["outcome", options([...run.texts.outcome].sort())],
    ["order", ORDERS],
  ].map(([name, given]) =>
    choice(/** @type {string} */ (name), /** @type {any} */ (given), place.args.get(/** @type {string} */ (name)) ?? /** @type {any} */ (given)[0][0], set(/** @type {string} */ (name))),
  );
  const places = matching(run, place);
  browsed = { run: place.run, names: places.slice(0, 10_000).map((at) => run.name(at)) };
  main.append(
    el("div", { class: "filters" }, runChoice(place, store), ...filters),
    finder("episodes", place, "find in tasks, answers and problems"),
    el("p", { class: "dim" }, `${places.length.toLocaleString("en")} of ${run.size.toLocaleString("en")} episodes`, store.live ? "" : keptNote(run)),
  );
  if (!places.length) {
    main.append(nothing(run.size ? "No episode matches." : "The run keeps no episodes, or has not finished a step."));
    return {};
  }
  const head = el("div", { class: "row head" }, ...cellsOf(["episode", "source", "task", "outcome", "reward", "adv.", "turns", "tokens", "time", "answer"]));
  const inner = el("div", { class: "inner", style: { height: `${places.length * ROW}px` } });
  const list = el("div", { class: "list", tabindex: 0 }, inner);
  let chosen = Math.max(0, places.indexOf(run.place(place.args.get("at") ?? "")));
  const paint = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const last = Math.min(places.length, first + Math.ceil(list.clientHeight / ROW) + 10);
    inner.replaceChildren(...Array.from({ length: last - first }, (_, at) => rowOf(first + at)));
  };
  const rowOf = (/** @type {number} */ at) => {
    const of = places[at];
    const [reward, advantage] = [run.number("reward", of), run.number("advantage", of)];
    const failed = !["completed", "truncated"].includes(run.text("outcome", of));
    const row = el(
      "a",
      { class: `row${at === chosen ? " chosen" : ""}${store.has(place.run, run.name(of)) ? "" : " absent"}`, href: link("episode", place.run, run.name(of)), style: { top: `${at * ROW}px` } },
      ...cellsOf([
        run.name(of),
        run.text("source", of),
        run.question(of),
        el("span", { class: failed ? "bad" : "" }, run.text("outcome", of)),
        el("span", { class: levelOf(run, reward) }, num(reward)),
        el("span", { class: signOf(advantage) }, num(advantage)),
        num(run.number("turn_count", of)),
        num(run.number("tokens", of)),
        duration(run.number("seconds", of)),
        run.text("problem", of) || run.text("answer", of) || run.text("said", of),
      ]),
    );
    return row;
  };
  const move = (/** @type {number} */ by) => {
    chosen = clamp(chosen + by, 0, places.length - 1);
    const top = chosen * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    paint();
  };
  list.addEventListener("scroll", paint);
  new ResizeObserver(paint).observe(list);
  main.append(el("div", { class: "listed" }, head, list));
  move(0);
  return {
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => go("episode", place.run, run.name(places[chosen])),
    ArrowLeft: () => stepBy(-1),
    ArrowRight: () => stepBy(1),
  };
  function stepBy(/** @type {number} */ by) {
    const at = steps.indexOf(place.args.get("step") ?? "");
    set("step")(/** @type {string} */ (steps[clamp(at < 0 ? 0 : at - by, 0, steps.length - 1)]));
  }
}

/** @param {any[]} texts */
const cellsOf = (texts) => texts.map((text, at) => el("span", { class: `c${at}` }, text));

/** @param {number | null} value */
const signOf = (value) => (value === null || value === 0 ? "" : value > 0 ? "good" : "bad");

/** Class of a reward: good above the middle of the run's rewards, bad below 0. @param {Run} run @param {number | null} reward */
function levelOf(run, reward) {
  const [low, high] = rangeOf(run);
  return reward === null ? "" : reward < 0 ? "bad" : reward > (low + high) / 2 || (reward === high && reward > 0) ? "good" : "";
}

/** @param {Run} run */
function keptNote(run) {
  const { kept, total } = run.raw.whole;
  return kept < total ? `; the file holds ${kept} of them whole, the others are grey: of each step the worst, the best, a random and failed ones first` : "";
}
