// Two runs next to each other: what differs, how they score, and their episodes of one task.

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
async function compareView(main, place, store) {
  const [first, second] = store.runs;
  if (!second) {
    main.append(nothing("Name a second run to compare with:"), el("pre", null, "forge-rl report RUN --compare OTHER\nforge-rl dashboard RUN --compare OTHER"));
    return;
  }
  const { lines, differences, scores, step } = store.comparison;
  main.append(el("p", { class: "dim" }, `A is ${first.raw.name}, B is ${second.raw.name}`));
  main.append(el("p", { class: "verdict" }, lines[0]), ...lines.slice(1).map((/** @type {string} */ line) => el("p", null, line)));
  if (differences.length) main.append(el("h2", null, "Differences"), table([["name"], ["A", "long"], ["B", "long"]], differences));
  if (scores.length) main.append(el("h2", null, `Evaluation of step ${step}, with 95% intervals`), table([["set and source"], ["A", "right"], ["B", "right"], ["B − A, on the same tasks", "right"]], scores));
  const names = ["reward/mean", "loss", "entropy", "tokens/completion_mean", "logprob_gap", "grad_norm"];
  const charts = names.flatMap((name) => {
    const series = store.runs.flatMap((run, at) => (run.raw.metrics.columns[name] ? [{ label: "AB"[at], steps: run.raw.metrics.steps, values: run.raw.metrics.columns[name], dashed: at === 1 }] : []));
    return series.length ? [chart(name, series)] : [];
  });
  if (charts.length) main.append(el("h2", null, "Curves"), el("div", { class: "charts" }, ...charts));
  const kind = ["evaluated", "trained"].find((each) => first.stepsOf(each).length && second.stepsOf(each).length);
  if (!kind) return;
  const tasks = store.runs.map((run) => byTask(run, kind));
  const both = [...tasks[0].keys()].filter((task) => tasks[1].has(task));
  const differ = both
    .map((task) => {
      const [a, b] = tasks.map((each) => /** @type {number[]} */ (each.get(task)));
      const [of, other] = [mean(a.map((at) => first.number("reward", at) ?? 0)), mean(b.map((at) => second.number("reward", at) ?? 0))];
      return { task, a, b, of, other };
    })
    .sort((x, y) => Math.abs(y.other - y.of) - Math.abs(x.other - x.of));
  main.append(el("h2", null, `Tasks that were ${kind} in both, the largest difference first`));
  if (!differ.length) {
    main.append(nothing("None."));
    return;
  }
  const wanted = differ.find((each) => each.task === place.args.get("task")) ?? differ[0];
  const rows = differ.slice(0, 50).map((each) => [
    el("a", { class: each === wanted ? "chosen" : "", href: link("compare", 0, "", { task: each.task }) }, store.runs[0].question(each.a[0])),
    num(each.of),
    num(each.other),
    el("span", { class: signOf(each.other - each.of) }, num(each.other - each.of)),
  ]);
  main.append(table([["task", "long"], ["A", "right"], ["B", "right"], ["B − A", "right"]], rows, "short"));
  const sides = await Promise.all(
    [wanted.a, wanted.b].map(async (places, which) => {
      const run = store.runs[which];
      const at = places.findLast((each) => store.has(which, run.name(each)));
      const episode = at === undefined ? null : await store.episode(which, run.name(at));
      const side = el("div", { class: "side" });
      if (!episode) return (side.append(nothing(`${"AB"[which]}: the file does not hold this task's episodes whole.`)), side);
      side.append(el("h3", null, `${"AB"[which]} `, el("a", { href: link("episode", which, episode.name) }, episode.name)), el("p", null, "reward ", el("b", { class: levelOf(run, episode.reward) }, num(episode.reward))));
      side.append(conversationBody(episode).element);
      return side;
    }),
  );
  main.append(el("div", { class: "sides" }, ...sides));
}

/** Places of the last step's episodes by source and task. @param {Run} run @param {string} kind @returns {Map<string, number[]>} */
function byTask(run, kind) {
  /** @type {Map<string, number[]>} */
  const found = new Map();
  const steps = run.stepsOf(kind);
  for (const step of kind === "evaluated" ? steps.slice(-1) : steps) {
    for (const at of run.placesOf(step, kind)) {
      if (run.number("reward", at) === null) continue;
      const key = `${run.text("source", at)} ${run.text("task", at)}`;
      (found.get(key) ?? found.set(key, []).get(key))?.push(at);
    }
  }
  return found;
}
