// One episode: its conversation, and its tokens coloured by what is known of them.

const CHUNK = 4000;
/** @type {[string, string, string][]} colour, its name, and what it means */
const COLOURS = [
  ["logprob", "logprob", "the darker, the less probable the token was for the engine"],
  ["gap", "gap", "trainer's logprob minus the engine's: red is above 0, blue below"],
  ["entropy", "entropy", "the darker, the more tokens the trainer thought possible"],
  ["advantage", "advantage", "green raises the token's probability, red lowers it"],
  ["version", "version", "one colour for each version of the weights"],
  ["mask", "mask", "green: the loss saw the token"],
  ["value", "value", "what the reward credits the token with: green is above 0, red below"],
];

/** @typedef {{text: string, id: number, turn: number, logprob: number | null, gap: number | null, entropy: number | null, advantage: number | null, version: number | null, mask: number | null, value: number | null}} Token */

/** @param {any} values @param {number} at @returns {number | null} */
const numberAt = (values, at) => (Array.isArray(values) ? values[at] : values ?? null);

/** @param {any} turn @param {number} number @returns {Token[]} */
function tokensOf(turn, number) {
  return turn.tokens.map((/** @type {string} */ text, /** @type {number} */ at) => ({
    text,
    id: turn.ids[at],
    turn: number,
    logprob: numberAt(turn.logprobs, at),
    gap: numberAt(turn.gaps, at),
    entropy: numberAt(turn.entropies, at),
    advantage: numberAt(turn.advantages, at),
    version: numberAt(turn.versions, at),
    mask: turn.trained === null ? 0 : numberAt(turn.trained, at),
    value: numberAt(turn.values, at),
  }));
}

/** Return a colour for each value of a quantity. @param {string} of @param {Token[]} tokens @returns {(token: Token) => string} */
function painter(of, tokens) {
  /** @param {"gap" | "advantage" | "value"} key */
  const scaleOf = (key) => {
    const sizes = tokens.flatMap((token) => (token[key] === null ? [] : [Math.abs(/** @type {number} */ (token[key]))])).sort((a, b) => a - b);
    return sizes.length ? Math.max(quantile(sizes, 0.99), 1e-6) : 1;
  };
  /** @param {number | null} value @param {number} scale @param {string} above @param {string} below */
  const two = (value, scale, above, below) =>
    value === null || value === 0 ? "transparent" : `rgba(${value > 0 ? above : below}, ${(0.08 + 0.67 * Math.min(1, Math.abs(value) / scale)).toFixed(2)})`;
  const [green, red, blue, orange, purple] = ["40, 165, 80", "220, 60, 60", "60, 110, 230", "235, 130, 20", "150, 70, 200"];
  switch (of) {
    case "gap": {
      const scale = Math.max(scaleOf("gap"), 0.01);
      return (token) => two(token.gap, scale, red, blue);
    }
    case "advantage": {
      const scale = scaleOf("advantage");
      return (token) => two(token.advantage, scale, green, red);
    }
    case "value": {
      const scale = scaleOf("value");
      return (token) => two(token.value, scale, green, red);
    }
    case "version": {
      const versions = [...new Set(tokens.map((token) => token.version))].sort((a, b) => (a ?? 0) - (b ?? 0));
      return (token) => (token.version === null || token.version < 0 ? "transparent" : `${PALETTE[versions.indexOf(token.version) % PALETTE.length]}66`);
    }
    case "entropy":
      return (token) => (token.entropy === null ? "transparent" : `rgba(${purple}, ${(0.8 * Math.min(1, token.entropy / 3)).toFixed(2)})`);
    case "mask":
      return (token) => (token.mask ? `rgba(${green}, 0.35)` : "transparent");
    default:
      return (token) => (token.logprob === null ? "transparent" : `rgba(${orange}, ${(0.8 * Math.min(1, -token.logprob / 3)).toFixed(2)})`);
  }
}

