// What the page knows of its one or two runs, from the file itself or from the live server.

/** The list of a run's episodes in columns, and everything else that is known of it. */
class Run {
  /** @param {any} raw */
  constructor(raw) {
    this.raw = raw;
    const { files, columns, texts } = raw.episodes;
    this.columns = columns;
    this.texts = texts;
    this.size = files.reduce((/** @type {number} */ sum, /** @type {any} */ file) => sum + file[2], 0);
    this.steps = new Int32Array(this.size);
    this.rows = new Int32Array(this.size);
    /** @type {string[]} */
    this.kinds = new Array(this.size);
    /** Place of the first episode of each file. @type {Map<string, number>} */
    this.starts = new Map();
    let place = 0;
    for (const [step, kind, count] of files) {
      this.starts.set(`${step}-${kind}`, place);
      for (let row = 0; row < count; row++, place++) {
        this.steps[place] = step;
        this.rows[place] = row;
        this.kinds[place] = kind;
      }
    }
  }
  /** @param {number} at @returns {string} */
  name(at) {
    return `${this.steps[at]}-${this.kinds[at]}-${this.rows[at]}`;
  }
  /** Return an episode's place by its name; -1 if it is not listed. @param {string} name */
  place(name) {
    const cut = name.lastIndexOf("-");
    const start = this.starts.get(name.slice(0, cut));
    const place = start === undefined ? -1 : start + Number(name.slice(cut + 1));
    return place >= 0 && place < this.size && this.name(place) === name ? place : -1;
  }
  /** The task by its question, or else its id. @param {number} at @returns {any} */
  question(at) {
    const asked = this.text("asked", at);
    return asked ? el("span", { title: this.text("task", at) }, asked) : this.text("task", at);
  }

  /** @param {"set" | "source" | "task" | "outcome" | "problem" | "answer" | "asked" | "said"} column @param {number} at @returns {string} */
  text(column, at) {
    return this.texts[column][this.columns[column][at]];
  }
  /** @param {string} column @param {number} at @returns {number | null} */
  number(column, at) {
    return this.columns[column][at];
  }
  /** Steps with episodes of a kind, in order. @param {string} kind @returns {number[]} */
  stepsOf(kind) {
    return this.raw.episodes.files.filter((/** @type {any} */ file) => file[1] === kind).map((/** @type {any} */ file) => file[0]);
  }
  /** Places of a file's episodes. @param {number} step @param {string} kind @returns {number[]} */
  placesOf(step, kind) {
    const start = this.starts.get(`${step}-${kind}`);
    const file = this.raw.episodes.files.find((/** @type {any} */ each) => each[0] === step && each[1] === kind);
    return start === undefined ? [] : Array.from({ length: file[2] }, (_, at) => start + at);
  }
  /** Groups of a file, each a list of places. @param {number} step @param {string} kind @returns {number[][]} */
  groupsOf(step, kind) {
    /** @type {Map<string, number[]>} */
    const groups = new Map();
    for (const at of this.placesOf(step, kind)) {
      const key = `${this.columns.set[at]}/${this.columns.group[at]}`;
      (groups.get(key) ?? groups.set(key, []).get(key))?.push(at);
    }
    return [...groups.values()];
  }
  /** Mean reward of tasks by step, with its standard error, of evaluated sets or their sources. @returns {Map<string, Map<number, [number, number]>>} */
  scores() {
    /** @type {Map<string, Map<number, Map<number, number[]>>>} */
    const found = new Map();
    for (const step of this.stepsOf("evaluated")) {
      for (const at of this.placesOf(step, "evaluated")) {
        const reward = this.number("reward", at);
        if (reward === null) continue;
        const several = this.texts.source.length > 1;
        for (const key of [this.text("set", at), ...(several ? [`${this.text("set", at)} · ${this.text("source", at)}`] : [])]) {
          const steps = found.get(key) ?? new Map();
          const tasks = steps.get(step) ?? new Map();
          const group = /** @type {number} */ (this.number("group", at));
          tasks.set(group, [...(tasks.get(group) ?? []), reward]);
          steps.set(step, tasks);
          found.set(key, steps);
        }
      }
    }
    /** @param {Map<number, number[]>} tasks @returns {[number, number]} */
    const estimate = (tasks) => {
      const means = [...tasks.values()].map(mean);
      const middle = mean(means);
      const spread = means.reduce((sum, value) => sum + (value - middle) ** 2, 0);
      return [middle, means.length > 1 ? Math.sqrt(spread / (means.length - 1) / means.length) : NaN];
    };
    return new Map([...found].map(([key, steps]) => [key, new Map([...steps].map(([step, tasks]) => [step, estimate(tasks)]))]));
  }
}

/** The runs of the page. */
class Store {
  constructor() {
    /** @type {Run[]} */
    this.runs = [];
    /** @type {any} */
    this.comparison = null;
    this.live = document.body.hasAttribute("data-live");
    /** @type {string} */
    this.tag = "";
    this.key = "";
    /** @type {Map<string, any>} */
    this.opened = new Map();
  }
  /** @param {any} raw */
  fill(raw) {
    this.runs = raw.runs.map((/** @type {any} */ run) => new Run(run));
    this.comparison = raw.comparison;
    this.opened.clear();
  }
  /** Read the data in the file. */
  read() {
    this.fill(JSON.parse(/** @type {string} */ (document.getElementById("data")?.textContent)));
  }
  /** Ask the server for data; returns whether there was news. @returns {Promise<boolean>} */
  async refresh() {
    const answer = await this.ask("data.json", this.tag ? { "if-none-match": this.tag } : {});
    if (answer.status === 304) return false;
    this.tag = answer.headers.get("etag") ?? "";
    this.fill(await answer.json());
    return true;
  }
  /** @param {string} path @param {Record<string, string>} [headers] */
  async ask(path, headers = {}) {
    const answer = await fetch(path, { headers: { authorization: `Bearer ${this.key}`, ...headers }, credentials: "omit" });
    if (!answer.ok && answer.status !== 304) {
      const problem = await answer.json().catch(() => null);
      throw new Error(problem?.error?.message ?? `the server answered with status ${answer.status}`);
    }
    return answer;
  }
  /** Whether a whole episode can be shown. @param {number} run @param {string} name */
  has(run, name) {
    return this.live || document.getElementById(`episode/${run}/${name}`) !== null;
  }
  /** @param {number} run @param {string} name @returns {Promise<any>} */
  async episode(run, name) {
    const id = `episode/${run}/${name}`;
    if (!this.opened.has(id)) {
      if (this.opened.size > 20) this.opened.clear();
      const text = document.getElementById(id)?.textContent;
      this.opened.set(id, text ? JSON.parse(text) : this.live ? await (await this.ask(`${id}.json`)).json() : null);
    }
    return this.opened.get(id);
  }
}
