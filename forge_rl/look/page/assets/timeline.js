// Where the time went: phases by step and on the clock, and the episodes of a step with its stragglers.

const PHASES = ["rollout", "train", "publish", "evaluate", "checkpoint", "recover"];
const BETWEEN = "between phases";
/** @param {string} name */
const phaseColour = (name) => (name === BETWEEN ? "#8a929c" : PALETTE[PHASES.includes(name) ? PHASES.indexOf(name) : 6 + (name.length % 4)]);

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
function timelineView(main, place, store) {
  const run = store.runs[place.run];
  const { columns: all, steps: every } = run.raw.metrics;
  /** Places of the steps that were timed; an evaluation before the first step is not. */
  const timed = every.flatMap((/** @type {number} */ _, /** @type {number} */ at) => ((all["seconds/step"]?.[at] ?? null) === null ? [] : [at]));
  const steps = timed.map((/** @type {number} */ at) => every[at]);
  const columns = Object.fromEntries(Object.entries(all).map(([name, values]) => [name, timed.map((/** @type {number} */ at) => /** @type {any} */ (values)[at])]));
  const names = PHASES.filter((name) => columns[`seconds/${name}`]);
  /** @type {[string, (number | null)[]][]} */
  const parts = names.map((name) => [name, columns[`seconds/${name}`]]);
  const total = columns["seconds/step"];
  if (total) parts.push([BETWEEN, steps.map((/** @type {number} */ _, /** @type {number} */ at) => Math.max(0, (total[at] ?? 0) - parts.reduce((sum, [, values]) => sum + (values[at] ?? 0), 0)))]);
  const kinds = ["trained", "evaluated", "failed"];
  const recorded = [...new Set(kinds.flatMap((kind) => run.stepsOf(kind)))].sort((a, b) => a - b);
  const step = place.args.get("step") ? Number(place.args.get("step")) : recorded.at(-1);
  const set = (/** @type {number} */ value) => go("timeline", place.run, "", { step: String(value) });
  main.append(el("div", { class: "filters" }, runChoice(place, store)));
  main.append(el("h2", null, "Seconds of each step, by phase"));
  main.append(steps.length && parts.length ? bars(steps, parts, phaseColour, set, duration) : nothing("No step has ended yet."));
  if (run.raw.trace.phases.length) main.append(el("h2", null, "Phases and faults on the clock"), strip(run.raw.trace));
  main.append(el("h2", null, "Episodes of a step, the slowest first"));
  if (step === undefined) {
    main.append(nothing("The run keeps no episodes, or has not finished a step."));
    return {};
  }
  const move = (/** @type {number} */ by) => set(recorded[clamp(recorded.indexOf(step) + by, 0, recorded.length - 1)]);
  main.append(el("div", { class: "filters" }, choice("step", [...recorded].reverse().map((each) => [String(each), String(each)]), String(step), (value) => set(Number(value)))));
  const places = kinds.flatMap((kind) => run.placesOf(step, kind)).filter((at) => run.number("seconds", at) !== null);
  const seconds = places.map((at) => /** @type {number} */ (run.number("seconds", at))).sort((a, b) => a - b);
  if (!seconds.length) {
    main.append(nothing("No episode of this step has a time."));
    return { ArrowLeft: () => move(-1), ArrowRight: () => move(1) };
  }
  const [median, most] = [quantile(seconds, 0.5), /** @type {number} */ (seconds.at(-1))];
  const limit = Math.max(2 * median, 0.05);
  const beginOf = (/** @type {number} */ at) => run.number("since", at) ?? 0;
  const span = places.reduce((last, at) => Math.max(last, beginOf(at) + (run.number("seconds", at) ?? 0)), 1e-9);
  const slow = seconds.filter((value) => value > limit).length;
  main.append(el("p", { class: "dim" }, `median ${duration(median)}, 90th percentile ${duration(quantile(seconds, 0.9))}, longest ${duration(most)}; ${slow} stragglers took more than twice the median; a bar begins where its episode did`));
  const slowest = places.sort((a, b) => (run.number("seconds", b) ?? 0) - (run.number("seconds", a) ?? 0)).slice(0, 60);
  browsed = { run: place.run, names: slowest.map((at) => run.name(at)) };
  for (const at of slowest) {
    const took = run.number("seconds", at) ?? 0;
    main.append(
      el(
        "a",
        { class: "took", href: link("episode", place.run, run.name(at)) },
        el("span", { class: "name" }, run.name(at)),
        el("span", { class: "track" }, el("span", { class: `length${took > limit ? " slow" : ""}`, style: { "margin-left": `${(100 * beginOf(at)) / span}%`, width: `${Math.max(0.3, (100 * took) / span)}%` } })),
        el("span", { class: "right" }, duration(took)),
        el("span", { class: "right wide" }, `${counted(run.number("turn_count", at), "turn")}, ${counted(run.number("tokens", at), "token")}`),
      ),
    );
  }
  return { ArrowLeft: () => move(-1), ArrowRight: () => move(1) };
}