/** @param {HTMLElement} main @param {Place} place @param {Store} store */
async function episodeView(main, place, store) {
  const run = store.runs[place.run];
  const given = place.name || browsed.names[0] || (run.size ? run.name(run.size - 1) : "");
  const episode = given ? await store.episode(place.run, given) : null;
  const asTokens = place.args.get("view") === "tokens";
  const keys = {
    ArrowLeft: () => neighbour(-1),
    ArrowRight: () => neighbour(1),
    t: () => again({ view: asTokens ? "" : "tokens" }),
    Escape: () => history.back(),
  };
  main.append(el("div", { class: "filters" }, runChoice(place, store), headOf(place, run, given)));
  if (!episode) {
    const why = run.size ? "This file does not hold this episode whole. See it with" : "The run keeps no episodes.";
    main.append(nothing(why), run.size ? el("pre", null, `forge-rl show RUN ${given}\nforge-rl dashboard RUN`) : "");
    return keys;
  }
  main.append(factsOf(episode, place, run));
  const tabs = [
    ["", "Conversation"],
    ["tokens", "Tokens"],
  ].map(([view, text]) => el("a", { class: `tab${(view === "tokens") === asTokens ? " on" : ""}`, href: link("episode", place.run, given, { view, colour: place.args.get("colour") ?? "" }) }, text));
  main.append(el("div", { class: "tabs" }, ...tabs));
  const body = asTokens ? tokenBody(episode, place, again) : conversationBody(episode);
  main.append(body.element);
  return { ...keys, ...body.keys };

  function again(/** @type {Record<string, string>} */ changes) {
    go("episode", place.run, given, { ...Object.fromEntries(place.args), ...changes }, true);
  }
  function neighbour(/** @type {number} */ by) {
    const names = browsed.run === place.run && browsed.names.includes(given) ? browsed.names : run.placesOf(run.steps[run.place(given)], run.kinds[run.place(given)]).map((at) => run.name(at));
    const at = names.indexOf(given) + by;
    if (at >= 0 && at < names.length) go("episode", place.run, names[at], Object.fromEntries(place.args), true);
  }
}

/** Its name, and the rewards of its group. @param {Place} place @param {Run} run @param {string} name */
function headOf(place, run, name) {
  const at = run.place(name);
  if (at < 0) return el("h2", { class: "inline" }, name);
  const group = run.number("group", at) === -1 ? [] : run.groupsOf(run.steps[at], run.kinds[at]).find((places) => places.includes(at)) ?? [];
  const chips = group.slice(0, 64).map((each) => rewardChip(run, place.run, each, each === at, Object.fromEntries(place.args)));
  return el("div", { class: "grouped" }, el("h2", { class: "inline" }, name), chips.length > 1 && el("span", { class: "chips" }, el("span", { class: "label" }, "its group"), ...chips));
}

/** @param {Run} run @param {number} which @param {number} at @param {boolean} chosen @param {Record<string, string>} [args] */
function rewardChip(run, which, at, chosen, args = {}) {
  const reward = run.number("reward", at);
  const [low, high] = rangeOf(run);
  const share = reward === null ? 0 : high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  return el(
    "a",
    {
      class: `chip${chosen ? " chosen" : ""}`,
      href: link("episode", which, run.name(at), { view: args.view ?? "", colour: args.colour ?? "" }),
      title: `${run.name(at)} ${run.text("outcome", at)}`,
      style: { background: reward === null ? "transparent" : `hsl(${Math.round(120 * share)} 60% 50% / 0.35)` },
    },
    num(reward) || "–",
  );
}

/** Lowest and highest reward of a run. @param {Run} run @returns {[number, number]} */
function rangeOf(run) {
  const cached = /** @type {any} */ (run);
  if (!cached.range) {
    let [low, high] = [Infinity, -Infinity];
    for (const reward of run.columns.reward) {
      if (reward !== null && reward < low) low = reward;
      if (reward !== null && reward > high) high = reward;
    }
    cached.range = [low, high];
  }
  return cached.range;
}

/** @param {any} episode @param {Place} place @param {Run} run */
function factsOf(episode, place, run) {
  const at = run.place(episode.name);
  const advantage = at < 0 ? null : run.number("advantage", at);
  /** @type {[string, any][]} */
  const facts = [
    ["task", el("a", { href: link("episodes", place.run, "", { find: episode.task }) }, `${episode.source} ${episode.task}`)],
    ["episode", `${episode.kind}${episode.set ? ` on ${episode.set}` : ""} in step ${episode.step}; ${episode.given_answer ? `${episode.given_answer === "given" ? "a" : "the"} ${episode.given_answer} answer` : `${episode.outcome} after ${duration(episode.seconds)}`}`],
    ["reward", episode.reward === null ? "" : el("span", null, el("b", { class: levelOf(run, episode.reward) }, num(episode.reward)), ...episode.parts.map((/** @type {any} */ [name, value]) => el("span", { class: "part" }, `${name} ${num(value)}`)))],
    ["advantage", num(advantage)],
    ["problem", episode.problem && el("span", { class: "bad" }, episode.problem)],
    ["answer", episode.answer],
    ["feedback", episode.feedback],
    ...episode.truth.map((/** @type {any} */ [name, value]) => [`truth ${name}`, value]),
    ["tools", episode.tools && folded("schemas", episode.tools)],
  ];
  const rows = facts.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
}

