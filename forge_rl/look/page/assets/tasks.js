// Where the tasks come from: shares, epochs and rewards by source, and the hardest tasks.

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
function tasksView(main, place, store) {
  const run = store.runs[place.run];
  const { columns } = run.raw.metrics;
  const last = (/** @type {string} */ name) => columns[name]?.findLast((/** @type {any} */ value) => value !== null);
  /** @type {Map<string, {episodes: number, tasks: Set<number>, rewards: number[], tokens: number, failed: number, low: number, high: number}>} */
  const sources = new Map();
  /** @type {Map<number, {at: number, rewards: number[], solved: number}>} */
  const tasks = new Map();
  const kind = place.args.get("kind") === "evaluated" ? "evaluated" : "trained";
  for (let at = 0; at < run.size; at++) {
    if (run.kinds[at] !== kind && run.kinds[at] !== "failed") continue;
    const source = run.text("source", at);
    const found = sources.get(source) ?? { episodes: 0, tasks: new Set(), rewards: [], tokens: 0, failed: 0, low: Infinity, high: -Infinity };
    sources.set(source, found);
    const reward = run.number("reward", at);
    if (run.kinds[at] === "failed") found.failed++;
    if (reward === null || run.kinds[at] !== kind) continue;
    found.episodes++;
    found.tokens += run.number("tokens", at) ?? 0;
    found.tasks.add(run.columns.task[at]);
    found.rewards.push(reward);
    [found.low, found.high] = [Math.min(found.low, reward), Math.max(found.high, reward)];
    const task = tasks.get(run.columns.task[at]) ?? { at, rewards: [], solved: 0 };
    tasks.set(run.columns.task[at], task);
    task.rewards.push(reward);
    task.at = at;
  }
  for (const task of tasks.values()) {
    const { low, high } = /** @type {any} */ (sources.get(run.text("source", task.at)));
    task.solved = task.rewards.filter((reward) => reward > high - 0.05 * (high - low) - 1e-9 && (reward > low || reward > 0)).length;
  }
  const set = (/** @type {string} */ value) => go("tasks", place.run, "", { kind: value });
  main.append(el("div", { class: "filters" }, runChoice(place, store), choice("kind", [["trained", "trained"], ["evaluated", "evaluated"]], kind, set)));
  if (!sources.size) {
    main.append(nothing("The run keeps no episodes, or has not finished a step."));
    return;
  }
  const rows = [...sources].map(([name, found]) => [
    el("a", { href: link("episodes", place.run, "", { source: name }) }, name),
    num(last(`mixture/${name}`)),
    num(last(`data/${name}/epoch`)),
    found.episodes,
    found.tasks.size,
    found.rewards.length ? num(mean(found.rewards)) : "",
    found.episodes ? num(Math.round(found.tokens / found.episodes)) : "",
    found.failed || "",
    num(last(`data/${name}/bad_rows`)),
  ]);
  main.append(el("h2", null, "Sources"), table([["source"], ["share", "right"], ["epoch", "right"], ["episodes", "right"], ["tasks", "right"], ["reward", "right"], ["tokens", "right"], ["failed", "right"], ["bad rows", "right"]], rows));
  const curves = Object.keys(columns).filter((name) => /^(mixture|curriculum)\/|^data\/.*epoch$/.test(name));
  if (curves.length) {
    const series = (/** @type {RegExp} */ of) => curves.filter((name) => of.test(name)).slice(0, 10).map((name) => ({ label: name, steps: run.raw.metrics.steps, values: columns[name] }));
    const charts = [["mixture", /^mixture/], ["epochs", /epoch$/], ["curriculum", /^curriculum/]].map(([title, of]) => [title, series(/** @type {RegExp} */ (of))]);
    main.append(el("div", { class: "charts" }, ...charts.filter(([, each]) => each.length).map(([title, each]) => chart(/** @type {any} */ (title), /** @type {any} */ (each)))));
  }
  const hardest = [...tasks.values()].sort((a, b) => mean(a.rewards) - mean(b.rewards) || b.rewards.length - a.rewards.length);
  const never = hardest.filter((task) => task.solved === 0).length;
  main.append(el("h2", null, "Hardest tasks"), el("p", { class: "dim" }, `${never} of ${hardest.length} tasks were never solved: no reward within 5% of their source's highest`));
  const shown = hardest.slice(0, 200).map((task) => [
    run.text("source", task.at),
    el("a", { href: link("episodes", place.run, "", { find: run.text("task", task.at), kind }) }, run.question(task.at)),
    task.rewards.length,
    num(mean(task.rewards)),
    task.solved,
    el("a", { href: link("episode", place.run, run.name(task.at)) }, "last try"),
  ]);
  main.append(table([["source"], ["task", "long"], ["tries", "right"], ["mean reward", "right"], ["solved", "right"], [""]], shown));
}
