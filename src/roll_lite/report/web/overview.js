// The first view: where the run stands, what needs attention, the main curves, and what ran.

// The first that a run has is shown, under this name.
const NOW = { "reward/mean": "reward", "loss/loss": "loss", "loss/kl": "KL" };
const SPEEDS = {
  "rollout/tokens_per_second": "generated tokens/s",
  "train/tokens_per_second": "trained tokens/s",
};

function overviewView() {
  const notes = data.runs.flatMap(notesOf),
    isMany = data.runs.length > MANY_RUNS;
  return [
    data.runs.length > 1 ? runsTable() : null,
    ...(isMany ? [] : data.runs.map(tiles)),
    ...data.runs.flatMap(attention),
    charts(mainMetrics()),
    ...(isMany ? [] : differencesTable()),
    ...notes,
    isMany ? null : fold("What ran", false, el("div", { class: "scroll" }, overviewTable())),
    ...data.runs.flatMap(details),
  ];
}

// Where a run stands, in the numbers that a reader looks for first.
function tiles(run, index) {
  const { step, num_steps: of, best } = run.overview;
  const shown = step === null ? null : of ? `${step} of ${of}` : String(step);
  return el(
    "section",
    { class: "tiles", "data-run": index },
    data.runs.length > 1 ? el("h2", {}, runName(run)) : null,
    metricTile(run, " now", NOW),
    best
      ? tile(
          "best evaluation",
          number(best.value),
          `${best.metric}, step ${best.step}; ${beside(best)}${gain(run)}`,
          best.metric,
        )
      : null,
    tile("step", shown ?? "–", timeLeft(run), null, of && step !== null ? step / of : null),
    metricTile(run, "", SPEEDS),
  );
}

// The first evaluation, and the last where it is not the best.
function beside({ first, last, step, last_step }) {
  const now = last_step > step ? `, ${number(last)} at step ${last_step}` : "";
  return `${number(first)} at first${now}`;
}

// The last value of the first of the metrics that the run has, and what it was at first.
function metricTile(run, when, names) {
  const found = Object.keys(names).filter((name) => run.metrics[name]?.some((v) => v !== null));
  if (!found.length) return null;
  const [name] = found,
    all = points(run, name).map(([, value]) => value);
  const more = all.length > 1 ? `${number(all[0])} at first` : "";
  return tile(names[name] + when, number(all.at(-1)), more, name);
}

function tile(title, value, more, metric, share = null) {
  const parts = [
    el("div", { class: "faint" }, title),
    el("div", { class: "value" }, value),
    share === null ? null : el("progress", { value: share }),
    el("div", { class: "faint more" }, more),
  ];
  const attributes = { class: "tile", href: metric ? hash("curves", metric) : null };
  return el(metric ? "a" : "div", attributes, parts);
}

function timeLeft({ overview: o }) {
  if (o.step === null) return "no step is recorded yet";
  if (o.num_steps && o.step >= o.num_steps) return `complete after ${duration(o.seconds)}`;
  if (o.seconds_left === null) return `${duration(o.seconds)} of running`;
  return `about ${duration(o.seconds_left)} left`;
}

function overviewTable() {
  const row = (title, cell) => {
    const cells = data.runs.map(cell);
    if (cells.every((c) => c === null || c === undefined)) return null;
    return el(
      "tr",
      {},
      el("th", {}, title),
      cells.map((c) => el("td", {}, c ?? "–")),
    );
  };
  const option = (name) => (run) =>
    run.options[name] === undefined ? null : optionText(run.options[name]);
  const last = (name) => (run) => optionText(run.starts.at(-1)?.[name]);
  return el(
    "table",
    { id: "what-ran" },
    row("run", (run) => runName(run)),
    row("stands at", progress),
    row("best evaluation", bestText),
    row("command", (run) => optionText(run.starts.at(-1)?.command)),
    row("started", (run) =>
      run.starts.length ? run.starts.map((s) => `${s.time} at step ${s.step}`).join("; ") : null,
    ),
    row("model", option("model")),
    row("data", option("data")),
    row("device map", option("device_map")),
    row("hardware", last("hardware")),
    row("versions", last("versions")),
    row("commit", last("commit")),
  );
}