/** @param {string} title @param {string} text */
const folded = (title, text) => el("details", null, el("summary", null, title), el("pre", null, text));

/** @param {any} turn @param {number} at @param {any} episode */
function turnTitle(turn, at, episode) {
  const segment = (episode.segments > 1 ? `, segment ${turn.segment + 1} of ${episode.segments}` : "") + (turn.agent ? `, ${visible(turn.agent)}` : "") + (turn.branch ? `, branch ${visible(turn.branch)}` : "");
  const facts = [
    `${turn.prompt_tokens} + ${turn.count} tokens${turn.truncated ? ", truncated" : ""}`,
    turn.seconds === null ? "" : `${duration(turn.seconds)} to answer`,
    turn.response_s > 0 ? `${duration(turn.response_s)} for the response` : "",
    turn.value === null ? "" : `value ${num(turn.value)}`,
  ].filter(Boolean);
  return el("h3", { class: "turn", id: `turn-${at + 1}`, style: { "--segment": PALETTE[turn.segment % PALETTE.length] } }, `turn ${at + 1} of ${episode.turns.length + episode.more_turns}${segment}`, el("small", null, facts.join(" · ")));
}

/** @param {any} message */
function messageBox(message) {
  const role = message.role;
  const known = ["system", "user", "assistant", "tool", "prompt", "result"].includes(role) ? role : "other";
  return el("div", { class: `message ${known}` }, el("div", { class: "role" }, role), message.content && el("div", { class: "text" }, message.content), message.rest && folded(message.rest.includes('"tool_calls"') ? "tool calls" : "fields", message.rest));
}

/** @param {any} episode */
function conversationBody(episode) {
  const element = el("div", { class: "conversation" });
  for (const message of episode.messages) element.append(messageBox(message));
  episode.turns.forEach((/** @type {any} */ turn, /** @type {number} */ at) => {
    element.append(turnTitle(turn, at, episode));
    for (const message of turn.messages) element.append(messageBox(message));
    const said = messageBox({ role: "assistant", content: turn.text });
    for (const call of turn.calls) {
      const took = call.seconds === null ? "" : duration(call.seconds);
      said.append(
        el("div", { class: `call${call.error ? " failed" : ""}` }, el("b", null, call.name), el("code", null, call.arguments), el("small", null, took), call.error && el("div", { class: "bad" }, call.error)),
      );
    }
    element.append(said);
  });
  if (episode.more_turns) element.append(nothing(`${episode.more_turns} more turns are not on the page.`));
  const last = episode.turns.at(-1);
  if (episode.output !== null && episode.output !== last?.text) element.append(messageBox({ role: "result", content: episode.output }));
  return { element, keys: turnKeys(element) };
}

/** @param {HTMLElement} element */
function turnKeys(element) {
  const move = (/** @type {number} */ by) => {
    const titles = [...element.querySelectorAll(".turn")];
    const tops = titles.map((title) => title.getBoundingClientRect().top - 70);
    const next = by > 0 ? tops.findIndex((top) => top > 5) : tops.findLastIndex((top) => top < -5);
    titles[next]?.scrollIntoView({ block: "start" });
  };
  return { j: () => move(1), k: () => move(-1) };
}

