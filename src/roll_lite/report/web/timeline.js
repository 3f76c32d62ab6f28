// What ranks did in a step, and the lives of its samples, from their recorded events; zoomable.

const STATES = {
  queued: "#9aa5b1",
  generating: "#2f7ed8",
  stepping: "#c98a00",
  scoring: "#9b5de5",
  retried: "#d6418f",
  waiting: "#cfd8d3",
  failed: "#c62828",
  filtered: "#7a7f87",
  aborted: "#7a7f87",
};
const STATE_WORDS = { stepping: "environment", waiting: "waiting to be trained on" };
const MAX_LANES = 600;
const MAX_RANKS = 64;
const STEP_TOP = 14,
  RANKS_TOP = 32,
  RANK_HEIGHT = 12;
const TIMELINE_HELP =
  "Zoom with the buttons or the wheel, drag to move; a click opens a sample. " +
  "A rank generates while its engine has one of these samples.";

function timelineView(run, index, step) {
  const names = run.names.filter((name) => name.startsWith("step_") || name.startsWith("dropped_"));
  const steps = [...new Set(names.map(stepOf))];
  if (!steps.length)
    return [
      el("h2", {}, "Ranks and samples over time"),
      el("p", { class: "faint" }, "No samples are recorded."),
    ];
  const chosen = step === null ? steps.at(-1) : (steps.find((s) => s >= step) ?? steps.at(-1));
  const body = el("div", { id: "timeline" }, "…");
  fillTimeline(body, run, index, chosen).catch((error) => body.replaceChildren(String(error)));
  const choose = select(
    steps.map((s) => [s, s]),
    chosen,
    (s) => {
      location.hash = hash("time", index, s);
    },
  );
  return [
    el("h2", {}, "Ranks and samples over time"),
    el(
      "div",
      { class: "controls" },
      label("step", choose),
      Object.entries(STATES).map(([state, fill]) =>
        el("span", {}, dot(fill), STATE_WORDS[state] || state),
      ),
    ),
    body,
  ];
}

async function fillTimeline(body, run, index, step) {
  const digits = String(step).padStart(5, "0");
  const parts = [];
  let total = 0;
  for (const name of [`step_${digits}`, `dropped_${digits}`].filter((n) => run.names.includes(n))) {
    const { samples, total: all } = await loadSamples(index, name, 0);
    total += all;
    parts.push(...samples.map((sample) => ({ ...sample, name })));
  }
  const lanes = parts
    .filter((s) => Array.isArray(s.events) && s.events.length)
    .sort((a, b) => a.events[0][1] - b.events[0][1]);
  if (!lanes.length)
    return body.replaceChildren("No events of this step's samples are in this page.");
  const phases = stepPhases(run, step);
  const trainingAt = phases.find((p) => p.state !== "rollout")?.from;
  drawTimeline(
    body,
    lanes.slice(0, MAX_LANES).map((s) => ({ sample: s, segments: segments(s, trainingAt) })),
    phases,
    rankLanes(run, lanes, phases),
    index,
    `${Math.min(lanes.length, MAX_LANES)} samples of ${total}. ${TIMELINE_HELP}`,
  );
}

// From state to state; a sample that is done waits until training begins.
function segments(sample, trainingAt) {
  return sample.events.map(([state, from, version], i) => {
    const next = sample.events[i + 1];
    const last = state === "done" ? Math.max(from, trainingAt ?? from) : from;
    return {
      state: state === "done" ? "waiting" : state,
      from,
      to: next ? next[1] : last,
      version,
    };
  });
}

// The parts of the step itself, placed by the time of its record; an evaluation comes after them.
function stepPhases(run, step) {
  const i = run.metrics.step.lastIndexOf(step);
  if (i < 0 || !run.metrics["time/step"] || run.metrics["time/step"][i] === null) return [];
  const seconds = (name) => Number(run.metrics[name]?.[i] ?? 0);
  let at = Number(run.metrics.time[i]) - seconds("time/evaluate") - seconds("time/step");
  return data.phases
    .map((state) => {
      const from = at,
        fill = color(timeParts(run).indexOf(`time/${state}`)); // as in the bars
      at += seconds(`time/${state}`);
      return { state, from, to: at, fill };
    })
    .filter((p) => p.to > p.from);
}

// Each rank with its roles: when its engine had samples, and the parts of the step it works in.
function rankLanes(run, samples, phases) {
  const list = (value) => (Array.isArray(value) ? value : []);
  const roles = Object.entries(run.starts.at(-1)?.ranks || {}).map(([role, replicas]) => [
    role,
    list(replicas).map(list),
  ]);
  const busy = generatingSpans(samples);
  const ranks = [...new Set(roles.flatMap(([, replicas]) => replicas.flat()))].filter(
    Number.isInteger,
  );
  return ranks
    .sort((a, b) => a - b)
    .slice(0, MAX_RANKS)
    .map((rank) => {
      const own = roles.filter(([, replicas]) => replicas.flat().includes(rank));
      const names = own.map(([role]) => role);
      const engines = own.filter(([role]) => role === "generate").flatMap(([, r]) => r);
      const spans = engines.flatMap((of, i) => (of.includes(rank) ? merged(busy[i] || []) : []));
      const works = (phase) => list(data.roles[phase.state]).some((role) => names.includes(role));
      const about = `rank ${rank} (${names.join(", ")}): `;
      return { rank, about, spans: [...phases.filter(works), ...spans] };
    });
}

