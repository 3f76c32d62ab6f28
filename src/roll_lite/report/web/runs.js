// A table of all runs with their last values; a click on a title sorts by it.

const MANY_RUNS = 4; // more do not fit side by side
const MAX_VALUE = 32; // characters of an option
const RUN_METRICS = ["reward/mean", "loss/loss", "loss/entropy", "rollout/reply_tokens", "time/step"];
const sorting = { title: null, isDown: false };

// Columns: a title, a value to sort by, and what is shown.
function runColumns() {
  const last = (run, name) => (run.metrics[name] || []).findLast((value) => value !== null);
  const column = (title, value, show = (run) => number(value(run))) => ({ title, value, show });
  const metrics = RUN_METRICS.filter((name) => data.runs.some((run) => name in run.metrics));
  return [
    column("run", (run) => run.name, runName),
    column(
      "recipe",
      (run) => run.recipe,
      (run) => run.recipe ?? "–",
    ),
    column(
      "step",
      (run) => run.overview.step,
      (run) => `${number(run.overview.step)} of ${run.overview.num_steps ?? "?"}`,
    ),
    column(
      "running",
      (run) => run.overview.seconds,
      (run) => duration(run.overview.seconds),
    ),
    column("started", (run) => run.starts[0]?.time, (run) => run.starts[0]?.time ?? "–"),
    column(
      "best evaluation",
      (run) => run.overview.best?.value,
      shortBest,
    ),
    ...metrics.map((name) => column(name, (run) => last(run, name))),
    ...Object.keys(data.differences).map((name) =>
      column(
        name,
        (run) => run.options[name],
        (run) => el("span", { title: optionText(run.options[name]) }, optionEnd(run.options[name])),
      ),
    ),
  ];
}

function shortBest({ overview: { best } }) {
  if (!best) return "–";
  const name = link(["curves", best.metric], best.metric);
  return el("span", {}, `${number(best.value)} at ${best.step}, `, name);
}

// Of a long path the end, which tells runs apart.
function optionEnd(value) {
  const text = optionText(value) ?? "–";
  return text.length > MAX_VALUE ? `…${text.slice(1 - MAX_VALUE)}` : text;
}

// Missing values come last, whichever way the table is sorted.
function compareValues(a, b) {
  const isMissing = (value) => value === null || value === undefined;
  if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
  const order =
    typeof a === "number" && typeof b === "number"
      ? a - b
      : optionText(a).localeCompare(optionText(b));
  return sorting.isDown ? -order : order;
}

function runsTable() {
  const node = el("div", { class: "scroll" });
  const draw = () => {
    const columns = runColumns();
    const by = columns.find((c) => c.title === sorting.title);
    const runs = [...data.runs];
    if (by) runs.sort((a, b) => compareValues(by.value(a), by.value(b)));
    const sortBy = (title) => () => {
      sorting.isDown = sorting.title === title && !sorting.isDown;
      sorting.title = title;
      draw();
    };
    const heads = columns.map(({ title }) => {
      const mark = title === sorting.title ? (sorting.isDown ? " ▾" : " ▴") : "";
      return el("th", {}, el("button", { onclick: sortBy(title) }, title + mark));
    });
    const rows = runs.map((run) => tableRow(columns.map((c) => c.show(run))));
    node.replaceChildren(el("table", { id: "runs" }, el("tr", {}, heads), rows));
  };
  draw();
  return node;
}