/** @param {any} episode @param {Place} place @param {(changes: Record<string, string>) => void} again */
function tokenBody(episode, place, again) {
  /** @type {Token[]} */
  const tokens = episode.turns.flatMap((/** @type {any} */ turn, /** @type {number} */ at) => tokensOf(turn, at));
  /** @type {Record<string, boolean>} */
  const known = { mask: true };
  for (const token of tokens) for (const [key] of COLOURS) if (/** @type {any} */ (token)[key] !== null) known[key] = true;
  const colours = COLOURS.filter(([key]) => known[key]);
  const colour = colours.some(([key]) => key === place.args.get("colour")) ? /** @type {string} */ (place.args.get("colour")) : colours[0][0];
  const paint = painter(colour, tokens);
  const inspector = el("div", { class: "inspector", "aria-live": "polite" }, "Point at a token, or move with the arrows.");
  const element = el("div", { class: "tokens", tabindex: 0 });
  /** @type {HTMLElement[]} */
  const spans = [];
  /** @type {Token[]} the tokens of `spans` */
  const drawn = [];
  const spanOf = (/** @type {Token} */ token) => {
    const at = spans.length;
    const span = el("span", { class: `token${token.mask ? "" : " unseen"}`, "data-at": at }, token.text.replaceAll("\n", "↵\n") || "·");
    span.style.backgroundColor = paint(token);
    spans.push(span);
    drawn.push(token);
    return span;
  };
  let first = 0;
  episode.turns.forEach((/** @type {any} */ turn, /** @type {number} */ at) => {
    const own = tokens.slice(first, (first += turn.tokens.length));
    const box = el("div", { class: "stream" }, el("span", { class: "given" }, turn.shown.join("")));
    element.append(turnTitle(turn, at, episode), box);
    let done = 0;
    const more = () => {
      box.append(...own.slice(done, done + CHUNK).map(spanOf));
      done += CHUNK;
      if (done < own.length) {
        const button = el("button", { on: { click: () => (button.remove(), more()) } }, `${own.length - done} more tokens of this turn`);
        box.append(button);
      }
    };
    more();
    if (turn.count > turn.tokens.length) box.append(nothing(`${turn.count - turn.tokens.length} more tokens are not on the page.`));
  });
  let chosen = -1;
  const choose = (/** @type {number} */ at) => {
    if (at < 0 || at >= spans.length) return;
    spans[chosen]?.classList.remove("chosen");
    chosen = at;
    spans[at].classList.add("chosen");
    inspector.replaceChildren(...inspected(drawn[at], episode));
  };
  const point = (/** @type {any} */ event) => {
    const at = event.target?.dataset?.at;
    if (at !== undefined) choose(Number(at));
  };
  element.addEventListener("mouseover", point);
  element.addEventListener("click", point);
  const meaning = COLOURS.find(([key]) => key === colour)?.[2] ?? "";
  const bar = el(
    "div",
    { class: "colours" },
    ...colours.map(([key, text]) => el("button", { class: key === colour ? "on" : "", on: { click: () => again({ colour: key }) } }, text)),
    el("span", { class: "dim" }, meaning, episode.has_texts ? "" : "; the run's vocabulary is missing, so tokens are ids"),
  );
  const next = () => again({ colour: colours[(colours.findIndex(([key]) => key === colour) + 1) % colours.length][0] });
  const move = (/** @type {number} */ by) => {
    choose(clamp(chosen + by, 0, spans.length - 1));
    spans[chosen]?.scrollIntoView({ block: "nearest" });
  };
  return {
    element: el("div", { class: "tokened" }, bar, inspector, element),
    keys: { ...turnKeys(element), c: next, ArrowRight: () => move(1), ArrowLeft: () => move(-1) },
  };
}

/** @param {Token} token @param {any} episode @returns {HTMLElement[]} */
function inspected(token, episode) {
  /** @type {[string, string][]} */
  const facts = [
    ["token", `${JSON.stringify(token.text)} ${token.id}`],
    ["probability", token.logprob === null ? "" : `${(100 * Math.exp(token.logprob)).toPrecision(3)}%`],
    ["logprob", num(token.logprob)],
    ["trainer's", token.gap === null || token.logprob === null ? "" : num(token.logprob + token.gap)],
    ["gap", num(token.gap)],
    ["ratio", token.gap === null ? "" : num(Math.exp(token.gap))],
    ["entropy", num(token.entropy)],
    ["advantage", num(token.advantage)],
    ["value", num(token.value)],
    ["version", token.version === null || token.version < 0 ? "given" : String(token.version)],
    ["lag", episode.version < 0 || token.version === null || token.version < 0 ? "" : num(episode.version - token.version)],
    ["loss", token.mask ? "saw it" : "did not see it"],
  ];
  return facts.filter(([, value]) => value !== "").map(([name, value]) => el("span", { class: "fact" }, el("i", null, name), value));
}
