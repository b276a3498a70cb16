// Charts of values by step (uPlot), and coloured bars by step.

/** @typedef {{label: string, steps: number[], values: (number | null)[], dashed?: boolean, low?: (number | null)[], high?: (number | null)[], colour?: string}} Series */

/** Distances of marks on the axis of steps. */
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((of) => of * 10 ** power));
/** @type {{plot: any, host: HTMLElement}[]} */
let plots = [];
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const known = plots.find((each) => each.host === target);
    if (known && target.clientWidth > 0) known.plot.setSize({ width: target.clientWidth, height: 190 });
  }
});
const seen = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      draws.get(target)?.();
      draws.delete(target);
    }
  },
  { rootMargin: "400px" },
);
/** @type {Map<Element, () => void>} */
const draws = new Map();

function forgetCharts() {
  for (const { plot, host } of plots) {
    sizes.unobserve(host);
    plot.destroy();
  }
  plots = [];
  draws.clear();
}

/** A chart that is drawn when it comes near the screen. @param {string} title @param {Series[]} series @param {string} [note] */
function chart(title, series, note = "") {
  const host = el("div", { class: "plot" });
  const legend = el("div", { class: "legend" });
  series.forEach((each, at) => {
    each.colour = each.colour ?? PALETTE[at % PALETTE.length];
    const last = each.values.findLast((value) => value !== null);
    const key = el("span", { class: `key${each.dashed ? " dashed" : ""}`, style: { "--key": each.colour } }, each.label);
    legend.append(el("span", { class: "item" }, key, el("b", null, num(last))));
  });
  draws.set(host, () => draw(host, series, legend));
  seen.observe(host);
  return el("figure", { class: "chart" }, el("figcaption", null, title, note && el("small", null, note)), host, legend);
}

/** Limits of the y axis; around a constant, such as 0, they are close. @param {any} _ @param {number | null} low @param {number | null} high */
function rangeOfValues(_, low, high) {
  if (low === null || high === null) return [0, 1];
  return low === high ? [Math.min(0, 2 * low), Math.max(2 * high, low ? 0 : 1)] : uPlot.rangeNum(low, high, 0.1, true);
}

/** @param {HTMLElement} host @param {Series[]} series @param {HTMLElement} legend */
function draw(host, series, legend) {
  const steps = [...new Set(series.flatMap((each) => each.steps))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, at) => [step, at]));
  /** @param {Series} each @param {(number | null)[]} values */
  const spread = (each, values) => {
    /** @type {(number | null)[]} */
    const row = new Array(steps.length).fill(null);
    each.steps.forEach((step, at) => (row[/** @type {number} */ (places.get(step))] = values[at]));
    return row;
  };
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--dim").trim();
  const line = style.getPropertyValue("--line").trim();
  /** @type {any[]} */
  const data = [steps];
  /** @type {any[]} */
  const shown = [{}];
  /** @type {any[]} */
  const bands = [];
  for (const each of series) {
    data.push(spread(each, each.values));
    shown.push({
      stroke: each.colour,
      width: 1.5,
      spanGaps: true,
      dash: each.dashed ? [5, 4] : undefined,
      points: { show: each.steps.length < 30, size: 5 },
    });
    if (each.low && each.high) {
      data.push(spread(each, each.high), spread(each, each.low));
      const edge = { stroke: "transparent", spanGaps: true, points: { show: false } };
      shown.push(edge, edge);
      bands.push({ series: [data.length - 2, data.length - 1], fill: `${each.colour}2e` });
    }
  }
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
  const values = legend.querySelectorAll("b");
  /** @type {any} */
  const options = {
    width: host.clientWidth || 320,
    height: 190,
    legend: { show: false },
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: rangeOfValues } },
    axes: [{ ...axis, size: 30, incrs: WHOLE }, { ...axis, size: 58, values: (/** @type {any} */ _, /** @type {number[]} */ marks) => marks.map(num) }],
    series: shown,
    bands,
    hooks: {
      setCursor: [
        (/** @type {any} */ plot) => {
          const at = plot.cursor.idx;
          let column = 1;
          series.forEach((each, place) => {
            const row = data[column];
            const value = at === null || at === undefined ? row.findLast((/** @type {any} */ v) => v !== null) : row[at];
            const interval = each.low ? ` ± ${num((data[column + 1][at ?? 0] - data[column + 2][at ?? 0]) / 2)}` : "";
            values[place].textContent = num(value) + (at !== null && at !== undefined ? `${interval}` : "");
            column += each.low ? 3 : 1;
          });
          host.title = at === null || at === undefined ? "" : `step ${steps[at]}`;
        },
      ],
    },
  };
  const plot = new uPlot(options, data, host);
  plots.push({ plot, host });
  sizes.observe(host);
}

/**
 * Stacked bars by step; a click chooses a step.
 * @param {number[]} steps @param {[string, (number | null)[]][]} parts @param {(name: string) => string} colour @param {(step: number) => void} choose @param {(value: number) => string} format
 */
function bars(steps, parts, colour, choose, format) {
  const canvas = el("canvas", { class: "bars", role: "img", "aria-label": "bars by step" });
  const totals = steps.map((_, at) => parts.reduce((sum, [, values]) => sum + (values[at] ?? 0), 0));
  const most = totals.reduce((high, total) => Math.max(high, total), 1e-9);
  const said = el("div", { class: "said" }, `step ${steps[totals.indexOf(most)] ?? ""} took longest, ${format(most)}; point at a step, or choose it to list its episodes`);
  const paint = () => {
    const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio || 1];
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    steps.forEach((_, at) => {
      let y = height;
      const x = (at * width) / steps.length;
      parts.forEach(([name, values]) => {
        const size = ((values[at] ?? 0) / most) * (height - 4);
        pen.fillStyle = colour(name);
        pen.fillRect(x, y - size, Math.max(0.7, width / steps.length - 1), size);
        y -= size;
      });
    });
  };
  /** @param {MouseEvent} event */
  const at = (event) => clamp(Math.floor((event.offsetX / canvas.clientWidth) * steps.length), 0, steps.length - 1);
  canvas.addEventListener("mousemove", (/** @type {MouseEvent} */ event) => {
    const place = at(event);
    const each = parts.map(([name, values]) => `${name} ${format(values[place] ?? 0)}`);
    said.textContent = visible(`step ${steps[place]}: ${format(totals[place])} = ${each.join(" + ")}`);
  });
  canvas.addEventListener("click", (/** @type {MouseEvent} */ event) => choose(steps[at(event)]));
  new ResizeObserver(paint).observe(canvas);
  const legend = parts.map(([name]) =>
    el("span", { class: "item" }, el("span", { class: "key", style: { "--key": colour(name) } }, name)),
  );
  return el("div", { class: "barred" }, canvas, el("div", { class: "legend" }, ...legend), said);
}
