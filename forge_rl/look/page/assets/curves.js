// Curves of the metrics, by topic; those of a second run are dashed.

/** @type {[string, RegExp][]} */
const TOPICS = [
  ["Reward", /^reward\/|^reward_parts\/|^completed\/reward/],
  ["Evaluation", /^eval\/|^held_out/],
  ["Loss", /^loss(\/|$)/],
  ["Entropy", /^entropy/],
  ["Gap between engine and trainer", /^logprob_(gap|drift)|^kl|^ratio\//],
  ["Gradient and learning rate", /^grad_norm|^lr$|^updates/],
  ["Lengths", /^tokens\/(completion|prompt)|^episodes\/|^turns/],
  ["Groups and lag", /^groups\/|^completed\/|^discarded\/|^lag\//],
  ["Time", /^seconds\/|^transition\//],
  ["Tokens", /^tokens/],
  ["Devices and queues", /^busy|^queue\/|^rollouts\//],
  ["Mixture and data", /^mixture\/|^data\/|^curriculum\//],
  ["Outcomes", /^outcomes\//],
];

const MOST_SERIES = 10;

/** Metrics in one chart have one prefix, and sizes that can be compared. @param {string} name */
function chartOf(name) {
  const [first, ...rest] = name.split("/");
  if (/^loss\/(clipped|dual_clipped)/.test(name)) return "share of clipped tokens";
  if (/^(loss|logprob_gap|logprob_drift|entropy|grad_norm|kl)/.test(name)) return rest.length > 1 ? `${first}/${rest[0]}` : name;
  if (first === "reward" && /^(mean|min|max)$/.test(rest[0])) return "reward";
  if (name === "completed/reward_mean") return "reward";
  if (name === "reward/std") return name;
  if (first === "reward" || first === "tokens_per_s" || first === "mixture") return `${first} by ${first === "tokens_per_s" ? "phase" : "source"}`;
  if (/^(eval|ratio|kl_behaviour|data|groups|completed|discarded)$/.test(first)) return name;
  if (first === "tokens") return rest[0].startsWith("completion") ? "tokens of an episode" : name;
  return rest.length ? first : name;
}

/** Scores of sets, or of their sources, by step. @param {ReturnType<Run["scores"]>} all @param {boolean} bySource @param {boolean} dashed @returns {Series[]} */
function scoreSeries(all, bySource, dashed) {
  const scores = [...all].filter(([label]) => label.includes(" · ") === bySource);
  return scores.map(([label, steps], place) => {
    const points = [...steps].sort((a, b) => a[0] - b[0]);
    const values = points.map(([, [value]]) => value);
    const margins = points.map(([, [, error]]) => (Number.isFinite(error) ? 1.96 * error : 0));
    return {
      label: dashed ? `B ${label}` : label,
      dashed,
      colour: PALETTE[place % PALETTE.length],
      steps: points.map(([step]) => step),
      values,
      low: values.map((value, at) => value - margins[at]),
      high: values.map((value, at) => value + margins[at]),
    };
  });
}

/** What was wrong in the runs, what to change, and since when. @param {Run[]} runs */
function advisoriesOf(runs) {
  const [held, ended] = [el("div", { class: "advisories" }), el("details", null)];
  runs.forEach((run, at) => {
    for (const [text, since, end] of run.raw.advisories) {
      const when = end === null ? `since step ${since}` : `steps ${since} to ${end - 1}`;
      const line = el("p", { class: `advisory${end === null ? " held" : ""}` }, el("b", null, `${runs.length > 1 ? `${"AB"[at]} ` : ""}${when}`), text);
      (end === null ? held : ended).append(line);
    }
  });
  if (ended.childElementCount) held.append(ended);
  ended.prepend(el("summary", null, `${ended.childElementCount} advisories that no longer hold`));
  return held;
}

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
function curvesView(main, place, store) {
  const [first, second] = store.runs;
  const wanted = (place.args.get("find") ?? "").toLowerCase();
  const { columns } = first.raw.metrics;
  const scored = store.runs.map((run) => run.scores());
  /** Whether a metric is the score of a set or of its source, which has a chart with intervals. @param {string} name */
  const isScore = (name) => {
    const of = /^eval\/(.+)\/avg@\d+$/.exec(name)?.[1] ?? name;
    return scored.every((each) => each.has(of) || each.has(of.replace("/", " · ")));
  };
  /** @type {Map<string, Map<string, Series[]>>} */
  const topics = new Map([...TOPICS.map(([title]) => title), "Others"].map((title) => [title, new Map()]));
  const names = [...new Set([...Object.keys(columns), ...Object.keys(second?.raw.metrics.columns ?? {})])];
  for (const name of names) {
    if (!wanted && isScore(name)) continue;
    if (name.endsWith("_stderr") || (wanted && !name.toLowerCase().includes(wanted))) continue; // they are drawn as intervals
    const topic = TOPICS.find(([, pattern]) => pattern.test(name))?.[0] ?? "Others";
    const charts = /** @type {Map<string, Series[]>} */ (topics.get(topic));
    const title = chartOf(name);
    const series = charts.get(title) ?? [];
    const colour = PALETTE[series.filter((each) => !each.dashed).length % PALETTE.length];
    store.runs.forEach((run, at) => {
      const { steps, columns } = run.raw.metrics;
      const [values, errors] = [columns[name], columns[`${name}_stderr`]];
      if (!values) return;
      const edge = (/** @type {number} */ sign) => values.map((/** @type {number | null} */ value, /** @type {number} */ of) => (value === null ? null : value + sign * 1.96 * (errors[of] ?? 0)));
      series.push({ label: at ? `B ${name}` : name, steps, values, dashed: at > 0, colour, ...(errors ? { low: edge(-1), high: edge(1) } : {}) });
    });
    charts.set(title, series);
  }
  const evaluation = [...(topics.get("Evaluation") ?? [])];
  for (const bySource of wanted ? [] : [true, false]) {
    const scores = scored.flatMap((each, at) => scoreSeries(each, bySource, at > 0));
    if (scores.length) evaluation.unshift([`score${bySource ? " by source" : ""}, with 95% intervals`, scores]);
  }
  topics.set("Evaluation", new Map(evaluation));
  const found = [...topics].filter(([, charts]) => charts.size);
  main.append(finder("curves", place, "find a metric, such as entropy"));
  if (!found.length) main.append(nothing(wanted ? "No metric has this name." : "The run has not finished a step yet."));
  if (!wanted) main.append(advisoriesOf(store.runs));
  const grid = el("div", { class: "charts" });
  for (const [topic, charts] of found) {
    const main = (/** @type {string} */ title) => (title.toLowerCase() === topic.toLowerCase() || title.startsWith("score") ? 0 : 1);
    for (const [title, series] of [...charts].sort((a, b) => main(a[0]) - main(b[0]))) {
      const named = title.toLowerCase() === topic.toLowerCase() ? topic : `${topic}: ${title}`;
      grid.append(chart(named, series.slice(0, MOST_SERIES), series.length > MOST_SERIES ? `${series.length - MOST_SERIES} more are not drawn` : ""));
    }
  }
  main.append(grid);
}
