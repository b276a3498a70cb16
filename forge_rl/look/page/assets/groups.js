// The groups of a step: the rewards of their episodes, and which are uniform, so that nothing is learned from them.

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
function groupsView(main, place, store) {
  const run = store.runs[place.run];
  const kind = place.args.get("kind") === "evaluated" ? "evaluated" : "trained";
  const steps = run.stepsOf(kind);
  const step = place.args.get("step") ? Number(place.args.get("step")) : steps.at(-1);
  const set = (/** @type {Record<string, string>} */ changes) => go("groups", place.run, "", { ...Object.fromEntries(place.args), ...changes });
  const move = (/** @type {number} */ by) => set({ step: String(steps[clamp(steps.indexOf(step ?? 0) + by, 0, steps.length - 1)]) });
  main.append(
    el(
      "div",
      { class: "filters" },
      runChoice(place, store),
      choice("step", [...steps].reverse().map((each) => [String(each), String(each)]), String(step), (value) => set({ step: value })),
      choice("kind", [["trained", "trained"], ["evaluated", "evaluated"]], kind, (value) => set({ kind: value, step: "" })),
      choice("show", [["", "all"], ["uniform", "uniform"], ["mixed", "not uniform"]], place.args.get("show") ?? "", (value) => set({ show: value })),
    ),
  );
  if (step === undefined || !steps.length) {
    main.append(nothing("No step of this kind has episodes."));
    return {};
  }
  const uniform = (/** @type {number[]} */ group) => new Set(group.map((at) => run.number("reward", at))).size === 1;
  const groups = run.groupsOf(step, kind);
  const same = groups.filter((group) => group.length > 1 && uniform(group));
  const several = groups.some((group) => group.length > 1);
  main.append(
    el("p", { class: same.length === groups.length && several ? "bad" : "dim" }, several ? `${same.length} of ${groups.length} groups are uniform: equal rewards give no group-relative advantage` : `${groups.length} tasks, one episode each`),
  );
  const shown = groups.filter((group) => place.args.get("show") !== (uniform(group) ? "mixed" : "uniform"));
  const rows = shown.slice(0, 2000).map((group) => {
    const rewards = group.flatMap((at) => run.number("reward", at) ?? []);
    return [
      run.text("source", group[0]),
      el("a", { href: link("episodes", place.run, "", { find: run.text("task", group[0]) }) }, run.question(group[0])),
      rewards.length ? num(mean(rewards)) : "",
      uniform(group) && group.length > 1 ? "uniform" : "",
      el("span", { class: "chips" }, ...group.slice(0, 128).map((at) => rewardChip(run, place.run, at, false))),
    ];
  });
  main.append(table([["source"], ["task", "long"], ["mean", "right"], [""], ["rewards"]], rows));
  return { ArrowLeft: () => move(-1), ArrowRight: () => move(1) };
}
