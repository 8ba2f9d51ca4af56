// Part "Completions": filtered groups, a few at a time.
const PAGE = 2; // groups drawn at a time
const COLORS = [
  ["", "nothing"],
  ["logprobs", "log-probability"],
  ["ref", "log-ratio to the reference"],
  ["trainer", "log-ratio, trainer to rollout"],
];

const ALL = RUNS.flatMap((run, i) => run.groups.map((group) => ({ ...group, run: i })));

// A token's log-ratio, which colours it and is shown in its tooltip.
function ratio(sample, name, i) {
  const other = sample[name];
  const policy = (name === "ref_logprobs" && sample.trainer_logprobs) || sample.logprobs;
  if (!policy || !other || !known(policy[i]) || !known(other[i])) return null;
  return name === "ref_logprobs" ? policy[i] - other[i] : other[i] - policy[i];
}

function shade(sample, what, i) {
  if (what === "logprobs") {
    const value = sample.logprobs && sample.logprobs[i];
    return known(value) ? `rgb(var(--low-rgb) / ${Math.min(0.6, -value / 6)})` : "";
  }
  const value = what && ratio(sample, `${what}_logprobs`, i);
  if (!known(value) || value === 0) return "";
  const side = value < 0 ? "low" : "high";
  const scale = what === "ref" ? 2 : 0.2;
  return `rgb(var(--${side}-rgb) / ${Math.min(0.6, Math.abs(value) / scale)})`;
}

function tokenTip(sample, i) {
  const logprob = sample.logprobs && sample.logprobs[i];
  const rows = [el("div.mono", null, `\u201c${visible(sample.tokens[i]).replaceAll("\n",
    "\u21b5")}\u201d`), el("div.soft", null, `token ${i + 1} of ${sample.tokens.length}`)];
  if (known(logprob)) {
    rows.push(tipRow("log-probability", number(logprob)));
    rows.push(tipRow("probability", percent(Math.exp(logprob))));
  }
  for (const [name, title] of [["trainer", "trainer\u2019s"], ["ref", "reference\u2019s"]]) {
    const value = sample[`${name}_logprobs`] && sample[`${name}_logprobs`][i];
    if (!known(value)) continue;
    const gap = ratio(sample, `${name}_logprobs`, i);
    rows.push(tipRow(`${title} log-probability`, number(value)));
    rows.push(tipRow(name === "ref" ? "log-ratio, policy to reference" :
      "log-ratio, trainer to rollout", signed(gap, number)));
  }
  return rows;
}

// A text with the searched words marked.
function marked(text, search) {
  if (!search) return [visible(text)];
  const pieces = [];
  const low = text.toLowerCase();
  let from = 0;
  // If lower case changes the text's length, positions would be wrong.
  for (let at; low.length === text.length && (at = low.indexOf(search, from)) >= 0;) {
    pieces.push(visible(text.slice(from, at)),
      el("mark", null, visible(text.slice(at, at + search.length))));
    from = at + search.length;
  }
  return [...pieces, visible(text.slice(from))];
}

function tokenSpans(sample, what) {
  const length = sample.tokens.length;
  let seen = 0;
  return sample.tokens.map((text, i) => {
    const end = i === length - 1 && !sample.truncated && seen >= sample.completion.length;
    seen += text.length;
    const by = sample.observed && sample.observed[i] ? ".observed" : "";
    const node = el(`span.token${by}${end ? ".special" : ""}`);
    text.split("\n").forEach((piece, k) => {
      if (k) append(node, [el("span.sign", null, "\u21b5"), "\n"]);
      node.append(visible(piece));
    });
    node.dataset.token = i;
    if (!by) node.style.background = shade(sample, what, i);
    const reward = sample.turn_rewards && sample.turn_rewards[i];
    if (!known(reward)) return node;
    const row = el("span", null, node,
      el("span.small.soft", null, ` ${signed(reward, number)} `));
    const advantage = sample.turn_advantages && sample.turn_advantages[i];
    if (known(advantage)) {
      const shown = el("span.small", { title: "advantage of this turn" },
        `(${signed(advantage, number)}) `);
      shown.style.color = advantage < 0 ? "var(--bad)" : "var(--good)";
      row.append(shown);
    }
    return row;
  });
}