/** Phases on the clock: drag to move, buttons to zoom. @param {any} trace */
function strip(trace) {
  const canvas = el("canvas", { class: "strip", role: "img", "aria-label": "phases on the clock" });
  const said = el("div", { class: "said" }, "");
  const begin = Math.min(...trace.phases.slice(0, 1).map((/** @type {any} */ each) => each[1]), ...trace.marks.slice(0, 1).map((/** @type {any} */ each) => each[2]));
  const last = trace.phases.at(-1);
  const end = Math.max(last[1] + last[2], begin + 1);
  let [low, high] = [begin, end];
  said.textContent = `${duration(end - begin)} in all; point at a phase, drag to move`;
  const paint = () => {
    const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio || 1];
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const x = (/** @type {number} */ time) => ((time - low) / (high - low)) * width;
    for (const [name, since, took] of trace.phases) {
      if (since + took < low || since > high) continue;
      pen.fillStyle = phaseColour(name);
      pen.fillRect(x(since), 18, Math.max(0.5, x(since + took) - x(since)), height - 18);
    }
    for (const [, name, since, took] of trace.marks) {
      if (since + took < low || since > high) continue;
      pen.fillStyle = name === "recovery" ? "#dd773388" : "#cc2233";
      pen.fillRect(x(since), name === "recovery" ? 9 : 0, Math.max(3, x(since + took) - x(since)), name === "recovery" ? 7 : 16);
    }
  };
  const zoom = (/** @type {number} */ by) => {
    const [middle, half] = [(low + high) / 2, Math.min(((high - low) / 2) * by, (end - begin) / 2)];
    const centre = clamp(middle, begin + half, end - half);
    [low, high] = [centre - half, centre + half];
    paint();
  };
  canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    if (event.buttons === 1) {
      const by = clamp((-event.movementX / canvas.clientWidth) * (high - low), begin - low, end - high);
      [low, high] = [low + by, high + by];
      paint();
    }
    const time = low + (event.offsetX / canvas.clientWidth) * (high - low);
    const near = 4 * ((high - low) / canvas.clientWidth);
    const mark = event.offsetY < 18 && trace.marks.find((/** @type {any} */ each) => time >= each[2] - near && time <= each[2] + each[3] + near);
    const phase = trace.phases.findLast((/** @type {any} */ each) => time >= each[1] && time <= each[1] + each[2]);
    said.textContent = visible(mark ? `${mark[0]} ${mark[1]} at ${duration(mark[2])} ${mark[4]}` : phase ? `${phase[0]} at ${duration(phase[1])}, for ${duration(phase[2])}` : `${duration(time)}: between phases`);
  });
  new ResizeObserver(paint).observe(canvas);
  const names = [...new Set(trace.phases.map((/** @type {any} */ each) => each[0]))];
  const legend = names.slice(0, 10).map((name) => el("span", { class: "item" }, el("span", { class: "key", style: { "--key": phaseColour(/** @type {string} */ (name)) } }, name)));
  const buttons = [el("button", { "aria-label": "zoom in", on: { click: () => zoom(0.5) } }, "+"), el("button", { "aria-label": "zoom out", on: { click: () => zoom(2) } }, "−")];
  return el("div", { class: "barred" }, canvas, el("div", { class: "legend" }, ...buttons, ...legend), said);
}
