// Held-out answers, failures, speed and settings.
// Answers to the same held-out prompts in the first and the last evaluation.
function heldOut() {
  const runs = RUNS.map((run, i) => [run.heldOut, i]).filter(([answers]) => answers);
  if (!runs.length) return;
  const answer = (sample, step) => el("article.sample", null, el("div.head", null,
    el("span.soft.small", null, step ? `after step ${number(step)}` : "before training"),
    el("span.push.reward", null, `reward ${number(sample.reward)}`)),
  el("div.text", { tabindex: "0" }, visible(sample.completion)));
  part("heldout", "Held-out prompts, before and after", "The first prompts of the " +
    "first and the last evaluation, answered greedily.", el("div.grid.pairs", null,
    runs.map(([answers, i]) => answers.pairs.map(([before, after]) => el("section.card", null,
      RUNS.length > 1 && el("h3", null, dot(i), visible(RUNS[i].name)),
      el("div.text.prompt", { tabindex: "0", "aria-label": "prompt" },
        visible(before.prompt)),
      el("div.side", null, answer(before, answers.first), answer(after, answers.last)))))));
}

function failures() {
  const boxes = RUNS.map((run, i) => {
    const { total, counts, rows } = run.failures;
    const head = el("h3", null, RUNS.length > 1 && dot(i), RUNS.length > 1 ?
      `${visible(run.name)}: ` : "", total ? `${number(total)} in failures.jsonl` :
      "no reward failed");
    if (!total) return el("div.card", null, head);
    const table = el("table", null, el("thead", null, el("tr", null,
      el("th", null, "function"), el("th", null, "reason"), el("th.num", null, "count"))),
      el("tbody", null, counts.slice(0, 20).map(([name, reason, count]) => el("tr", null,
        el("td.mono", null, visible(name)), el("td", null, visible(reason)),
        el("td.num", null, number(count))))));
    return el("div.card", null, head, el("div.scroll", null, table), firstFailures(rows));
  });
  part("failures", "Failures", "Rewards that could not be computed. Their " +
    "completions were left out of their groups.", el("div.grid", null, boxes));
}

const words = (value) => visible(typeof value === "string" ? value :
  JSON.stringify(value === undefined ? null : value));

function firstFailures(rows) {
  const box = el("details", null, el("summary", null, rows.length > 1 ? `The first ${rows.length}` : "The first"));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    box.append(el("div.grid", null, rows.map((row) => el("div.sample", null,
      el("div.small.soft", null, `step ${words(row.step)} \u00b7 ${words(row.function)
      } \u00b7 ${words(row.reason)}`),
      el("div.text.prompt", null, words(row.prompt)),
      el("div.text", null, words(row.completion))))));
  });
  return box;
}

const PART_NAMES = { seconds_rollout: "sampling", seconds_rewards: "rewards",
  seconds_reference: "comparison and reference", seconds_diagnosis: "diagnosis",
  seconds_update: "update", other: "other", seconds_step: "a whole step" };

function speedCard(run, i) {
  const rows = run.speed;
  const title = el("h3", null, RUNS.length > 1 && dot(i), visible(run.name));
  if (!rows.length) {
    return el("div.card", null, title, el("p.empty", null, "No step has been timed."));
  }
  const parts = rows.slice(0, -1);
  const bar = el("div.bar", { "aria-hidden": "true" }, parts.map((row, k) => {
    const piece = el("span");
    piece.style.flexGrow = row.share;
    piece.style.background = color(k);
    return piece;
  }));
  const name = (row) => PART_NAMES[row.name] || visible(row.name.replace("seconds_", ""));
  return el("div.card", null, title, parts.length > 1 && bar, el("table", null,
    el("thead", null, el("tr", null, el("th", null, "part"), el("th.num", null,
      "median, s"), el("th.num", null, "share of the time"))),
    el("tbody", null, rows.map((row, k) => el("tr", null,
      el("td", null, k < parts.length && parts.length > 1 && dot(k), name(row)),
      el("td.num", null, number(row.median)), el("td.num", null, percent(row.share)))))));
}

function speed() {
  part("speed", "Speed", "Seconds per step, by part of the step. The shares " +
    "include steps that compiled.",
    el("div.grid.cards", null, RUNS.map(speedCard)));
}

function settingRows(rows) {
  const cell = (value) => el("td.mono", null, value === null ? "\u2013" : visible(value));
  return el("div.scroll", null, el("table", null, el("thead", null, el("tr", null,
    el("th", null, "setting"), RUNS.map((run, i) => el("th", null, RUNS.length > 1 &&
      dot(i), RUNS.length > 1 ? visible(run.name) : "value")),
    el("th", null, "default"))), el("tbody.changed", null, rows.map((row) =>
    el("tr", null, el("td.mono", null, visible(row.name)), row.values.map(cell),
      cell(row.default))))));
}

function settings() {
  const differ = DATA.settings.filter((row) => row.differs);
  const changed = DATA.settings.filter((row) => row.changed && !row.differs);
  const unchanged = DATA.settings.filter((row) => !row.changed && !row.differs);
  const resumed = RUNS.flatMap((run) => run.changes.map((change) => el("p.note.small",
    null, `${visible(run.name)}, resumed after step ${words(change.step)}: ` +
      visible(change.changed.join("; ")))));
  part("settings", "Settings", null,
    RUNS.length > 1 && el("div.card", null, el("h3", null, "The runs differ in"),
      differ.length ? settingRows(differ) : el("p.soft", null, "nothing")),
    el("div.card.family", null, el("h3", null, "Changed from the default"),
      changed.length ? settingRows(changed) : el("p.soft", null, "nothing"), resumed),
    el("div.card.family", null, el("details", null, el("summary", null,
      `The other ${unchanged.length} settings`), settingRows(unchanged))));
}