// Arrow keys move from token to token; pointing at a token shows its numbers.
function tokens(sample, what) {
  const box = el("div.text", { tabindex: "0", role: "group", "aria-label":
    "completion, token by token: arrow keys move" }, tokenSpans(sample, what));
  let at = -1;
  const show = (i) => {
    const nodes = box.querySelectorAll(".token");
    if (at >= 0) nodes[at].classList.remove("here");
    at = Math.max(0, Math.min(nodes.length - 1, i));
    nodes[at].classList.add("here");
    nodes[at].scrollIntoView({ block: "nearest" });
    const place = nodes[at].getBoundingClientRect();
    showTip(tokenTip(sample, at), place.left, place.bottom - 8);
  };
  box.addEventListener("pointerover", (event) => {
    const node = event.target.closest("[data-token]");
    if (node) showTip(tokenTip(sample, +node.dataset.token), event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("blur", () => {
    box.querySelectorAll(".here").forEach((node) => node.classList.remove("here"));
    hideTip();
  });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (!move || !sample.tokens.length) return;
    event.preventDefault();
    show(at + move);
  });
  return box;
}

function leaning(sample, most) {
  if (!known(sample.advantage)) return null;
  const size = most > 0 ? (50 * Math.abs(sample.advantage)) / most : 0;
  const piece = el("span");
  piece.style.width = `${size}%`;
  piece.style.left = sample.advantage < 0 ? `${50 - size}%` : "50%";
  piece.style.background = sample.advantage < 0 ? "var(--bad)" : "var(--good)";
  return el("div.lean", { title: `advantage ${number(sample.advantage)}` }, piece);
}

function sampleCard(sample, group, matches, view) {
  const side = sample.advantage > 0 ? ".up" : sample.advantage < 0 ? ".down" : "";
  const most = Math.max(...group.samples.map((s) => Math.abs(s.advantage) || 0));
  const sum = sample.logprobs && sample.logprobs.reduce((a, b) => a + (b || 0), 0);
  const showsTokens = sample.tokens && !view.search;
  return el(`article.sample${side}${matches(sample) ? "" : ".dim"}`, null,
    el("div.head", null, el("span.reward", null, `reward ${number(sample.reward)}`),
      sample.truncated && el("span.pill.warn", null, "truncated"),
      known(sample.advantage) && el("span.push.small.soft", null,
        `advantage ${signed(sample.advantage, number)}`)),
    leaning(sample, most),
    el("div.small.soft", null, sample.tokens ? `${sample.tokens.length} tokens` : "",
      known(sum) ? `, log p ${number(sum)}` : "",
      sample.rewards ? ` \u00b7 ${Object.entries(sample.rewards).map(([name, value]) =>
        `${visible(name)} ${number(value)}`).join(", ")}` : ""),
    showsTokens ? tokens(sample, view.color) : el("div.text", { tabindex: "0" },
      marked(sample.completion, view.search)));
}

function groupCard(group, matches, view) {
  const rewards = group.samples.map((s) => s.reward).filter(known);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const side = view.order === "best" ? -1 : 1;
  const sorted = [...group.samples].sort((a, b) => side * (a.reward - b.reward) || 0);
  return el("section.card.family", null,
    el("div.head", null, RUNS.length > 1 && dot(group.run),
      el("h3", null, `Step ${group.step.toLocaleString("en")}`),
      group.answer !== null && el("span.pill", null, `answer ${visible(group.answer)}`),
      el("span.push.small.soft", null, `${group.samples.length} completions, mean reward ${
        number(mean)}`)),
    el("div.text.prompt", { tabindex: "0", "aria-label": "prompt" },
      marked(group.prompt, view.search)),
    el("div.side", null, sorted.map((s) => sampleCard(s, group, matches, view))));
}

function field(title, node) {
  return el("label", null, title, node);
}

function choice(options) {
  return el("select", null, options.map(([value, text]) => el("option", { value }, text)));
}

function check(title) {
  const node = el("input", { type: "checkbox" });
  return [node, el("label.check", null, node, title)];
}

function filters() {
  const steps = [...new Set(ALL.map((group) => group.step))].sort((a, b) => a - b);
  const [truncated, truncatedBox] = check("truncated");
  const [varies, variesBox] = check("groups that vary");
  const has = (name) => ALL.some((g) => g.samples.some((s) => s[name]));
  const colors = COLORS.filter(([name]) => !name || has(name === "logprobs" ? name :
    `${name}_logprobs`));
  const fields = {
    run: choice([["", "all"], ...RUNS.map((run, i) => [i, visible(run.name)])]),
    step: choice([["", "all"], ...steps.map((step) => [step, step])]),
    low: el("input", { type: "number", step: "any", placeholder: "\u2212\u221e" }),
    high: el("input", { type: "number", step: "any", placeholder: "\u221e" }),
    search: el("input", { type: "search", placeholder: "in prompts and completions" }),
    order: choice([["", "last step, worst first"], ["early", "first step, worst first"],
      ["worst", "worst of all steps first"], ["best", "best of all steps first"]]),
    color: choice(colors), truncated, varies,
  };
  for (const [name, node] of Object.entries(fields)) node.name = name;
  const form = el("form.filters.card", { "aria-label": "Filter completions" },
    RUNS.length > 1 && field("Run", fields.run), field("Step", fields.step),
    field("Reward from", fields.low), field("to", fields.high),
    field("Text", fields.search), field("Order", fields.order),
    colors.length > 1 && field("Colour of tokens", fields.color), truncatedBox, variesBox);
  form.addEventListener("submit", (event) => event.preventDefault());
  return [form, fields];
}

function viewOf(fields) {
  const limit = (node, otherwise) => (node.value === "" ? otherwise : +node.value);
  return {
    run: fields.run.value, step: fields.step.value, order: fields.order.value,
    low: limit(fields.low, -Infinity), high: limit(fields.high, Infinity),
    search: fields.search.value.trim().toLowerCase(), color: fields.color.value,
    truncated: fields.truncated.checked, varies: fields.varies.checked,
  };
}

function matcher(view) {
  const any = view.low === -Infinity && view.high === Infinity;
  return (sample, group) => (any || (known(sample.reward) && sample.reward >= view.low &&
    sample.reward <= view.high)) && (!view.truncated || sample.truncated) &&
    (!view.search || sample.completion.toLowerCase().includes(view.search) ||
      group.prompt.toLowerCase().includes(view.search));
}

function meanReward(group) {
  const rewards = group.samples.map((s) => s.reward).filter(known);
  return rewards.reduce((a, b) => a + b, 0) / Math.max(rewards.length, 1);
}

function chosen(view) {
  const matches = matcher(view);
  const groups = ALL.filter((group) => (view.run === "" || group.run === +view.run) &&
    (view.step === "" || group.step === +view.step) &&
    (!view.varies || new Set(group.samples.map((s) => s.reward)).size > 1) &&
    group.samples.some((sample) => matches(sample, group)));
  const worst = (a, b) => meanReward(a) - meanReward(b);
  const by = { "": (a, b) => b.step - a.step || worst(a, b), early: (a, b) => a.step -
    b.step || worst(a, b), best: (a, b) => worst(b, a), worst }[view.order];
  return [groups.sort(by), matches];
}

function completions() {
  const about = RUNS.map((run) => run.sampled);
  const thin = about.some((sampled) => sampled.kept_steps < sampled.steps);
  const section = part("completions", "Completions", "The completions of a group side " +
    "by side; the colour at the top is green for a positive advantage, red for a " +
    "negative one. Point at a token, or focus a completion and use the arrow keys.",
    thin && el("p.note.small", null, "To stay small, this page has the samples of " +
    about.map((sampled) => `${sampled.kept_steps} of ${sampled.steps}`).join(", ") +
    " steps. samples.jsonl has all of them."));
  if (!ALL.length) {
    section.append(el("p.card.empty", null, "No samples: reward.on_device keeps them " +
      "on the device, and log.sample_groups = 0 saves none."));
    return;
  }
  const [form, fields] = filters();
  const count = el("p.soft.small", { role: "status" });
  const list = el("div");
  const more = el("button", { type: "button" });
  let [view, groups, matches, shown] = [null, [], null, 0];
  const draw = () => {
    const next = groups.slice(shown, shown + PAGE);
    append(list, [next.map((g) => groupCard(g, (s) => matches(s, g), view))]);
    shown += next.length;
    more.hidden = shown >= groups.length;
    more.textContent = `Show ${Math.min(PAGE, groups.length - shown)} more`;
    const total = groups.reduce((sum, g) => sum + g.samples.filter(
      (s) => matches(s, g)).length, 0);
    count.textContent = groups.length ? `${total} completions in ${groups.length} of ${
      ALL.length} groups; ${shown} groups shown` : "Nothing fits these filters.";
  };
  const update = () => {
    view = viewOf(fields);
    [groups, matches] = chosen(view);
    shown = 0;
    list.replaceChildren();
    hideTip();
    draw();
  };
  let timer = 0;
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(update, 120);
  });
  more.addEventListener("click", draw);
  append(section, [form, count, list, more]);
  update();
}
