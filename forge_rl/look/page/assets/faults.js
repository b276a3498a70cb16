// Replicas and their faults, the run's events, and its settings.

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
function faultsView(main, place, store) {
  const run = store.runs[place.run];
  const { steps, columns } = run.raw.metrics;
  const { faults, events, trace } = run.raw;
  main.append(el("div", { class: "filters" }, runChoice(place, store)));
  const busy = Object.keys(columns).filter((name) => name.startsWith("busy/"));
  if (busy.length) {
    const series = busy.slice(0, 10).map((name) => ({ label: name.slice(5), steps, values: columns[name] }));
    main.append(el("h2", null, "Replicas"), el("div", { class: "charts" }, chart("share of each step's time that a device was busy", series, busy.length > 10 ? `${busy.length - 10} more are not drawn` : "")));
  }
  main.append(el("h2", null, "Faults"));
  /** @type {any[][]} */
  const rows = faults.length
    ? faults.map((/** @type {any} */ fault) => [duration(fault.at_s), fault.name, fault.phase, fault.cause, fault.fatal ? el("span", { class: "bad" }, "fatal") : fault.recovered_s === null ? el("span", { class: "bad" }, "not recovered") : `recovered after ${duration(fault.recovered_s)}`])
    : trace.marks.map((/** @type {any} */ [lane, name, since, took, cause]) => [duration(since), lane, name, cause, took ? duration(took) : ""]);
  main.append(rows.length ? table([["at", "right"], ["replica"], ["phase"], ["cause", "long"], ["outcome"]], rows) : nothing("None."));
  const level = place.args.get("level") ?? "";
  const words = (place.args.get("find") ?? "").toLowerCase();
  const shown = events.filter((/** @type {any} */ [, of, text]) => (!level || of === level) && text.toLowerCase().includes(words)).reverse();
  main.append(
    el("h2", null, "Events"),
    el("div", { class: "filters" }, choice("level", [["", "all"], ["warning", "warnings"], ["fault", "faults"], ["info", "info"]], level, (value) => go("faults", place.run, "", { ...Object.fromEntries(place.args), level: value }))),
    finder("faults", place, "find in events"),
  );
  const lines = shown.slice(0, 500).map((/** @type {any} */ [time, of, text]) =>
    el("div", { class: `event ${["warning", "fault"].includes(of) ? of : "info"}` }, el("time", null, time === null ? "" : new Date(1000 * time).toISOString().slice(0, 19).replace("T", " ")), el("b", null, of), eventText(text)),
  );
  main.append(lines.length ? el("div", { class: "events" }, ...lines) : nothing("None."));
}

/** The text of an event; of a long one, such as a stack trace, the first line, which opens the rest. @param {string} text */
function eventText(text) {
  const [first, ...rest] = text.split("\n");
  return rest.length > 2 ? folded(first, rest.join("\n")) : el("span", null, text);
}

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
function settingsView(main, place, store) {
  const words = (place.args.get("find") ?? "").toLowerCase();
  main.append(finder("settings", place, "find a setting"));
  const [first, second] = store.runs;
  for (const [title, key] of [["Settings", "settings"], ["Code and packages", "versions"]]) {
    const names = [...new Set([...Object.keys(first.raw[key]), ...Object.keys(second?.raw[key] ?? {})])].filter((name) => name.toLowerCase().includes(words));
    const rows = names.map((name) => [name, first.raw[key][name] ?? "", ...(second ? [second.raw[key][name] ?? ""] : [])]);
    main.append(el("h2", null, title), rows.length ? table([["name"], [second ? "A" : "value", "long"], ...(second ? [/** @type {[string, string]} */ (["B", "long"])] : [])], rows) : nothing("None."));
  }
}