// By replica of the engines, when samples were generated there.
function generatingSpans(samples) {
  const busy = {};
  for (const sample of samples) {
    const replicas = sample.replicas || (sample.turns || []).map((turn) => turn.replica);
    segments(sample)
      .filter((s) => s.state === "generating")
      .forEach((s, i) => (busy[replicas[i]] ||= []).push(s));
  }
  return busy;
}

// Spans that overlap, as one.
function merged(spans) {
  const found = [];
  for (const { from, to } of [...spans].sort((a, b) => a.from - b.from)) {
    const last = found.at(-1);
    if (last && from <= last.to) last.to = Math.max(last.to, to);
    else found.push({ state: "generating", from, to, fill: STATES.generating });
  }
  return found;
}

// Draws phases, ranks and lanes over `view`, which zooming and moving change.
function drawTimeline(body, lanes, phases, ranks, index, text) {
  const all = [...phases, ...lanes.flatMap((lane) => lane.segments)];
  const span = pageWidth();
  const first = all.reduce((low, s) => Math.min(low, s.from), Infinity);
  const end = all.reduce((high, s) => Math.max(high, s.to), first + 1e-3);
  const lane = Math.max(3, Math.min(12, 480 / lanes.length));
  const view = { from: first, to: end };
  const readout = el("div", { class: "readout" }, text);
  const top = RANKS_TOP + ranks.length * RANK_HEIGHT + 6;
  const svg = el("svg:svg", { viewBox: `0 0 ${span} ${top + lanes.length * lane + 4}` });
  const place = (t) =>
    Math.max(-5, Math.min(span + 5, ((t - view.from) / (view.to - view.from)) * span));
  const rect = (s, box, about, onclick) => {
    if (s.to < view.from || s.from > view.to) return [];
    const words = `${about}${STATE_WORDS[s.state] || s.state} ${number(s.to - s.from)} s, from ${number(s.from - first)} s on`;
    const width = Math.max(0.6, place(s.to) - place(s.from));
    const onpointermove = () => {
      readout.textContent = words;
    };
    return [
      el("svg:rect", { class: "bar", x: place(s.from), width, ...box, onclick, onpointermove }),
    ];
  };
  const draw = () =>
    svg.replaceChildren(
      ...timeGrid(view, first, place, span / 120),
      ...phases.flatMap((p) => [
        ...rect(p, { y: STEP_TOP, height: 14, fill: p.fill }, "the step: "),
        ...(place(p.to) - place(p.from) > 45
          ? [
              el(
                "svg:text",
                { x: Math.max(2, place(p.from) + 2), y: 25, style: { fill: "#fff" } },
                p.state,
              ),
            ]
          : []),
      ]),
      ...ranks.flatMap(({ rank, about, spans }, i) => {
        const y = RANKS_TOP + i * RANK_HEIGHT;
        const height = RANK_HEIGHT * 0.9,
          box = { y, height, "data-rank": rank };
        return [
          el("svg:rect", { x: 0, y, width: span, height, fill: STATES.aborted }), // nothing to do
          ...spans.flatMap((s) => rect(s, { ...box, "data-state": s.state, fill: s.fill }, about)),
          el("svg:text", { x: 2, y: y + 9, style: { fill: "#fff" } }, `rank ${rank}`),
        ];
      }),
      ...lanes.flatMap(({ sample, segments: parts }, i) => {
        const open = () => {
          location.hash = hash("sample", index, sample.name, sample.at);
        };
        const box = { y: top + i * lane, height: lane * 0.85 };
        const about = `${sample.prompt_id} #${sample.index}: `;
        return parts.flatMap((s) =>
          rect(s, { ...box, fill: STATES[s.state] || "#7a7f87" }, about, open),
        );
      }),
    );
  draw();
  body.replaceChildren(zoomControls(svg, view, { from: first, to: end }, draw), readout, svg);
}

function timeGrid(view, first, place, count) {
  return ticks(view.from - first, view.to - first, count).flatMap((t) => [
    el("svg:line", { class: "grid", x1: place(t + first), x2: place(t + first), y1: 0, y2: 9999 }),
    el("svg:text", { x: place(t + first) + 2, y: 9 }, `${tickText(t)} s`),
  ]);
}

// Buttons, wheel and dragging, which change `view` and draw anew.
function zoomControls(svg, view, whole, draw) {
  const show = (from, to) => {
    Object.assign(view, { from, to });
    draw();
  };
  const zoom = (factor, share = 0.5) => {
    const middle = view.from + (view.to - view.from) * share;
    show(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
  };
  const move = (share) => {
    const by = (view.to - view.from) * share;
    show(view.from + by, view.to + by);
  };
  svg.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
    },
    { passive: false },
  );
  svg.addEventListener("pointermove", (event) => {
    if (event.buttons) move(-event.movementX / svg.getBoundingClientRect().width);
  });
  const button = (name, act) => el("button", { onclick: act }, name);
  return el(
    "div",
    { class: "controls" },
    button("+", () => zoom(0.5)),
    button("−", () => zoom(2)),
    button("◀", () => move(-0.3)),
    button("▶", () => move(0.3)),
    button("all", () => show(whole.from, whole.to)),
  );
}