function optionText(value) {
  if (value === null || value === undefined) return null;
  const isFraction = typeof value === "number" && !Number.isInteger(value);
  if (isFraction) return String(Number(value.toPrecision(6))); // of a product, as 0.003
  if (typeof value !== "object") return String(value);
  if (Array.isArray(value)) return value.map(optionText).join(" ");
  return Object.entries(value)
    .map(([name, part]) => `${name} ${optionText(part)}`)
    .join(", ");
}

function runName(run) {
  return el("span", {}, dot(color(data.runs.indexOf(run))), run.name);
}

function progress(run) {
  const o = run.overview;
  if (o.step === null) return "no step is recorded yet";
  const of = o.num_steps ? ` of ${o.num_steps}` : "";
  const parts = [`step ${o.step}${of}, ${duration(o.seconds)} of running`];
  if (o.num_steps && o.step >= o.num_steps) parts.push("complete");
  else if (o.seconds_left !== null)
    parts.push(`about ${duration(o.seconds_left)} left at this rate`);
  if (o.phase && !(o.step >= o.num_steps)) parts.push(`last phase: ${o.phase}`);
  if (o.age !== null && !(o.step >= o.num_steps))
    parts.push(`last record ${duration(Math.max(0, o.age))} before this page was written`);
  return parts.join("; ");
}

function bestText(run) {
  const best = run.overview.best;
  if (!best) return null;
  return el(
    "span",
    {},
    link(["curves", best.metric], best.metric),
    ` ${number(best.value)} at step ${best.step}; ${beside(best)}${gain(run)}`,
  );
}

// By how much more of each prompt's samples pass than at first: the mean, and half of its interval.
function gain({ overview: { best }, improvement }) {
  if (!improvement || best.metric !== "eval/pass@1") return "";
  const [mean, half] = improvement.map((value) => value.toFixed(3));
  return `; ${mean < 0 ? "" : "+"}${mean} ± ${half} prompt by prompt`;
}

const prefix = (run) => (data.runs.length > 1 ? `${run.name}: ` : "");

// What is missing.
const notesOf = (run) =>
  run.notes.map((note) => el("div", { class: "notice note" }, prefix(run), note));

// Warnings with links to their curve and samples.
function attention(run, index) {
  return run.overview.warnings.map((w) => {
    const steps =
      w.num_steps > 1 ? `${w.num_steps} steps from ${w.step} to ${w.last_step}` : `step ${w.step}`;
    const samples = samplesNear(run, w.step, /failed|filtered/.test(w.metric));
    return el(
      "div",
      { class: "notice warning" },
      `${prefix(run)}${w.text} (${steps}) `,
      link(["curves", w.metric], w.metric),
      samples ? [" ", link(["rollouts", index, samples], `samples of ${samples}`)] : null,
    );
  });
}

// The name of recorded samples at a step or the first after it; of dropped ones, if `dropped`.
function samplesNear(run, step, dropped = false) {
  const kind = dropped ? "dropped" : "step";
  const names = run.names.filter((name) => name.startsWith(kind + "_"));
  return names.find((name) => stepOf(name) >= step) || names.at(-1) || null;
}

const stepOf = (name) => Number(name.split("_")[1]);

function differencesTable() {
  const names = Object.keys(data.differences);
  if (data.runs.length < 2) return [];
  if (!names.length) return [el("p", { class: "faint" }, "The runs have equal options.")];
  const head = el(
    "tr",
    {},
    el("th", {}, "option"),
    data.runs.map((run) => el("th", {}, runName(run))),
  );
  const rows = names.map((name) =>
    tableRow(
      name,
      data.differences[name].map((value) => optionText(value) ?? "–"),
    ),
  );
  return [
    el("h2", {}, "Options that differ"),
    el("div", { class: "scroll" }, el("table", { id: "differences" }, head, rows)),
  ];
}

function details(run) {
  const options = Object.entries(run.options).map(([name, value]) =>
    tableRow(name, optionText(value) ?? "none"),
  );
  const events = run.events.map((e) => {
    const { event, step, time, ...more } = e;
    return tableRow(
      `step ${step}`,
      String(event),
      Object.keys(more).length ? optionText(more) : "",
    );
  });
  return [
    fold(`All options${inRun(run)}`, false, el("table", {}, options)),
    fold(
      `Events${inRun(run)}: checkpoints, resumes, hints (${events.length})`,
      false,
      el("table", {}, events),
    ),
  ];
}

const inRun = (run) => (data.runs.length > 1 ? ` of ${run.name}` : "");
